"""`bench lived --endurance`: memory and time of a process that never repeats a call."""

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.configurations import normal
from benchmarks.libraries import Library, Step
from benchmarks.lived_loops import scaled, windowed
from benchmarks.report import Row
from tileattn.lru import Lru

PARTS = 10  # rows
LONGEST, HEADS, D = 256, 8, 64


def options(n: int, rng: np.random.Generator, B: int, Nk: int) -> dict[str, Any]:
    """Return the options of call n, which no other call has."""
    fresh = 1 + 1e-6 * n
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"causal": True},
        lambda: {"dropout_p": 0.1, "seed": n},
        lambda: {"scale": D**-0.5 * fresh},
        lambda: {"softcap": 20.0 * fresh},
        lambda: {"kv_lengths": rng.integers(0, Nk + 1, B).tolist()},
        lambda: {"window": (int(rng.integers(Nk)), int(rng.integers(Nk)))},
        lambda: {"score_mod": scaled(fresh)},
        lambda: {"mask_mod": windowed(1 + n), "q_offset": int(rng.integers(Nk))},
    ]
    return kinds[n % len(kinds)]()


def steps(xp: Any, dtype: str, first: int, count: int) -> Iterator[Step]:
    """Make calls of distinct shapes, seeds and functions; every fourth has both passes."""
    arrays = [normal(xp, (2, HEADS, LONGEST, D), dtype, n) for n in range(4)]
    rng = np.random.default_rng(first)
    for n in range(first, first + count):
        B, H = int(rng.integers(1, 3)), int(rng.integers(1, HEADS + 1))
        Nq, Nk = (int(x) for x in rng.integers(1, LONGEST + 1, 2))
        sizes = zip(arrays, (Nq, Nk, Nk, Nq), strict=True)
        rows = tuple(x[:B, :H, :N] for x, N in sizes)
        yield Step(rows[: 3 if n % 4 else 4], options(n // 4, rng, B, Nk))


def endurance(bench: Any, count: int) -> Iterator[Row]:
    """Yield a row for each part: microseconds a call, memory, entries of caches."""
    kinds: list[Library] = [x for x in bench.libraries if x.ours]
    sizes = bench.loops.sizes
    for part in range(PARTS):
        seconds = 0.0
        made = steps(bench.loops.xp, sizes.dtype, part * count // PARTS, count // PARTS)
        for n, step in enumerate(made):
            call = kinds[n % len(kinds)].prepare(step)
            assert call is not None
            start = time.perf_counter()
            call()
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        bench.queue.drain()
        seconds += time.perf_counter() - start
        row = {"section": "endurance", "calls": (part + 1) * count // PARTS}
        yield row | {"us": 1e6 * seconds / (count // PARTS)} | memory(bench.loops.xp) | entries()


def memory(xp: Any) -> Row:
    """Return the resident megabytes of the process, and those of the pools on a GPU."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    found: Row = {"host_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6}
    if xp is not np:
        found["cupy_mb"] = xp.get_default_memory_pool().total_bytes() / 1e6
        found["torch_mb"] = sys.modules["torch"].cuda.memory_reserved() / 1e6
    return found


def entries() -> Row:
    """Return the number of caches of tileattn, their entries and the largest."""
    found = []
    for x in gc.get_objects():  # isinstance() would ask lazy objects, which may warn
        if issubclass(type(x), Lru):
            found.append(len(x))
        elif type(x) is functools._lru_cache_wrapper and x.__module__.startswith("tileattn"):
            found.append(x.cache_info().currsize)
    return {"caches": len(found), "entries": sum(found), "largest": max(found)}
