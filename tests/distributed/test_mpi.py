"""The same through MPI, with processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 120
MPIEXEC = Path(sys.executable).with_name("mpiexec")

FAILING = """
import sys
from mpi4py import MPI
import numpy as np
import tileattn.distributed as dist
comm = MPI.COMM_WORLD
x = np.ones((1, 2, 6, 8), np.float16 if comm.rank == 1 else np.float32)
try:
    dist.forward(x, x, x, comm, timeout=30.0)
except Exception as error:
    sys.stdout.write(f"{type(error).__name__}: {error}\\n")
"""


@pytest.fixture(scope="module", autouse=True)
def mpi() -> None:
    pytest.importorskip("mpi4py", reason="pip install mpi4py mpich")
    if not MPIEXEC.exists():
        pytest.skip(f"there is no {MPIEXEC}: pip install mpich")


def on_ranks(ranks: int, *program: str) -> str:
    """Run a program on some ranks, each with one thread; return what they print."""
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, *program]
    one = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=os.environ | one, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_example(ranks: int) -> None:
    printed = on_ranks(ranks, str(ROOT / "examples" / "ring.py")).splitlines()
    assert printed == [
        f"{x} of {ranks} ranks is that of one call" for x in ("out", "dq", "dk", "dv")
    ]


@pytest.mark.parametrize("window", [(), ("--window", "40")])
def test_the_example_of_a_long_sequence(window: tuple[str, ...]) -> None:
    program = str(ROOT / "examples" / "long_context.py")
    head, *lines = on_ranks(2, program, "--length", "301", *window).splitlines()
    assert head == "301 tokens, 4 heads of 64, 2 ranks"
    pattern = (
        r"rank \d: forward [\d.]+ s, backward [\d.]+ s, peak memory \d+ MiB, \d+ of them since.*"
    )
    assert [bool(re.fullmatch(pattern, line)) for line in lines] == [True] * 2


def test_ranks_that_disagree() -> None:
    message = "dtype is float16 on rank 1, and float32 on rank 0; all ranks give the same"
    printed = on_ranks(2, "-c", FAILING).replace("\n\n", "\n").split("\n")
    assert printed == [f"ValueError: {message}"] * 2 + [""]
