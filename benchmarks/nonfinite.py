"""Slowdown of calls with NaN or infinity in the inputs, over the same call without.

    python -m tileattn bench nonfinite            every configuration
    python -m tileattn bench nonfinite --quick    only the reference configuration

The file is nonfinite.json.

It times each configuration forward, backward, and backward in a fixed order: with finite values,
with one NaN or infinity in one array, with every 1000th element of one array not finite, and with
an infinite `dout`, as after a loss scale that overflowed. The calls take turns; a time is the
median of several, by CUDA events. The last lines name slowdowns above 2 and failed calls; the exit
status is then 1.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.configurations import Call, Configuration, Inputs, draw, normal, random_blocks
from benchmarks.device import Gpu
from benchmarks.implementations import Tileattn
from benchmarks.report import Row, one_line

LIMIT = 2.0  # of the slowdown
EVERY = 1000
EARLY = 5  # a key that nearly all queries attend to
PASSES = ("forward", "backward", "deterministic")


class Case(NamedTuple):
    name: str
    configuration: Configuration  # sizes and mask; its pass is ignored
    option: str = ""  # or bias, block_mask


class Fault(NamedTuple):
    name: str
    array: str = ""  # empty for the clean call
    fills: tuple[tuple[slice, float], ...] = ()  # elements of the flattened array, and their value


REFERENCE = Configuration("forward", "fp16", 2, 16, 4096, 128, causal=True)
CASES = (
    Case("reference", REFERENCE),
    Case("D 64, full", replace(REFERENCE, dtype="bf16", D=64, causal=False)),
    Case("D 256", replace(REFERENCE, H=8, D=256)),
    Case("window of 512", replace(REFERENCE, window=512)),
    Case("GQA 8:1", replace(REFERENCE, H=32, Hkv=4)),
    Case("float32", replace(REFERENCE, dtype="f32", H=4, D=64)),
    Case("bias", REFERENCE, "bias"),
    Case("half of the blocks", replace(REFERENCE, causal=False), "block_mask"),
)
ONE = {"q": math.inf, "k": math.nan, "v": math.nan, "dout": math.inf, "bias": math.nan}
MANY = (slice(0, None, 2 * EVERY), math.nan), (slice(EVERY, None, 2 * EVERY), math.inf)


def arrays_of(case: Case, device: Gpu) -> dict[str, Any]:
    """Draw the arrays of a call by name; a bias is shared by the batch."""
    one = case.configuration
    arrays = draw(device.xp, one.shapes, one.dtype)._asdict()
    if case.option == "bias":
        arrays["bias"] = normal(device.xp, (1, one.H, one.N, one.N), one.dtype, len(arrays))
    return arrays


def faults(arrays: dict[str, Any]) -> Iterator[Fault]:
    """List the calls of a configuration: the clean one, then each fault.

    A single element lies in the first head: in a query half way down, or in an early key.
    """
    yield Fault("clean")
    for name, x in arrays.items():
        middle = x.shape[2] // 2
        row, column = {"k": (EARLY, 0), "v": (EARLY, 0), "bias": (middle, EARLY)}.get(
            name, (middle, 0)
        )
        place = row * x.shape[3] + column
        yield Fault(f"one {ONE[name]} in {name}", name, ((slice(place, place + 1), ONE[name]),))
    for name in Inputs._fields:
        yield Fault(f"every {EVERY}th of {name}", name, MANY)
    yield Fault("all of dout inf", "dout", ((slice(None), math.inf),))


def spoiled(arrays: dict[str, Any], fault: Fault, xp: Any) -> dict[str, Any]:
    """Return the arrays with a fault in a copy of one."""
    if not fault.array:
        return arrays
    x = arrays[fault.array].copy()
    flat = x.reshape(-1)
    for places, value in fault.fills:
        part = flat[places]
        part[...] = xp.full(part.shape, value, x.dtype)
    return arrays | {fault.array: x}


def call_of(case: Case, kind: str, arrays: dict[str, Any]) -> Call:
    one = case.configuration
    options = {"bias": arrays["bias"]} if "bias" in arrays else {}
    if case.option == "block_mask":
        options["block_mask"] = random_blocks(one.N, 0.5)
    ours = Tileattn(deterministic=kind == "deterministic", **options)
    make = ours.forward if kind == "forward" else ours.backward
    return make(Inputs(*(arrays[name] for name in Inputs._fields)), one.mask)


def compile_all(cases: Sequence[Case], device: Gpu) -> None:
    """Run every pass once, on threads: their kernels are compiled side by side.

    What fails here fails again where it is timed, and is recorded there.
    """

    def run(case: Case, kind: str) -> None:
        call_of(case, kind, arrays_of(case, device))()

    with ThreadPoolExecutor() as pool:
        wait([pool.submit(run, *job) for job in product(cases, PASSES)])
    device.release()


def rows(case: Case, kind: str, device: Gpu) -> Iterator[Row]:
    """Time one pass: return a row for each fault, or one with the reason of a failure."""
    head = {"case": case.name, **case.configuration.row(), "pass": kind}
    try:
        arrays = arrays_of(case, device)
        met = [f for f in faults(arrays) if kind != "forward" or f.array != "dout"]
        calls = [call_of(case, kind, spoiled(arrays, f, device.xp)) for f in met]
        seconds = [median(times) for times in device.time_each(calls)]
    except Exception as error:
        yield head | {"failed": one_line(error)}
    else:
        for fault, taken in zip(met, seconds, strict=True):
            slowdown = round(taken / seconds[0], 3)
            yield head | {"values": fault.name, "ms": 1e3 * taken, "slowdown": slowdown}
    finally:
        device.release()


def within(row: Row) -> bool:
    """Return True if a call ran within the limit."""
    return "slowdown" in row and row["slowdown"] <= LIMIT


def main(argv: list[str] | None = None, device: Gpu | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a call fails or exceeds the limit."""
    parser = report.parser("nonfinite", __doc__)
    parser.add_argument("--quick", action="store_true", help="only the reference configuration")
    arguments = report.parsed(parser, argv)
    device = device or Gpu.required()
    cases = CASES[: 1 if arguments.quick else None]
    compile_all(cases, device)
    jobs = list(product(cases, PASSES))
    made = (row for job in jobs for row in rows(*job, device))
    path = arguments.to / "nonfinite.json"
    done = report.written(made, path, device.machine, arguments.ran, limit=LIMIT)
    slow = [row for row in done if not within(row)]
    for row in slow:
        print(f"above {LIMIT:g}, or failed: {report.line(row)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
