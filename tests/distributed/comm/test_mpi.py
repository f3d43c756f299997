"""Ranks that are processes, with MPI."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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

# Rank 1 is late, and rank 2 does not wait. The memory of what rank 2 has posted must stay its own:
# arrays that are made later would get the message.
LATE = """
import gc, os, sys, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
import tileattn
import tileattn.distributed as dist
from tileattn.backends.numpy.backend import NumpyBackend
comm, other = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()
class Slow(NumpyBackend):
    name = "slow"
    def forward(self, *args, **more):
        if comm.rank == 1:
            time.sleep(1.5)
        return super().forward(*args, **more)
tileattn.register_backend(Slow())
q, k = (np.full((1, 1, n, 64), 7.0, np.float32) for n in (64, int(sys.argv[1])))
def message():
    try:
        dist.forward(q, k, k, comm, layout_k="contiguous", backend="slow", timeout=timeout)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"
timeout = 0.5 if comm.rank == 2 else 5.0
found = [message()]
if comm.rank == 2:
    gc.collect()
    mine = [np.zeros_like(k) for _ in range(40)]
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        comm.Iprobe()
        time.sleep(0.01)
    found += [f"{sum(x.any() for x in mine)} of mine changed", message()]
Path(sys.argv[2], f"rank {comm.rank}").write_text("\\n".join(found), encoding="utf-8")
end = other.Ibarrier()
while not end.Test():  # a wait of MPI's own would take all of a core
    time.sleep(0.01)
# MPI would wait for messages that do not come. mpiexec may kill ranks that have not left yet, and
# lose what they printed, so each has written a file.
os._exit(0)
"""


@pytest.fixture(scope="module", autouse=True)
def mpi() -> None:
    pytest.importorskip("mpi4py", reason="pip install mpi4py mpich")
    if not MPIEXEC.exists():
        pytest.skip(f"there is no {MPIEXEC}: pip install mpich")


def on_ranks(ranks: int, *program: str, check: bool = True) -> str:
    """Run a program on some ranks, each with one thread; return what they print."""
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, *program]
    one = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=os.environ | one, check=False
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
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
    message = "dtype must be the same on all ranks; got float16 on rank 1, and float32 on rank 0"
    printed = on_ranks(2, "-c", FAILING).replace("\n\n", "\n").split("\n")
    assert printed == [f"ValueError: {message}"] * 2 + [""]


@pytest.mark.slow
def test_what_arrives_after_a_timeout_is_written_nowhere_else(tmp_path: Path) -> None:
    def run(keys: str) -> list[str]:
        (folder := tmp_path / keys).mkdir()
        on_ranks(3, "-c", LATE, keys, str(folder), check=False)
        return [(folder / f"rank {rank}").read_text(encoding="utf-8") for rank in (0, 2)]

    keys = "60", "3000"  # short messages are copied, long ones read in place
    with ThreadPoolExecutor() as pool:  # the ranks do little but wait
        said = [*pool.map(run, keys)]
    for of_first, of_last in said:
        assert of_first == "returned"
        timeout, changed, again = of_last.split("\n")
        assert changed == "0 of mine changed"
        assert timeout.startswith("TimeoutError: waited 0.5 s for rank")
        failed = "RuntimeError: comm must be a new communicator: an earlier call on it failed"
        assert failed in again
