"""Ranks with a GPU each share a sequence by NCCL; see nccl_ranks.py for the cases."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.on_gpu import needs_gpu

ROOT = Path(__file__).parents[2]
RANKS, SECONDS = 2, 300


def reason() -> str | None:
    """Why two ranks cannot run here."""
    try:
        import cupy
        from cupy.cuda import nccl

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy's own, of a driver that is not there
        return str(error)
    if count < RANKS:
        return f"there are {count} GPUs"
    return None if nccl.available else "there is no NCCL"


pytestmark = [*needs_gpu, pytest.mark.skipif(bool(reason()), reason=f"{reason()}")]


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_ranks(kind: str, tmp_path: Path) -> None:
    if kind == "torch":
        pytest.importorskip("torch.distributed")
    logs = [tmp_path / f"{rank}.log" for rank in range(RANKS)]
    command = [sys.executable, "-m", "tests.gpu.nccl_ranks", kind]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            given = [*command, str(rank), str(RANKS), str(tmp_path)]
            ranks.append(subprocess.Popen(given, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT))
    deadline = time.monotonic() + SECONDS
    try:
        while any(x.poll() is None for x in ranks) and time.monotonic() < deadline:
            if any(x.poll() for x in ranks):  # one has failed: give the others a moment
                deadline = min(deadline, time.monotonic() + 15)
            time.sleep(0.1)
    finally:
        late = [n for n, x in enumerate(ranks) if x.poll() is None]
        for x in ranks:
            x.kill()
            x.wait()
    said = "\n".join(f"--- rank {n}\n{log.read_text()[-4000:]}" for n, log in enumerate(logs))
    assert not late, f"ranks {late} did not end\n{said}"
    assert all(x.returncode == 0 for x in ranks), said
