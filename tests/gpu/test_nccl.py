"""Ranks with a GPU each share a sequence by NCCL; see nccl_ranks.py for the cases.

python -m pytest tests/gpu/test_nccl.py -s  # shows which case runs
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.on_gpu import needs_gpu

ROOT = Path(__file__).parents[2]
RANKS, SECONDS = 2, 180


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


def show(log: Path, shown: int) -> int:
    """Show what a log has beyond so many characters; give how many there are."""
    text = log.read_text()
    sys.stdout.write(text[shown:])
    sys.stdout.flush()
    return len(text)


def ended(kind: str, what: str, folder: Path) -> tuple[list[int | None], str]:
    """Run all ranks; give their statuses, None of those that did not end, and what they said."""
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    command, shown = [sys.executable, "-m", "tests.gpu.nccl_ranks", kind, what], 0
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            given = [*command, str(rank), str(RANKS), str(folder)]
            ranks.append(subprocess.Popen(given, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT))
    deadline = time.monotonic() + SECONDS
    try:
        while any(x.poll() is None for x in ranks) and time.monotonic() < deadline:
            if any(x.poll() for x in ranks):  # one has failed: give the others a moment
                deadline = min(deadline, time.monotonic() + 15)
            time.sleep(0.1)
            shown = show(logs[0], shown)
        show(logs[0], shown)
    finally:
        statuses = [x.poll() for x in ranks]
        for x in ranks:
            x.kill()
            x.wait()
    said = (f"--- rank {n}\n{log.read_text()[-4000:]}" for n, log in enumerate(logs))
    return statuses, "\n".join(said)


@pytest.fixture(params=["cupy", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    """Whose communicator sends."""
    if request.param == "torch":
        pytest.importorskip("torch.distributed", reason="PyTorch is optional")
    return str(request.param)


def test_ranks(kind: str, tmp_path: Path) -> None:
    statuses, said = ended(kind, "cases", tmp_path)
    assert statuses == [0] * RANKS, said


def test_a_rank_that_is_killed(kind: str, tmp_path: Path) -> None:
    """The other one raises TimeoutError, and ends."""
    statuses, said = ended(kind, "killed", tmp_path)
    assert statuses == [0, -signal.SIGKILL], said
