"""Peak resident memory of one case, in a process of its own.

``python -m benchmarks.memory_cpu CASE`` measures the case, given as JSON, and prints JSON.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.gpu_device import DTYPES, Inputs
from benchmarks.memory_case import Case
from benchmarks.report import Row

PROCESS = Path("/proc/self")
WARM_UP = 64  # tokens


def unavailable() -> str | None:
    """Why nothing can be measured here."""
    if (PROCESS / "clear_refs").exists():
        return None
    return f"peak memory is read from {PROCESS}/status, which only Linux has; got {sys.platform}"


def room() -> int:
    """Bytes of physical memory that a new process can have without swapping."""
    return _kib(Path("/proc/meminfo"), "MemAvailable") * 1024


def peak(case: Case) -> Row:
    """Measure a case in a process of its own, which has nothing else to remember."""
    command = [sys.executable, "-m", "benchmarks.memory_cpu", case.text]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise RuntimeError(f"the process ended with status {done.returncode}: {said}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(case: Case) -> Row:
    """Bytes that this process had at most, beyond what it had with the inputs."""
    small = replace(case, N=min(case.N, WARM_UP))
    small.run(_inputs(small), np)  # loads what is lazy
    inputs = _inputs(case)
    (PROCESS / "clear_refs").write_text("5", encoding="ascii")  # the peak is now what there is
    before = _kib(PROCESS / "status", "VmRSS")
    start = time.perf_counter()
    results = case.run(inputs, np)
    seconds = time.perf_counter() - start
    most = _kib(PROCESS / "status", "VmHWM")
    del results
    return {"peak_bytes": (most - before) * 1024, "seconds": seconds}


def _inputs(case: Case) -> Inputs:
    drawn = np.float64 if case.dtype == "f64" else np.float32
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(shape, drawn) for shape in case.shapes)
    return Inputs(*(x.astype(DTYPES[case.dtype], copy=False) for x in values))


def _kib(path: Path, field: str) -> int:
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    print(json.dumps(measure(Case.read(sys.argv[1]))))
