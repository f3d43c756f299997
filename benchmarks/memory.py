"""Peak memory against the number of tokens: plain attention, which stores N x N, and tileattn.

    python -m tileattn bench memory                  on the GPU where there is one, else on the CPU
    python -m tileattn bench memory --device cpu --limit-seconds 60

The files are memory_cpu.json and memory_gpu.json.

A peak holds the outputs and whatever a pass uses besides; inputs are apart. ``both`` is a forward
pass and a backward pass after it. A size that does not fit is refused before it is allocated, and
so is one that would take longer than the limit; either is recorded with the bytes that it needs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import tileattn
from benchmarks import memory_cpu, memory_gpu, report
from benchmarks.gpu_device import DTYPES, Gpu
from benchmarks.memory_case import CONTESTANTS, PASSES, Case
from benchmarks.report import Row

LENGTHS = tuple(512 << i for i in range(10))  # to 262,144
DTYPE = {"cpu": "f32", "gpu": "fp16"}
HEADS = {"cpu": 1, "gpu": 8}


def rows(
    cases: Sequence[Case],
    room: Callable[[], int],
    peak: Callable[[Case], Row],
    limit: float,
) -> Iterator[Row]:
    """Measure every case that fits into the memory and the time that there are.

    Parameters
    ----------
    cases : sequence of Case
        From few tokens to many.
    room : callable
        Bytes that are free.
    peak : callable
        Measures one case: its ``peak_bytes`` and ``seconds``.
    limit : float
        Seconds that one case may take, as the last size of its kind foretells.

    Yields
    ------
    dict
        The case with what was measured, or with ``not_run`` or ``failed`` and the reason.
    """
    last: dict[tuple[str, str], tuple[int, float]] = {}
    for case in report.tracked(cases, "memory"):
        row = asdict(case) | {"inputs_bytes": case.inputs, "needs_bytes": case.needs}
        N, seconds = last.get((case.contestant, case.kind), (case.N, 0.0))
        expected = seconds * (case.N / N) ** 2
        if refusal := case.refusal(room()):
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
                last[case.contestant, case.kind] = case.N, measured["seconds"]
                yield row | measured


def line(row: Row) -> str:
    """Line of the table."""
    head = f"{row['contestant']:9} {row['kind']:8} {row['N']:7}  "
    if "peak_bytes" in row:
        return f"{head}{row['peak_bytes'] / 1e6:12.1f} MB  {row['seconds']:8.3f} s"
    return head + (f"failed: {row['failed']}" if "failed" in row else f"not run: {row['not_run']}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tileattn bench memory",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=tuple(DTYPE), help="(the GPU where there is one)")
    add("--limit-seconds", type=float, default=30.0, help="of one case (30)")
    add("--heads", type=int, help="(1 on the CPU, 8 on the GPU)")
    add("--head-dim", type=int, default=64, help="(64)")
    add("--dtype", choices=tuple(DTYPES), help="(f32 on the CPU, fp16 on the GPU)")
    add("--length", type=int, nargs="+", default=LENGTHS, help="(512 to 262144)")
    report.add_target(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run what the command line asks for; what was measured is kept where a run is broken off."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    missing = tileattn.available_backends()["cupy"]
    device = arguments.device or ("cpu" if missing else "gpu")
    if device == "gpu" and missing:
        sys.exit(f"no GPU to measure: {missing}; --device cpu measures NumPy")
    if device == "cpu" and (why := memory_cpu.unavailable()):
        sys.exit(why)
    dtype, H = arguments.dtype or DTYPE[device], arguments.heads or HEADS[device]
    cases = [
        Case(device, contestant, kind, dtype, H, N, arguments.head_dim)
        for N in sorted(arguments.length)
        for contestant in CONTESTANTS
        for kind in PASSES
    ]
    room, peak, machine = memory_cpu.room, memory_cpu.peak, report.host()
    if device == "gpu":
        gpu = Gpu()
        room, peak = partial(memory_gpu.room, gpu), partial(memory_gpu.peak, gpu)
        machine = gpu.machine()
    done: list[Row] = []
    try:
        for row in rows(cases, room, peak, arguments.limit_seconds):
            done.append(row)
            report.show(line(row))
    finally:
        if done:
            path = arguments.to / f"memory_{device}.json"
            report.write(
                path, machine, done, report.command("python -m tileattn bench memory", argv)
            )


if __name__ == "__main__":
    main()
