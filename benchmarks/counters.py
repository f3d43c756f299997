"""HBM and L2 bytes of one forward and backward pass, by the hardware counters of the GPU.

Nsight Compute runs a child of this module: ``python -m benchmarks.counters --child CASE`` makes
the arrays, warms up, and computes the two passes once inside the range that is profiled.
"""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.configurations import draw
from benchmarks.memory import Case
from benchmarks.report import Row

DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2, TIME = "lts__t_bytes.sum", "gpu__time_duration.sum"
METRICS = (*DRAM, L2, TIME)
TIMEOUT = 600  # seconds

# Bytes or seconds of a unit, as older and newer versions of ncu write it.
UNITS = {
    **{f"{prefix}byte": 1e3**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    **{"second": 1.0, "msecond": 1e-3, "usecond": 1e-6, "nsecond": 1e-9},
}


def find_ncu() -> str | None:
    """Return the path of Nsight Compute: on PATH, or in a folder of the toolkit."""
    places = [
        *Path("/usr/local").glob("cuda*/bin/ncu"),
        *Path("/opt/nvidia/nsight-compute").glob("*/ncu"),
    ]
    return shutil.which("ncu") or next(map(str, sorted(places, reverse=True)), None)


def unavailable() -> str | None:
    if find_ncu() is None:
        return "Nsight Compute is not on PATH nor below /usr/local; it comes with the CUDA toolkit"
    return None


def command(ncu: str, log: Path, case: Case) -> list[str]:
    """Return the command that profiles a case and writes one line per kernel.

    Clocks and caches are left as they are, so that a kernel finds in the L2 cache what the one
    before it left there, as it does without a profiler.
    """
    return [
        *(ncu, "--clock-control", "none", "--cache-control", "none"),
        *("--profile-from-start", "off", "--target-processes", "all"),
        *("--metrics", ",".join(METRICS), "--csv", "--page", "raw", "--log-file", str(log)),
        *(sys.executable, "-m", "benchmarks.counters", "--child", case.text),
    ]


def measure(case: Case) -> Row:
    """Count the bytes of a case; raise RuntimeError if ncu is missing or fails."""
    ncu = find_ncu()
    if ncu is None:
        raise RuntimeError(f"ncu is missing: {unavailable()}")
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        done = subprocess.run(
            command(ncu, log, case),
            cwd=root,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
        said = log.read_text(encoding="utf-8") if log.exists() else ""
    if done.returncode or "==ERROR==" in said:
        raise RuntimeError(f"ncu ended with status {done.returncode}: {_complaint(said, done)}")
    return summed(said)


def summed(text: str) -> Row:
    """Sum the output of ncu over kernels: bytes of the passes, and milliseconds."""
    counts = list(kernels(text))
    if not counts:
        raise ValueError("ncu wrote of no kernel; expected some between profiler start and stop")
    totals = {name: sum(kernel[name] for kernel in counts) for name in METRICS}
    return {
        "dram_read_bytes": round(totals[DRAM[0]]),
        "dram_write_bytes": round(totals[DRAM[1]]),
        "l2_bytes": round(totals[L2]),
        "kernels_ms": 1e3 * totals[TIME],
        "kernels": len(counts),
    }


def kernels(text: str) -> Iterator[dict[str, float]]:
    """Yield the metrics of each kernel in bytes and seconds; skip lines outside the table."""
    table = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    head, units = next(table, []), next(table, [])
    for name in METRICS:
        if name not in head:
            raise ValueError(f"ncu wrote no {name}; got columns {head}, expected {list(METRICS)}")
    places = {name: head.index(name) for name in METRICS}
    for row in table:
        yield {name: _value(name, row[i], units[i]) for name, i in places.items()}


def _value(name: str, text: str, unit: str) -> float:
    if unit not in UNITS:
        raise ValueError(f"{name} has the unit {unit!r}; expected one of {', '.join(UNITS)}")
    try:
        return float(text.replace(",", "")) * UNITS[unit]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected a number: the GPU may lack it") from None


def _complaint(said: str, done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of the child, and ncu's first error."""
    lines = (said + done.stdout).splitlines()
    errors = [line.removeprefix("==ERROR== ") for line in lines if line.startswith("==ERROR==")]
    return "; ".join(done.stderr.strip().splitlines()[-1:] + errors[:1]) or "nothing was said"


def child(case: Case) -> None:
    """Compute the passes once to warm up, and once to be profiled."""
    from cupy.cuda import profiler

    from benchmarks.device import Gpu

    device = Gpu()
    inputs = draw(device.xp, case.configuration.shapes, case.configuration.dtype)
    synchronize = device.xp.cuda.Device().synchronize
    call = case.prepared(inputs, device.xp)
    call()
    synchronize()
    profiler.start()
    call()
    synchronize()
    profiler.stop()


if __name__ == "__main__":
    if sys.argv[1:2] != ["--child"] or len(sys.argv) != 3:
        sys.exit("run `python -m tileattn bench traffic`; this module only serves it")
    child(Case.read(sys.argv[2]))
