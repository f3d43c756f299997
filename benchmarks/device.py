"""The CUDA device of the benchmarks: arrays, timing, description."""

import itertools
import math
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

import tileattn
from benchmarks import peers
from benchmarks.configurations import DTYPES, Call, Configuration, Inputs, Shapes, draw
from benchmarks.implementations import Implementation
from benchmarks.tensors import arrays

# Two right answers of 16-bit types differ by the rounding of P, of dS and of the result.
AGREEMENT = {"bf16": 2e-2, "fp16": 3e-3, "f32": 1e-5, "f64": 1e-12}

LEAST_SECONDS, MOST_SECONDS = 0.05, 0.25  # length of a measurement
SETTLE_SECONDS = 0.3  # until a busy GPU has reached the clocks of its power limit
LEAST_CALLS, MOST_CALLS = 10, 1000
LEAST_ROUNDS, MOST_ROUNDS = 3, 30  # rounds of calls that are timed separately
L2_CYCLE = 4  # a cycle through the input sets reads this many times the L2
LONGEST_WAIT = 0.05  # seconds; CUDA queues about a thousand launches, which take the host as long
COPY_BYTES = 1 << 30


class Gpu:
    """The current CUDA device.

    Everything runs on the legacy default stream, the default of CuPy and of PyTorch, so that events
    of one library enclose the work of the other.
    """

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self._host_seconds = 0.0  # of a call of the last sample

    @classmethod
    def required(cls) -> "Gpu":
        """Return the device; without one, print why and exit."""
        reason = tileattn.available_backends()["cupy"]
        if reason is not None:
            sys.exit(f"there is nothing to time: the cupy backend cannot run here: {reason}")
        return cls()

    @lru_cache(maxsize=1)  # noqa: B019 - one device lives as long as the program
    def inputs(self, shapes: Shapes, dtype: str) -> tuple[Inputs, ...]:
        """Draw `sets` sets of inputs."""
        sets = self.sets(sum(map(math.prod, shapes)) * DTYPES[dtype].itemsize)
        return tuple(draw(self.xp, shapes, dtype, n * len(shapes)) for n in range(sets))

    def sets(self, set_bytes: int) -> int:
        """Return how many sets of inputs exceed the L2 cache several times."""
        cycle: int = L2_CYCLE * self._properties["l2CacheSize"]
        return max(1, -(-cycle // set_bytes))

    def replayed(self, call: Call) -> Call:
        """Capture a call in a CUDA graph with its own memory."""
        pool = self.xp.cuda.MemoryPool()
        with (
            self.xp.cuda.Stream(non_blocking=True) as stream,
            self.xp.cuda.using_allocator(pool.malloc),
        ):
            call()
            stream.synchronize()
            stream.begin_capture()
            out = call()
            graph = stream.end_capture()

        def replay() -> Any:
            graph.launch(self.xp.cuda.get_current_stream())
            return out, pool, call  # which live as long as the graph, with the call's arrays

        return replay

    def time(self, calls: Sequence[Call]) -> list[float]:
        """Return the device seconds of each call; the calls take turns and are warmed up.

        Clocks rise in the first milliseconds after a pause, and fall as the device draws power.
        Only when they have settled does it not matter who is timed after a pause.
        """
        for call in calls:
            call()
        count = repeats(min(self._sample(calls, 3)))
        busy = 0.0
        while busy < SETTLE_SECONDS:
            busy += sum(self._sample(calls, count))
        return self._sample(calls, count)

    def time_each(self, calls: Sequence[Call]) -> list[list[float]]:
        """Return the device seconds of calls timed separately; otherwise as `time`.

        They take turns, so that a drift of the clocks falls on all of them.
        """
        for call in calls:
            call()
        rounds = int(MOST_SECONDS / sum(self._sample(calls, len(calls))))
        count = len(calls) * min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)
        busy = 0.0
        while busy < SETTLE_SECONDS:
            busy += sum(self._sample(calls, len(calls)))
        times = self._sample(calls, count)
        return [times[n :: len(calls)] for n in range(len(calls))]

    def _sample(self, calls: Sequence[Call], count: int) -> list[float]:
        """Return the device seconds of calls in turn.

        The GPU begins when the host has queued as much as it can: otherwise the times of short
        calls would contain gaps in which the GPU waits for a library's code on the host.
        """
        event = self.xp.cuda.Event
        pairs = [(event(), event()) for _ in range(count)]
        begin = time.perf_counter()
        self.wait(min(count * self._host_seconds, LONGEST_WAIT))
        for (start, stop), call in zip(pairs, itertools.cycle(calls), strict=False):
            start.record()
            call()
            stop.record()
        self._host_seconds = (time.perf_counter() - begin) / count
        pairs[-1][1].synchronize()
        return [self.xp.cuda.get_elapsed_time(*pair) / 1e3 for pair in pairs]

    def wait(self, seconds: float) -> None:
        """Keep the GPU busy for a time, without power or memory."""
        nanoseconds = np.int64(1e9 * seconds)
        _spin()((1,), (1,), (nanoseconds,))

    def launch_overhead(self, call: Call, count: int = 100, rounds: int = 9) -> float:
        """Return the CPU launch overhead in seconds, per call of many in a row."""
        times = []
        for _ in range(rounds + 1):
            self.xp.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - start) / count)
        return median(times[1:])

    def copy_rate(self) -> float:
        """Return the bytes per second that a device-to-device copy reads and writes."""
        source = self.xp.arange(COPY_BYTES // 8, dtype=np.float64)
        target = self.xp.empty_like(source)
        return 2 * COPY_BYTES / median(self.time([lambda: self.xp.copyto(target, source)]))

    def release(self) -> None:
        """Free unused memory, so that one library's pool does not starve the other."""
        self.xp.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def machine(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")  # loaded where it took part
        cuda = self.xp.cuda.runtime.runtimeGetVersion()
        attributes = self.xp.cuda.Device().attributes
        return {
            "gpu": self._properties["name"].decode(),
            "multiprocessors": attributes["MultiProcessorCount"],
            "clock_mhz": attributes["ClockRate"] / 1e3,  # the highest, which a load may not hold
            "driver": _driver(),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "system": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cupy": self.xp.__version__,
            "torch": None if torch is None else torch.__version__,
            "peers": peers.versions(),
        }


@lru_cache(maxsize=1)
def _spin() -> Any:
    """Return a kernel that runs for so many nanoseconds."""
    import cupy

    source = r"""
    extern "C" __global__ void spin(long long duration) {
        long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        while (now - start < duration);
    }"""
    return cupy.RawKernel(source, "spin")


def repeats(seconds: float) -> int:
    """Return how often to time a call of about this length."""
    wanted = max(LEAST_CALLS, math.ceil(LEAST_SECONDS / seconds))
    affordable = max(3, int(MOST_SECONDS / seconds))
    return min(wanted, affordable, MOST_CALLS)


def prepare(
    implementation: Implementation, configuration: Configuration, inputs: Sequence[Inputs]
) -> list[Call]:
    """Return one call for each set of inputs."""
    forward = configuration.kind == "forward"
    make = implementation.forward if forward else implementation.backward
    return [make(x, configuration.mask) for x in inputs[: 1 if implementation.quadratic else None]]


def measure(
    implementation: Implementation, configuration: Configuration, device: Gpu
) -> tuple[list[float], list[Any]]:
    """Return the seconds of each repeat, and the results for the first set of inputs."""
    inputs = device.inputs(configuration.shapes, configuration.dtype)
    with implementation.context():
        calls = prepare(implementation, configuration, inputs)
        return device.time(calls), arrays(calls[0](), device.xp)


def in_turns(implementation: Implementation, configuration: Configuration, device: Gpu) -> Call:
    """Return a call that cycles through the sets of inputs."""
    inputs = device.inputs(configuration.shapes, configuration.dtype)
    with implementation.context():
        calls = itertools.cycle(prepare(implementation, configuration, inputs))

    def call() -> Any:
        with implementation.context():
            return next(calls)()

    return call


def difference(found: list[Any], expected: list[Any], xp: Any) -> float:
    """Return the largest relative Frobenius distance of two lists of arrays; NaN propagates."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        a64, b64 = (x.astype(np.float64).ravel() for x in (a, b))
        errors.append(float(xp.linalg.norm(a64 - b64) / xp.linalg.norm(b64)))
    return float(np.max(errors))  # max() would lose a NaN


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()
