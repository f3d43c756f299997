"""Have processes share a GPU, and compare the bits of the same calls thousands of times.

It runs the Hopper kernels of all pairs of head dimensions, and some others: both passes, backward
with ``deterministic=True``. In half of the calls two heads have NaN, so that the NaN-safe kernels
run too. One process compares its first result of a short call without NaN with the oracle. All
later results, of all processes, must be bitwise identical. A process that is silent for a while
counts as hanging, which is a failure.

    python -m tools.stress_gpu --seconds 300
    python -m tools.stress_gpu --variant stalls --pairs 128x128 256x256
"""

import argparse
import hashlib
import itertools
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tileattn
from benchmarks import report
from tileattn import dtypes, reference
from tileattn.call.parse import parse
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit import compile
from tileattn.kernels.cuda.jit.load import arch_of
from tileattn.kernels.cuda.plan import catalog
from tileattn.testing import assert_attention_close, error_bound
from tools.check_sass import PAIRS, pair

VARIANTS = {
    "plain": (),
    "stalls": ("-DTROUBLE_STALLS",),
    "swapped-copies": ("-DTROUBLE_SWAPPED_COPIES",),
}
DTYPES = {dtype.name: dtype for dtype in dtypes.DTYPES}
SIZES = (2, 8, 4)  # B, Hq, Hkv
LENGTHS = ((512, 512), (257, 129), (1030, 2070), (1, 700), (2070, 1030), (640, 96), (8200, 600))
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (200, 0)},
}
HELD = 1 << 16  # most scores of a head for which results are compared with the (slow) oracle
# Generic kernels, and head dimensions below their bucket.
OTHERS = (("float32", 64, 64), ("bfloat16", 20, 20), ("float16", 72, 40))
NAMES = ("out", "lse", "dq", "dk", "dv")


class Case(NamedTuple):
    dtype: str
    D: int
    Dv: int
    Nq: int
    Nk: int
    mask: str
    spoiled: bool = False  # a query of one head, and a key and a value of another, are NaN


class Report(NamedTuple):
    """The report of a process on one visit to a case."""

    case: Case
    digest: str  # of the results of the first call
    calls: int  # after that
    differ: tuple[int, ...]  # of these, for each result


def cases(pairs: Sequence[tuple[int, int]], turn: int) -> list[Case]:
    """List the calls of one turn: each pair with each mask, lengths in rotation.

    Every second one has NaN, and in another round of lengths the others.
    """
    kinds = [(dtype, D, Dv) for dtype in ("float16", "bfloat16") for D, Dv in pairs]
    found = []
    for n, ((dtype, D, Dv), mask) in enumerate(product((*kinds, *OTHERS), MASKS)):
        place, spoiled = (n + turn) % len(LENGTHS), (n + turn // len(LENGTHS)) % 2 > 0
        found.append(Case(dtype, D, Dv, *LENGTHS[place], mask, spoiled))
    return found


def shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    B, Hq, Hkv = SIZES
    rows = (B, Hq, case.Nq, case.D), (B, Hkv, case.Nk, case.D), (B, Hkv, case.Nk, case.Dv)
    return *rows, (B, Hq, case.Nq, case.Dv)


def kernels(case: Case, arch: str) -> list[KernelKey]:
    q, k, v, _ = (np.empty(shape, DTYPES[case.dtype]) for shape in shapes(case))
    problem, context = parse(q, k, v, MASKS[case.mask])[0], catalog.context_of(arch)
    backward = backward_launches(problem, context, deterministic=True, sinks=False)
    return [launch.key for launch in (*forward_launches(problem, context), *backward)]


class Worker:
    def __init__(self, repeats: int) -> None:
        import cupy

        self.xp, self.repeats = cupy, repeats
        self._compare = cupy.ElementwiseKernel(
            "T now, T first, int32 place",
            "raw uint8 differ",
            "if (now != first) differ[place] = 1",
            "stress_compare",
        )

    def visit(self, case: Case, checks: bool) -> Report:
        """Call once, compare the results with the oracle if ``checks``, and call again."""
        rng = self.xp.random.default_rng(case.D * 1009 + case.Dv * 13 + case.Nq + case.Nk)
        given = [
            rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[case.dtype])
            for shape in shapes(case)
        ]
        if case.spoiled:
            q, k, v, _ = given
            q[0, 0, case.Nq // 2, 0] = k[1, 0, case.Nk // 2, 1] = v[1, 0, case.Nk // 3, 2] = np.nan
        first = self._call(case, given)
        on_host = [x.get() for x in first]
        if checks:
            hold([x.get() for x in given], case.mask, on_host)
        differ = self.xp.zeros((len(NAMES), self.repeats), np.uint8)
        rows, expected = list(differ), [_integers(x) for x in first]
        for place in range(self.repeats):
            for row, now, then in zip(rows, self._call(case, given), expected, strict=True):
                self._compare(_integers(now), then, np.int32(place), row)
        digest = hashlib.sha256(b"".join(x.tobytes() for x in on_host)).hexdigest()
        return Report(case, digest, self.repeats, tuple(differ.sum(axis=1).get().tolist()))

    @staticmethod
    def _call(case: Case, given: Sequence[Any]) -> tuple[Any, ...]:
        q, k, v, dout = given
        options = MASKS[case.mask]
        attention = tileattn.forward(q, k, v, **options)
        grads = tileattn.backward(dout, q, k, v, *attention, **options, deterministic=True)
        return (*attention, grads.dq, grads.dk, grads.dv)


def hold(given: Sequence[Any], mask: str, results: Sequence[Any]) -> None:
    """Compare results with the oracle; raise AssertionError."""
    q, k, v, dout = given
    options = MASKS[mask]
    bounds = error_bound(q, k, v, dout, **options)
    attention = tileattn.Attention(*results[:2])
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    wanted = reference.backward(dout, q, k, v, **options)
    grads = wanted._replace(**dict(zip(NAMES[2:], results[2:], strict=True)))
    assert_attention_close(grads, wanted, bounds, names=NAMES[2:])


def _integers(x: Any) -> Any:
    """View an array as integers of the same size: NaN is then equal to itself."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


# --- processes ------------------------------------------------------------------------------------


def work(
    number: int, chosen: argparse.Namespace, deadline: float, place: Any, reports: Any
) -> None:
    """Run the cases until time is up; each process starts at a different one.

    In ``place`` it writes down the number of the case, the turn and the time. ``reports`` takes a
    `Report` for each visit, or the text of an exception.
    """
    compile.EXTRA_OPTIONS = VARIANTS[chosen.variant]
    try:
        worker = Worker(chosen.repeats)
        held: set[Case] = set()
        for turn in itertools.count():
            todo = cases(chosen.pairs, turn)
            share = len(todo) * number // chosen.processes
            for n in (*range(share, len(todo)), *range(share)):
                place[:] = n, turn, time.time()
                if time.time() >= deadline:
                    return
                mine = n % chosen.processes == number and todo[n] not in held
                checks = mine and todo[n].Nq * todo[n].Nk <= HELD and not todo[n].spoiled
                reports.put(worker.visit(todo[n], checks))
                held |= {todo[n]} if checks else set()
    except BaseException:
        reports.put(f"process {number}: {traceback.format_exc()}")
        raise


def compile_all(pairs: Sequence[tuple[int, int]], arch: str, threads: int) -> int:
    """Compile the kernels of all cases into the disk cache; return their number."""
    found = dict.fromkeys(
        key
        for turn in range(len(LENGTHS))
        for case in cases(pairs, turn)
        for key in kernels(case, arch)
    )
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda key: compile.compiled(key, arch), found))
    return len(found)


class Tally:
    """The sum of all processes' reports."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.calls: Counter[tuple[str, int, int]] = Counter()
        self.differ: Counter[tuple[str, int, int, str]] = Counter()
        self.digests: dict[Case, str] = {}
        self.differing: list[str] = []
        self.failures: list[str] = []

    def add(self, said: Report) -> None:
        case = said.case
        kind = case.dtype, case.D, case.Dv
        self.calls[kind] += said.calls + 1
        for name, count in zip(NAMES, said.differ, strict=True):
            if count:
                self.differ[*kind, name] += count
                self.differing.append(f"{case}: {name} differs in {count} of {said.calls} calls")
        if self.digests.setdefault(case, said.digest) != said.digest:
            self.differing.append(f"{case}: the results of two visits differ")

    def rows(self) -> list[report.Row]:
        """Return the calls of each pair of head dimensions, and the differences."""
        return [
            {
                **{"dtype": dtype, "D": D, "Dv": Dv, "variant": self.variant, "calls": calls},
                "differ": {n: self.differ[dtype, D, Dv, n] for n in NAMES},
            }
            for (dtype, D, Dv), calls in sorted(self.calls.items())
        ]


def run(chosen: argparse.Namespace, target: Callable[..., None] = work) -> Tally:
    """Start processes, and collect reports until all have ended, or one fails or hangs."""
    tally, context = Tally(chosen.variant), multiprocessing.get_context("spawn")
    reports, start = context.Queue(), time.time()
    places = [context.Array("d", [0, 0, start], lock=False) for _ in range(chosen.processes)]
    processes = [
        context.Process(target=target, args=(n, chosen, start + chosen.seconds, place, reports))
        for n, place in enumerate(places)
    ]
    for process in processes:
        process.start()
    while not tally.failures:
        alive = any(process.is_alive() for process in processes)
        try:
            said = reports.get(timeout=0.5)
        except queue.Empty:
            if not alive:
                break
        else:
            if isinstance(said, Report):
                tally.add(said)
            else:
                tally.failures.append(said)
        for n, (process, place) in enumerate(zip(processes, places, strict=True)):
            if process.is_alive() and time.time() - place[2] > chosen.hang:
                case = cases(chosen.pairs, int(place[1]))[int(place[0])]
                tally.failures.append(f"process {n} hangs at {case}")
            elif process.exitcode and reports.empty():  # what it had to say comes first
                tally.failures.append(f"process {n} ended with status {process.exitcode}")
    for process in processes:
        if tally.failures:
            process.kill()
        process.join()
    return tally


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="stress_gpu", description=__doc__.splitlines()[0])
    made.add_argument("--seconds", type=float, default=300, help="without compiling (default: 300)")
    made.add_argument("--processes", type=int, default=8, help="that share the GPU (default: 8)")
    made.add_argument("--repeats", type=int, default=100, help="calls of a visit (default: 100)")
    made.add_argument("--hang", type=float, default=90, help="seconds of silence (default: 90)")
    made.add_argument("--variant", choices=VARIANTS, default="plain", help="of the kernels")
    made.add_argument("--pairs", type=pair, nargs="*", metavar="DxDV", help="default: all")
    made.add_argument("--record", type=Path, metavar="FILE", help="write what was found as JSON")
    return made


def main(argv: Sequence[str]) -> int:
    """Run, and print differences; the exit status is 1 for any failure, 2 without a GPU."""
    chosen = parser().parse_args(argv)
    chosen.pairs = chosen.pairs or PAIRS
    reason = tileattn.available_backends()["cupy"]
    if reason is not None:
        print(reason)
        return 2
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes: the oracle's products
    compile.EXTRA_OPTIONS = VARIANTS[chosen.variant]
    start = time.time()
    count = compile_all(chosen.pairs, arch_of(0), os.cpu_count() or 1)
    print(f"{count} kernels compiled in {time.time() - start:.0f} s", flush=True)
    tally = run(chosen)
    rows = tally.rows()
    for row in rows:
        print(report.line({**row, "differ": sum(row["differ"].values()) or None}))
    print("\n".join((*tally.differing[:20], *tally.failures)))
    calls, differ = sum(tally.calls.values()), len(tally.differing)
    print(f"{chosen.variant}: {calls} calls, {differ} differences, {len(tally.failures)} failures")
    if chosen.record:
        from benchmarks.device import Gpu

        ran = report.command("python -m tools.stress_gpu", argv)
        found = {
            "processes": chosen.processes,
            "differing": tally.differing,
            "failures": tally.failures,
        }
        report.write(chosen.record, Gpu().machine(), rows, ran, **found)
    return bool(tally.differing or tally.failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
