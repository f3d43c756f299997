"""Peak memory by sequence length: naive attention, which stores N x N, and tileattn.

    python -m tileattn bench memory                  on the GPU if there is one, else on the CPU
    python -m tileattn bench memory --device cpu --limit-seconds 60

The files are memory_cpu.json and memory_gpu.json.

A peak includes outputs and workspace, but not inputs. ``both`` is a forward pass followed by a
backward pass. A size that does not fit, or would take longer than the limit, is not run; its row
has the bytes that it needs. On the CPU each case runs in its own process, whose peak the system
records; on the GPU the allocator counts.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tileattn
from benchmarks import gpu_tiles, report
from benchmarks.configurations import DTYPES, Call, Configuration, Inputs, draw
from benchmarks.device import Gpu
from benchmarks.implementations import Implementation, Naive, NaiveTorch, Tileattn
from benchmarks.report import Row
from tileattn.kernels.cuda.tile_sizes import TileSize

LENGTHS = tuple(512 << i for i in range(10))  # to 262,144
DTYPE = {"cpu": "f32", "gpu": "fp16"}
HEADS = {"cpu": 1, "gpu": 8}
NAMES = ("naive", "tileattn")
PASSES = ("forward", "both")
PROCESS = Path("/proc/self")
WARM_UP = 64  # tokens

# N x N arrays that are there at once in a forward pass, and in both. CuPy multiplies batches of
# 16 bits in float32, and copies what is transposed.
SQUARES = {
    "numpy": (1, 2),
    "cupy": (1, 3),
    "cupy, 16 bits": (3, 4),
    "pytorch": (2, 3),
    "tileattn": (0, 0),
}


@dataclass(frozen=True)
class Case:
    """One implementation on one configuration."""

    device: str  # cpu or gpu
    name: str  # naive, pytorch or tileattn
    configuration: Configuration
    tile: tuple[Any, ...] = ()  # a kernel and the numbers of its TileSize, where given

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Case":
        device, name, configuration, tile = json.loads(text).values()
        return cls(device, name, Configuration(**configuration), tuple(tile))

    @property
    def inputs(self) -> int:
        """Return the bytes of the inputs; dout counts in both passes."""
        one = self.configuration
        return sum(map(math.prod, one.shapes)) * DTYPES[one.dtype].itemsize

    @property
    def needs(self) -> int:
        """Return the bytes of inputs, outputs and N x N arrays, a lower bound."""
        one, size = self.configuration, DTYPES[self.configuration.dtype].itemsize
        rows = one.B * one.H * one.N
        outputs = (1 if one.kind == "forward" else 4) * rows * one.D * size
        lse = rows * max(size, 4) if self.name == "tileattn" else 0
        library = self.name
        if library == "naive":
            library = "numpy" if self.device == "cpu" else f"cupy{', 16 bits' * (size == 2)}"
        squares = SQUARES[library][PASSES.index(one.kind)] * rows * one.N * size
        return self.inputs + outputs + lse + squares

    def refusal(self, free: int) -> Row:
        """Return the fields that say why the case is not run; empty if the free bytes suffice."""
        if self.needs <= free:
            return {}
        reason = f"needs {self.needs / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        return {"needs_bytes": self.needs, "free_bytes": free, "not_run": reason}

    def prepared(self, inputs: Inputs, xp: Any) -> Call:
        """Return the call that computes the passes; its result keeps the outputs alive."""
        if self.tile:
            kernel, *tile = self.tile
            return gpu_tiles.prepared(kernel, TileSize(*tile), inputs)
        makers: dict[str, Callable[[], Implementation]] = {
            "naive": lambda: Naive(xp),
            "pytorch": NaiveTorch,
            "tileattn": lambda: Tileattn(reuse=False),
        }
        one, mask = makers[self.name](), self.configuration.mask
        if self.configuration.kind == "forward":
            return one.forward(inputs, mask)

        def both() -> Any:
            return one.backward(inputs, mask)()  # what prepares it runs the forward pass

        return both

    def run(self, inputs: Inputs, xp: Any) -> Any:
        return self.prepared(inputs, xp)()


# --- on the CPU -----------------------------------------------------------------------------------


def unavailable() -> str | None:
    if (PROCESS / "clear_refs").exists():
        return None
    return f"peak memory is read from {PROCESS}/status, which only Linux has; got {sys.platform}"


def cpu_free() -> int:
    """Return the bytes of memory that a new process can use without swapping."""
    return _kib(Path("/proc/meminfo"), "MemAvailable") * 1024


def cpu_peak(case: Case) -> Row:
    """Measure a case in its own process."""
    return report.of_process("benchmarks.memory", case.text)


def child(case: Case) -> Row:
    """Return the peak bytes of this process, less those with the inputs only."""
    one = case.configuration
    small = replace(one, N=min(one.N, WARM_UP))
    replace(case, configuration=small).run(draw(np, small.shapes, small.dtype), np)  # loads code
    inputs = draw(np, one.shapes, one.dtype)
    (PROCESS / "clear_refs").write_text("5", encoding="ascii")  # the peak is now what there is
    before = _kib(PROCESS / "status", "VmRSS")
    start = time.perf_counter()
    results = case.run(inputs, np)
    seconds = time.perf_counter() - start
    most = _kib(PROCESS / "status", "VmHWM")
    del results
    return {"peak_bytes": (most - before) * 1024, "seconds": seconds}


def _kib(path: Path, field: str) -> int:
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# --- on the GPU -----------------------------------------------------------------------------------


class Counting:
    """An allocator that records the peak of a pool.

    Use only grows when memory is asked for, so it is looked at there and nowhere else.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.peak = 0

    def malloc(self, nbytes: int) -> Any:
        pointer = self._pool.malloc(nbytes)
        self.peak = max(self.peak, self._pool.used_bytes())
        return pointer


def gpu_free(device: Gpu) -> int:
    device.release()
    free: int = device.xp.cuda.Device().mem_info[0]
    return free


def gpu_peak(device: Gpu, case: Case) -> Row:
    """Measure a case; its inputs come from another pool."""
    cuda = device.xp.cuda
    inputs = draw(device.xp, case.configuration.shapes, case.configuration.dtype)
    case.run(inputs, device.xp)  # compiles and loads code
    device.release()
    pool = cuda.MemoryPool()
    counting = Counting(pool)
    cuda.Device().synchronize()
    start = time.perf_counter()
    try:
        with cuda.using_allocator(counting.malloc):
            results = case.run(inputs, device.xp)
            cuda.Device().synchronize()
        seconds = time.perf_counter() - start
        del results
    finally:
        pool.free_all_blocks()
    return {"peak_bytes": counting.peak, "seconds": seconds}


# --- the benchmark --------------------------------------------------------------------------------


def rows(
    cases: Sequence[Case], free: Callable[[], int], peak: Callable[[Case], Row], limit: float
) -> Iterator[Row]:
    """Measure every case that fits into memory and time; record why others do not.

    Cases go from few tokens to many: the time of one is extrapolated from the last of its kind.
    """
    last: dict[tuple[str, str], tuple[int, float]] = {}
    for case in cases:
        one = case.configuration
        row = {"device": case.device, "implementation": case.name, **one.row()}
        row |= {"inputs_bytes": case.inputs, "needs_bytes": case.needs}
        N, seconds = last.get((case.name, one.kind), (one.N, 0.0))
        expected = seconds * (one.N / N) ** 2
        if refusal := case.refusal(free()):
            yield row | refusal
        elif expected > limit:
            reason = f"would take about {expected:.0f} s, more than --limit-seconds {limit:g}"
            yield row | {"not_run": reason}
        else:
            try:
                measured = peak(case)
            except Exception as error:
                yield row | {"failed": report.one_line(error)}
            else:
                last[case.name, one.kind] = one.N, measured["seconds"]
                yield row | measured


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    parser = report.parser("memory", __doc__)
    add = parser.add_argument
    add("--device", choices=tuple(DTYPE), help="(the GPU if there is one)")
    add("--limit-seconds", type=float, default=30.0, help="of one case (30)")
    add("--heads", type=int, help="(1 on the CPU, 8 on the GPU)")
    add("--head-dim", type=int, default=64, help="(64)")
    add("--dtype", choices=tuple(DTYPES), help="(f32 on the CPU, fp16 on the GPU)")
    add("--length", type=int, nargs="+", default=LENGTHS, help="(512 to 262144)")
    arguments = report.parsed(parser, argv)
    missing = tileattn.available_backends()["cupy"]
    device = arguments.device or ("cpu" if missing else "gpu")
    if device == "gpu" and missing:
        sys.exit(f"no GPU to measure: {missing}; --device cpu measures NumPy")
    if device == "cpu" and (why := unavailable()):
        sys.exit(why)
    dtype, H = arguments.dtype or DTYPE[device], arguments.heads or HEADS[device]
    cases = [
        Case(device, name, Configuration(kind, dtype, 1, H, N, arguments.head_dim))
        for N in sorted(arguments.length)
        for name in NAMES
        for kind in PASSES
    ]
    free, peak, machine = cpu_free, cpu_peak, report.host
    if device == "gpu":
        gpu = Gpu()
        free, peak, machine = partial(gpu_free, gpu), partial(gpu_peak, gpu), gpu.machine
    path = arguments.to / f"memory_{device}.json"
    measured = rows(cases, free, peak, arguments.limit_seconds)
    report.written(measured, path, machine, arguments.ran)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(Case.read(sys.argv[2]))))
    else:
        main()
