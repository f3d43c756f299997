"""Speed of loops in which no call repeats, with the same calls repeated and other libraries.

    python -m tileattn bench lived                       loops on the CPU: about two minutes
    python -m tileattn bench lived --gpu                 loops on a GPU: about five minutes
    python -m tileattn bench lived --gpu --quick         fewer steps: about two minutes
    python -m tileattn bench lived --loops "training, new length"
    python -m tileattn bench lived --only first_calls    first calls: about two minutes
    python -m tileattn bench lived --gpu --only waits    waits: about a minute
    python -m tileattn bench lived --endurance 100000    so many distinct calls in one process

loops: time of a step, from the first call to the end of the last one, by participant
first_calls: seconds until the first result, in a new process with empty caches of kernels
waits: whether a call waits for a busy GPU, and which calls of the CUDA runtime may wait

The files are lived_gpu.json, first_calls_gpu.json, waits_gpu.json and endurance_gpu.json, or with
cpu in place of gpu.

A step has arguments that no earlier step had: a length, a seed, offsets, lengths, a scale, a number
that a function captures. The arguments are made before the loop. Participants take turns, round by
round; each gets its own values from the same range, because libraries share caches. "Repeated" are
the same steps once more, after two runs of them. A time is the median of the rounds. Host times are
those of single calls, without waiting for the GPU: their median, the 99th percentile and the most.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks import peers, report
from benchmarks.clock import Queue, Times, deal
from benchmarks.configurations import Call
from benchmarks.cpu import rounded
from benchmarks.device import AGREEMENT, Gpu, difference
from benchmarks.endurance import endurance
from benchmarks.libraries import Library, Step
from benchmarks.lived_loops import CPU, GPU, Loop, Loops
from benchmarks.report import Row, one_line
from tileattn.backends import threads
from tileattn.call.prepared import SEEN_OFTEN

WARM_CALLS = 8
FIGURES = ("us", "host_us", "host_p99_us", "host_max_us")
REPEATS = (
    SEEN_OFTEN + 3
)  # runs of steps before they count as repeated: with their own, faster plans
MAY_WAIT = ("cudaMemcpy", "cudaMalloc", "cudaFree")
FIRST_PEERS = {"SDPA": "sdpa", "FlashAttention-4": "fa4"}
FIRST_CALLS = ("growing", "length", "seed", "offsets", "temperature", "window")
FIRST_CALLS_OF_GPUS = [("length", "bf16", 128), ("length", "f32", 64)]


@dataclass(frozen=True)
class Bench:
    """What takes part, and how long."""

    loops: Loops
    libraries: list[Library]
    queue: Queue
    rounds: int = 5
    calls: int = 40  # steps of a round
    only: Sequence[str] = ()  # names of loops


# --- loops ----------------------------------------------------------------------------------------


def loops(bench: Bench) -> Iterator[Row]:
    """Time the steps of each loop."""
    for loop in bench.loops.all():
        if not bench.only or loop.name in bench.only:
            yield compared(loop, bench)


def compared(loop: Loop, bench: Bench) -> Row:
    """Time all participants in turns; record failures."""
    warm, *hands = deal(loop.most, 1 + bench.rounds * len(bench.libraries), bench.calls)
    able, failed = _able(loop, warm[:WARM_CALLS], bench)
    new = {each.name: Times() for each in able}
    again = {each.name: Times() for each in able if each.ours}
    dealt = iter(hands)
    for turn in range(bench.rounds):
        for each in able[:: 1 if turn % 2 else -1]:
            steps = [loop.step(value, each.tokens_first) for value in next(dealt)]
            try:
                _time(each, steps, new[each.name], again.get(each.name), bench.queue)
            # A library may refuse some of the lengths.
            except Exception as error:
                failed[each.name] = one_line(error)
                able.remove(each)
                del new[each.name]
                again.pop(each.name, None)
    figures = {name: times.figures() for name, times in new.items()}
    repeated = {name: times.figures()["us"] for name, times in again.items()}
    others = [x["us"] for name, x in figures.items() if name not in repeated]
    own = {name: figures[name]["us"] for name in repeated}
    return {
        **{"section": "loops", "loop": loop.name, "sizes": loop.about, "calls": len(warm)},
        **{key: {n: x[key] for n, x in figures.items()} for key in FIGURES},
        "repeated_us": repeated,
        "over_repeated": {name: repeated[name] / us for name, us in own.items()},
        "over_peers": {name: min(others) / us for name, us in own.items()} if others else {},
        "failed": failed,
    }


def _time(
    library: Library, steps: Sequence[Step], new: Times, again: Times | None, queue: Queue
) -> None:
    """Time steps and, if ``again`` is given, the same steps after some runs of them."""
    calls = [call for step in steps if (call := library.prepare(step))]
    with library.context():
        done = new.add(calls, queue)
        for into in [] if again is None else [*(Times() for _ in range(REPEATS)), again]:
            into.add(calls[:done], queue)


def _able(loop: Loop, values: Sequence[int], bench: Bench) -> tuple[list[Library], Row]:
    """Warm up, and compare results; return who can take part, and why others cannot."""
    able: list[Library] = []
    failed: Row = {}
    expected: list[Any] = []
    xp, agreement = bench.loops.xp, AGREEMENT[bench.loops.sizes.dtype]
    for each in bench.libraries:
        try:
            found = each.result(loop.step(values[0], each.tokens_first), xp)
            if not found:
                continue
            expected = expected or found
            drops = "dropout_p" in loop.step(values[0], each.tokens_first).options
            distance = 0.0 if drops else difference(found, expected, xp)
            if not distance <= agreement:
                raise RuntimeError(f"the results differ by {distance:.1e}")
            steps = [loop.step(value, each.tokens_first) for value in values]
            with each.context():
                Times().add([each.prepare(x) or (lambda: None) for x in steps], bench.queue)
        # A library that does not fit the others installed may fail with anything.
        except Exception as error:
            failed[each.name] = one_line(error)
        else:
            able.append(each)
    return able, failed


# --- first calls ----------------------------------------------------------------------------------


def first_calls(bench: Bench) -> Iterator[Row]:
    """Start a process for each participant, with empty caches of kernels."""
    on_gpu = bench.loops.sizes is GPU
    names = {loop.step.__name__: loop.name for loop in bench.loops.all()}
    kinds = [(name, bench.loops.sizes.dtype, bench.loops.sizes.D) for name in FIRST_CALLS]
    for kind, dtype, D in [*kinds, *FIRST_CALLS_OF_GPUS * on_gpu]:
        row: Row = {"section": "first_calls", "loop": names[kind], "dtype": dtype, "D": D}
        row |= {"forward_s": {}, "both_s": {}, "failed": {}}
        for each in bench.libraries:
            step = getattr(bench.loops, kind)(0, each.tokens_first)
            if (each.ours or each.name in FIRST_PEERS) and each.prepare(step) is not None:
                try:
                    seconds = _in_new_process(kind, dtype, D, each.name, on_gpu)["seconds"]
                except RuntimeError as error:
                    row["failed"][each.name] = one_line(error)
                else:
                    for passes, time_of in zip(("forward_s", "both_s"), seconds, strict=False):
                        row[passes][each.name] = time_of
        yield row


def _in_new_process(kind: str, dtype: str, D: int, name: str, on_gpu: bool) -> Row:
    text = json.dumps([kind, dtype, D, name, on_gpu, sys.path[:2]])
    with report.empty_caches() as variables:
        return report.of_process("benchmarks.lived", text, variables)


def child(text: str) -> Row:
    """Time the first forward call, and the first call of both passes after it."""
    kind, dtype, D, name, on_gpu, path = json.loads(text)
    sys.path[:0] = path
    bench = _bench(on_gpu, [FIRST_PEERS[name]] if name in FIRST_PEERS else [])[0]
    sizes = bench.loops.sizes._replace(dtype=dtype, D=D)
    (each,) = (x for x in bench.libraries if x.name == name)
    step: Step = getattr(Loops(bench.loops.xp, sizes), kind)(100, each.tokens_first)
    bench.queue.drain()
    seconds = []
    for one in (step._replace(rows=step.rows[:3]), *([step] if len(step.rows) == 4 else [])):
        call = each.prepare(one)
        assert call is not None
        start = time.perf_counter()
        call()
        bench.queue.drain()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


# --- waits ----------------------------------------------------------------------------------------


def waits(bench: Bench) -> Iterator[Row]:
    """Count synchronisations of our loops, and look whether any call waited for a busy GPU."""
    import torch

    for loop in bench.loops.all():
        warm, *hands = deal(loop.most, 1 + 2 * len(bench.libraries), bench.calls)
        if bench.only and loop.name not in bench.only:
            continue
        for n, each in enumerate(x for x in bench.libraries if x.ours):
            for value in warm[:WARM_CALLS]:
                each.result(loop.step(value, each.tokens_first), bench.loops.xp)
            one, two = (
                [each.prepare(loop.step(v, each.tokens_first)) for v in hands[2 * n + m]]
                for m in (0, 1)
            )
            yield {
                **{"section": "waits", "loop": loop.name, "who": each.name, "calls": len(one)},
                "waited": _waited(one, bench.queue.drain, torch),
                "synchronisations": _synchronisations(two, torch),
            }


def _waited(calls: Sequence[Any], drain: Call, torch: Any) -> bool:
    """Run calls after a kernel that keeps the GPU busy; return True if it ended before they did."""
    drain()
    busy = torch.cuda.Event()
    torch.cuda._sleep(6_000_000_000)  # cycles: three seconds
    busy.record()
    for call in calls:
        call()
    waited: bool = busy.query()
    drain()
    return waited


def _synchronisations(calls: Sequence[Any], torch: Any) -> dict[str, int]:
    """Count the calls of the CUDA runtime that may wait, as PyTorch's profiler sees them."""
    with torch.profiler.profile() as profiled, torch.profiler.record_function("loop"):
        for call in calls:
            call()
    events = list(profiled.events())
    (loop,) = (x.time_range for x in events if x.name == "loop" and x.device_type.name == "CPU")
    found: dict[str, int] = {}
    for event in events:
        inside = loop.start <= event.time_range.start <= loop.end
        waits = "Synchronize" in event.name or event.name in (
            "cudaMemcpy",
            "cudaMalloc",
            "cudaFree",
        )
        if inside and waits:
            found[event.name] = found.get(event.name, 0) + 1
    return found


# --- a run ----------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    section.__name__: section for section in (loops, first_calls, waits)
}


def _bench(on_gpu: bool, names: Sequence[str]) -> tuple[Bench, dict[str, str], Callable[[], Row]]:
    """Return what takes part, what is missing, and a description of the machine."""
    found, missing = peers.find(name for name in names if on_gpu or name in peers.ON_CPU)
    every = [*peers.ours(on_gpu), *found.values()]
    if on_gpu:
        gpu = Gpu.required()
        queue = Queue.of_gpu(gpu.xp.cuda.get_current_stream().synchronize)
        return Bench(Loops(gpu.xp, GPU), every, queue), missing, gpu.machine
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads.worker_count())
    version = {"torch": getattr(torch, "__version__", None)}
    bench = Bench(Loops(np, CPU), every, Queue.of())
    return bench, missing, lambda: report.host() | version


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = report.parser("lived", __doc__)
    add = parser.add_argument
    names = partial(report.names, tuple(SECTIONS))
    add("--only", type=names, default=["loops"], help=",".join(SECTIONS))
    add("--gpu", action="store_true", help="time on a GPU")
    add("--quick", action="store_true", help="fewer steps and rounds")
    known = [loop.name for loop in Loops(np, CPU).all()]
    add("--loops", nargs="+", default=[], choices=known, metavar="NAME", help="; ".join(known))
    peers.add_options(parser, peers.IN_LOOPS)
    add("--endurance", type=int, metavar="CALLS", help="make distinct calls; nothing else")
    return report.parsed(parser, argv)


def main(argv: list[str] | None = None) -> None:
    """Run the sections; an interrupted run writes its rows, too."""
    arguments = parse(argv)
    bench, missing, machine = _bench(arguments.gpu, arguments.peers)
    report.show_missing(missing)
    rounds, calls = (3, 15) if arguments.quick else (bench.rounds, bench.calls)
    bench = replace(bench, rounds=rounds, calls=calls, only=arguments.loops)
    made = {section: SECTIONS[section](bench) for section in arguments.only}
    if arguments.endurance:
        made = {"endurance": endurance(bench, arguments.endurance)}
    for section, rows in made.items():
        stem = f"{'lived' if section == 'loops' else section}_{'gpu' if arguments.gpu else 'cpu'}"
        path = arguments.to / f"{stem}.json"
        report.written(map(rounded, rows), path, machine, arguments.ran, missing=missing)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2])))
    else:
        main()
