"""Speed on the CPU: both backends, beside PyTorch, OpenVINO, ONNX Runtime and naive NumPy.

    python -m tileattn bench cpu                         everything: about twelve minutes
    python -m tileattn bench cpu --quick                 small sizes: about a minute
    python -m tileattn bench cpu --only grid,decoding    some of the sections

grid: both passes, all sizes and dtypes    small: calls of 16 tokens
decoding: one query over a cache           caches: the same, of 16 and of 8 bits, in pages
options: overhead of each option           scaling: more and more threads
ceilings: matmuls and copies of NumPy

The file is cpu.json, or NAME.json.

Implementations take turns in one process, with the same number of threads. Each turn starts with a
pause of 0.1 s, because the threads of OpenBLAS and PyTorch spin after a call. Then come calls for
0.05 s, of which the last one is timed. A time is the shortest of all rounds: other guests of a host
can halve the speed of a core. FLOPs are 4 B H N N D forward, half of it for causal, and 2.5 times
that backward, whatever an implementation computes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import numpy as np
import threadpoolctl

import tileattn
from benchmarks import report
from benchmarks.configurations import (
    PASSES,
    Call,
    Configuration,
    Inputs,
    draw,
    normal,
    option_cases,
    sparse_cases,
)
from benchmarks.engines import ENGINES, Engine
from benchmarks.implementations import Implementation, Naive, Peer, Tileattn
from benchmarks.libraries import Sdpa
from benchmarks.report import Row
from tileattn.backends import threads
from tileattn.dtypes import CACHE_DTYPES

PAUSE = 0.1  # seconds: so long do idle threads of OpenBLAS spin before they sleep
WARMUP = 0.05  # seconds, in which cores wake up
OURS = ("llvm", "numpy")
OTHERS = ("torch", "openvino", "onnxruntime", "naive")
PAIRS = (("llvm", "numpy"), *(("llvm", name) for name in OTHERS), ("numpy", "torch"))
TITLES = {
    "torch": "PyTorch",
    "openvino": "OpenVINO",
    "onnxruntime": "ONNX Runtime",
    "naive": "naive NumPy",
}
LONGEST_NAIVE = 4096
DECODED, SMALL, PAGE = 4096, 16, 16  # keys; tokens; keys of a page

Calls = dict[str, Call]
Times = dict[str, float]


# --- time -----------------------------------------------------------------------------------------


def shortest_seconds(calls: Calls, seconds: float) -> Times:
    """Return the shortest seconds of each call; the calls take turns.

    The first round is not counted. Three more are, unless that takes four times as long as is asked
    for.
    """
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or len(rounds) < 4:
        if len(rounds) > 1 and spent > 4 * seconds:
            break
        rounds.append([one_turn(call) for call in calls.values()])
    return dict(zip(calls, map(min, zip(*rounds[1:], strict=True)), strict=True))


def one_turn(call: Call) -> float:
    """Return the seconds of a call, after a pause and calls that wake up the cores."""
    time.sleep(PAUSE)
    begin = time.perf_counter()
    while True:
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        if end - begin > WARMUP:
            return end - start


def repeated(call: Call, count: int) -> Call:
    """Repeat a call, to time what takes microseconds."""

    def run() -> None:
        for _ in range(count):
            call()

    return run


# --- implementations ------------------------------------------------------------------------------


def find() -> tuple[dict[str, Implementation], dict[str, str]]:
    """Return the implementations, on as many threads as tileattn, and why others do not run."""
    reasons = tileattn.available_backends()
    missing = {name: why for name in OURS if (why := reasons[name]) is not None}
    found: dict[str, Implementation] = {
        name: Tileattn(name, reuse=False, backend=name) for name in OURS if name not in missing
    }
    try:
        found["torch"] = Peer("torch", Sdpa("SDPA"))
        sys.modules["torch"].set_num_threads(threads.worker_count())
    except ImportError:
        missing["torch"] = "it is not installed: pip install torch"
    for name, make in ENGINES.items():
        try:
            found[name] = make()
        except ImportError:
            missing[name] = f"it is not installed: pip install {name} onnx"
    return found | {"naive": Naive(np)}, missing


def supports(implementation: Implementation, one: Configuration) -> bool:
    """Return True if it computes the configuration in acceptable time."""
    quadratic = one.dtype in ("f32", "f64") and one.N <= LONGEST_NAIVE
    return implementation.supports(one) and (quadratic or not implementation.quadratic)


def prepared(one: Configuration, implementation: Implementation, x: Inputs | None = None) -> Call:
    """Prepare a pass of an implementation; all get the same inputs."""
    make = implementation.forward if one.kind == "forward" else implementation.backward
    return make(x or draw(np, one.shapes, one.dtype), one.mask)


@dataclass(frozen=True)
class Bench:
    """The implementations, and the seconds of a measurement."""

    implementations: dict[str, Implementation]
    seconds: float
    quick: bool = False

    def times(self, one: Configuration, x: Inputs | None = None, count: int = 1) -> Times:
        """Return the seconds of each implementation that supports the configuration."""
        calls = {
            name: repeated(prepared(one, each, x), count)
            for name, each in self.implementations.items()
            if supports(each, one)
        }
        return {name: t / count for name, t in shortest_seconds(calls, self.seconds).items()}

    def gflops(self, one: Configuration) -> dict[str, float]:
        """Return the GFLOP/s of each implementation."""
        return {name: one.flops / t / 1e9 for name, t in self.times(one).items()}


# --- sections -------------------------------------------------------------------------------------


def grid(bench: Bench) -> Iterator[Row]:
    """Compare at every size, in float32 and, at fewer sizes, in two other dtypes."""
    lengths = (256, 1024) if bench.quick else (256, 1024, 4096, 16384)
    some = lengths[1:3]
    sizes = [("f32", N, D, c) for N in lengths for D in (64, 128) for c in (False, True)]
    sizes += [("f64", N, 64, False) for N in some]
    sizes += [("bf16", N, D, c) for N in some for D in (64, 128) for c in (False, True)]
    for dtype, N, D, causal in sizes:
        for kind in PASSES:
            one = Configuration(kind, dtype, 1, 8, N, D, causal)
            yield one.row() | {"gflops": bench.gflops(one)}


def small(bench: Bench) -> Iterator[Row]:
    """Time warm calls that have hardly anything to compute."""
    for kind in PASSES:
        one = Configuration(kind, "f32", 1, 8, SMALL, 64)
        yield one.row() | {"us": {n: 1e6 * t for n, t in bench.times(one, count=100).items()}}


def decoding(bench: Bench) -> Iterator[Row]:
    """Measure the bytes per second of k and v for one query, and of a copy on as many threads."""
    for H in (8, 32):
        one = Configuration("forward", "f32", 1, H, DECODED, 128)
        x = draw(np, one.shapes, one.dtype)
        x = x._replace(q=x.q[:, :, :1], dout=x.dout[:, :, :1])
        seconds = bench.times(one, x) | shortest_seconds({"copy": copy_of(x.k, x.v)}, bench.seconds)
        nbytes = x.k.nbytes + x.v.nbytes
        rates = {name: nbytes / t / 1e9 for name, t in seconds.items()}
        yield one.row() | {"gbytes_per_second": rates}


def caches(bench: Bench) -> Iterator[Row]:
    """Time one query of 32 heads over caches of 8 key heads, in bfloat16 and in 8 bits."""
    shape = (8, DECODED if bench.quick else 2 * DECODED, 128)
    for B, page in ((1, None), (1, PAGE), (4, None), (4, PAGE)):
        q = normal(np, (B, 32, 1, 128), "bf16", 0)
        k, v = (normal(np, (B, *shape), "f32", seed) for seed in (1, 2))
        options: dict[str, Any] = {}
        if page is not None:
            k, v = (x.reshape(B * shape[1] // page, shape[0], page, -1) for x in (k, v))
            table = np.random.default_rng(0).permutation(len(k)).reshape(B, -1)
            options = {"block_table": table, "kv_lengths": [shape[1]] * B}
        stored = {"bf16": [x.astype(q.dtype) for x in (k, v)]}
        stored |= {x.name: [(16 * a).astype(x) for a in (k, v)] for x in CACHE_DTYPES}
        factors = {"k_descale": 1 / 16, "v_descale": 1 / 16}
        for backend in (name for name in OURS if name in bench.implementations):
            calls: Calls = {}
            for name, (keys, values) in stored.items():
                given = options if name == "bf16" else options | factors
                calls[name] = partial(tileattn.forward, q, keys, values, backend=backend, **given)
            times = shortest_seconds(calls, bench.seconds)
            for name, t in times.items():
                row: Row = {"B": B, "N": shape[1], "page": page, "cache": name, "backend": backend}
                rate = sum(x.nbytes for x in stored[name]) / t / 1e9
                row |= {"ms": 1e3 * t, "gbytes_per_second": rate}
                yield row | {"speedup_over_bf16": times["bf16"] / t}


def copy_of(*arrays: Any) -> Call:
    """Copy arrays of four axes, a head at a time, on all threads."""
    pairs = [(np.empty_like(x), x) for x in arrays]
    heads = [(y[:, h], x[:, h]) for y, x in pairs for h in range(x.shape[1])]
    return partial(threads.run, [partial(np.copyto, *pair) for pair in heads])


def options(bench: Bench) -> Iterator[Row]:
    """Time calls with one option each, and their slowdown over the call without any."""
    for kind in PASSES:
        one = Configuration(kind, "f32", 1, 8, 512 if bench.quick else 2048, 64)
        cases = {name: make() for name, make in option_cases(one, np).items()}
        cases |= {name: given for name, given, density in sparse_cases(one.N) if density < 1}
        cases["kv_lengths, half"] = {"kv_lengths": [one.N // 2]}
        rows: dict[str, Row] = {name: {"ms": {}, "over_plain": {}} for name in cases}
        for backend in (name for name in OURS if name in bench.implementations):
            calls = {
                name: prepared(one, Tileattn(reuse=False, backend=backend, **given))
                for name, given in cases.items()
            }
            times = shortest_seconds(calls, 2 * bench.seconds)
            for name, t in times.items():
                rows[name]["ms"][backend] = 1e3 * t
                rows[name]["over_plain"][backend] = t / times["plain"]
        yield from (one.row() | {"option": name} | row for name, row in rows.items())


def scaling(bench: Bench) -> Iterator[Row]:
    """Run processes with 1, 2, 4 and more threads each."""
    cores = threads.worker_count()
    counts = [n for n in (1, 2, 4, 8, 16) if n <= cores]
    for kind in PASSES:
        one = Configuration(kind, "f32", 1, 16, 1024 if bench.quick else 4096, 64)
        for count in counts[:2] if bench.quick else counts:
            text = json.dumps({"configuration": asdict(one), "seconds": bench.seconds})
            variables = {"TILEATTN_NUM_THREADS": str(count), "OPENBLAS_NUM_THREADS": str(count)}
            row = report.of_process("benchmarks.cpu", text, variables)
            yield {"threads": count} | one.row() | row


def ceilings(bench: Bench) -> Iterator[Row]:
    """Multiply large matrices and copy large arrays with NumPy, on all threads."""
    n = 1024 if bench.quick else 4096
    for dtype in ("f32", "f64"):
        a, b = (normal(np, (n, n), dtype, seed) for seed in (0, 1))
        with threadpoolctl.threadpool_limits(threads.worker_count(), "blas"):
            (seconds,) = shortest_seconds({"": partial(np.matmul, a, b)}, bench.seconds).values()
        yield {"ceiling": "matmul", "dtype": dtype, "n": n, "gflops": 2 * n**3 / seconds / 1e9}
    x = normal(np, (1, 64, n, 128), "f32")
    (seconds,) = shortest_seconds({"": copy_of(x)}, bench.seconds).values()
    yield {"ceiling": "copy", "gbytes_per_second": x.nbytes / seconds / 1e9}


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    section.__name__: section
    for section in (grid, small, decoding, caches, options, scaling, ceilings)
}


# --- a run ----------------------------------------------------------------------------------------


def rounded(row: Any) -> Any:
    """Keep four digits of every measured number; further ones differ from run to run."""
    if isinstance(row, dict):
        return {name: rounded(value) for name, value in row.items()}
    return float(f"{row:.4g}") if isinstance(row, float) else row


def speedups(rows: list[Row]) -> Iterator[Row]:
    """Return geometric means of speedups, for each dtype, pass and length of the grid."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["section"] == "grid":
            groups.setdefault((row["dtype"], row["pass"], row["N"]), []).append(row["gflops"])
    for key, rates in groups.items():
        row = dict(zip(("dtype", "pass", "N"), key, strict=True)) | {"cases": len(rates)}
        for ours, other in PAIRS:
            if all(ours in rate and other in rate for rate in rates):
                mean = geometric_mean(rate[ours] / rate[other] for rate in rates)
                row[f"{ours} over {TITLES.get(other, other)}"] = mean
        yield row


def child(text: str) -> Row:
    """Measure one configuration in a process with another number of threads."""
    given = json.loads(text)
    implementations, _ = find()
    implementations.pop("naive")
    bench = Bench(implementations, given["seconds"])
    return {"gflops": bench.gflops(Configuration(**given["configuration"]))}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = report.parser("cpu", __doc__)
    names = partial(report.names, tuple(SECTIONS))
    parser.add_argument("--only", type=names, default=list(SECTIONS), help=",".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="small sizes, a tenth of the time")
    parser.add_argument("--name", default="cpu", help="stem of the file (cpu)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each configuration (2)")
    return report.parsed(parser, argv)


def main(argv: list[str] | None = None) -> None:
    """Run the sections; an interrupted run writes its rows, too."""
    arguments = parse(argv)
    implementations, missing = find()
    report.show_missing(missing)
    torch = sys.modules["torch"].__version__ if "torch" in implementations else None
    engines = {n: x.version for n, x in implementations.items() if isinstance(x, Engine)}
    machine = report.host() | {"torch": torch, "peers": engines}
    print(report.line(machine))
    seconds = arguments.seconds / (10 if arguments.quick else 1)
    bench = Bench(implementations, seconds, arguments.quick)
    made = (
        {"section": section} | rounded(row)
        for section in arguments.only
        for row in SECTIONS[section](bench)
    )
    path = arguments.to / f"{arguments.name}.json"
    rows = report.written(made, path, lambda: machine, arguments.ran, missing=missing)
    for row in speedups(rows):
        print(report.line(row))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2])))
    else:
        main()
