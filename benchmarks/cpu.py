"""Speed on the CPU, beside PyTorch and naive NumPy, in one run.

    python -m tileattn bench cpu

The file is cpu.json.

Implementations take turns in one process, with the same number of threads; a time is the median of
the rounds. ``lower_bound`` is what NumPy's own matmuls and exponentials take on tiles of that size,
with nothing else: no pass built on them is faster. FLOPs are 4 B H Nq Nk D forward, half of it for
causal, and 2.5 times that backward.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import threadpoolctl

import tileattn
from benchmarks import report
from benchmarks.configurations import PASSES, Call, Configuration, draw, normal
from benchmarks.implementations import Implementation, Naive, Sdpa, Tileattn
from tileattn.backends import threads
from tileattn.backends.numpy import backend as numpy_backend
from tileattn.backends.numpy.blas import single_threaded

PAUSE = 0.004  # lets the threads of the last implementation go to sleep

Calls = dict[str, Callable[[], Any]]


def prepared(one: Configuration, implementation: Implementation) -> Call:
    """Prepare a pass of an implementation; all get the same inputs."""
    make = implementation.forward if one.kind == "forward" else implementation.backward
    return make(draw(np, one.shapes, one.dtype), one.mask)


def lower_bound(one: Configuration) -> Call:
    """Only the matmuls and exponentials that a pass needs, on all threads.

    There are 2 matmuls forward and 5 backward. A causal pass is counted as half the tiles.
    """
    N, D = one.N, one.D
    rows, keys, matmuls = min(384, N), min(1024, N), 2 if one.kind == "forward" else 5
    tiles = one.H * N * N / (rows * keys) * one.density
    q, k = normal(np, (rows, D), "f32") / D, normal(np, (keys, D), "f32")

    def work(count: int) -> None:
        s, out = np.empty((rows, keys), np.float32), np.empty((rows, D), np.float32)
        for _ in range(count):
            for matmul in range(matmuls):
                if matmul % 2:
                    np.matmul(s, k, out=out)
                else:
                    np.matmul(q, k.T, out=s)
            np.exp(s, out=s)

    workers = threads.worker_count()
    part = max(1, round(tiles / workers))
    return lambda: threads.run([lambda: work(part)] * workers, within=single_threaded)


def median_seconds(calls: Calls, seconds: float) -> dict[str, float]:
    """Median seconds of each call; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, call in calls.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def configurations() -> list[Configuration]:
    """List what the table has a row for."""
    grid = [
        Configuration(kind, "f32", 1, 8, N, D, causal)
        for kind in PASSES
        for D in (64, 128)
        for N in (1024, 4096)
        for causal in (False, True)
    ]
    return grid + [Configuration("forward", "f32", 1, 4, 64, 64, x) for x in (False, True)]


def row_of(one: Configuration, torch: Implementation | None, seconds: float) -> report.Row:
    calls = {"tileattn": prepared(one, Tileattn(reuse=False))}
    if one.kind == "forward":
        calls["numpy"] = prepared(one, Naive(np))
    if torch is not None:
        calls["torch"] = prepared(one, torch)
    if one.N >= 1024:
        calls["lower_bound"] = lower_bound(one)
    times = median_seconds(calls, seconds)
    ours = times["tileattn"]
    return one.row() | {
        "gflops": {name: round(one.flops / t / 1e9, 1) for name, t in times.items()},
        "speedup_over": {n: round(t / ours, 3) for n, t in times.items() if n != "tileattn"},
    }


def tile_calls(one: Configuration, tiles: list[tuple[int, int]]) -> Calls:
    """One pass of the NumPy backend for each size of its tiles."""
    calls: Calls = {}
    for tile in tiles:
        backend = numpy_backend.NumpyBackend(tile, tile)
        backend.name = f"tile{tile[0]}x{tile[1]}"
        tileattn.register_backend(backend)
        calls[backend.name] = prepared(one, Tileattn(reuse=False, backend=backend.name))
    return calls


def core_rates() -> list[dict[str, float]]:
    """Rate of the matmuls of a tile and time of one exponential, on one core alone."""
    rows, keys = 384, 1024
    rates = []
    for D in (64, 128):
        q, k = normal(np, (rows, D), "f32") / D, normal(np, (keys, D), "f32")
        s, out = np.empty((rows, keys), np.float32), np.empty((rows, D), np.float32)
        calls: Calls = {
            "scores": partial(np.matmul, q, k.T, out=s),
            "exp": partial(np.exp, s, out=np.empty_like(s)),
            "values": partial(np.matmul, np.ones_like(s), k, out=out),
        }
        with threadpoolctl.threadpool_limits(1, "blas"):
            times = median_seconds(calls, 2.0)
        flops = 4 * rows * keys * D
        gflops = flops / (times["scores"] + times["values"]) / 1e9
        rates.append({"D": D, "gflops": gflops, "exp_ns": times["exp"] / (rows * keys) * 1e9})
    return rates


def baseline() -> tuple[Implementation | None, dict[str, str]]:
    """PyTorch with as many threads as tileattn, or None and what is missing."""
    try:
        made = Sdpa()
    except ImportError:
        return None, {"torch": "it is not installed: pip install torch"}
    sys.modules["torch"].set_num_threads(threads.worker_count())
    return made, {}


def main(argv: list[str] | None = None) -> None:
    """Time every configuration and write the speedups."""
    parser = report.parser("cpu", __doc__)
    parser.add_argument("--name", default="cpu", help="file of the results (cpu)")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each configuration (6)")
    arguments = report.parsed(parser, argv)
    torch, missing = baseline()
    report.show_missing(missing)
    machine = report.host() | {"torch": sys.modules["torch"].__version__ if torch else None}
    rows = (row_of(one, torch, arguments.seconds) for one in configurations())
    path, more = arguments.to / f"{arguments.name}.json", {"missing": missing, "core": core_rates()}
    report.written(rows, path, machine, arguments.ran, **more)


if __name__ == "__main__":
    main()
