"""The first programs of the page about several GPUs run, here with one rank and on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r'^=== "(\w+) on.*?"\n\n    ```\{ \.py \}\n(.*?)^    ```$', PAGE, re.M | re.S)
ON_THE_CPU = {
    '"nccl"': '"gloo", "file://" + __file__ + ".store", rank=0, world_size=1',
    "torch.cuda.set_device(torch.distributed.get_node_local_rank())": "",
    '"cuda"': '"cpu"',
    "4096": "64",
}


@pytest.mark.slow
@pytest.mark.parametrize(("library", "text"), PROGRAMS, ids=[library for library, _ in PROGRAMS])
def test_a_first_program_runs(library: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip({"NumPy": "mpi4py", "PyTorch": "torch"}[library])
    program = dedent(text)
    if library == "PyTorch":
        for gpu, cpu in ON_THE_CPU.items():
            assert gpu in program
            program = program.replace(gpu, cpu)
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, path], check=True, env=env, timeout=60)


def test_both_programs_are_found() -> None:
    assert [library for library, _ in PROGRAMS] == ["PyTorch", "NumPy"]
