"""Time of calls that meet NaN and infinity, as multiples of the same call without them.

    python -m tileattn bench nonfinite            every configuration
    python -m tileattn bench nonfinite --quick    the reference configuration alone

The file is nonfinite.json.

Each configuration is timed forward, backward, and backward in a fixed order: once as it is, then
with one NaN or infinity in one array, with every 1000th element of one array not finite, and with a
gradient `dout` that is infinite throughout, as after a loss scale that overflowed. Times are those
of CUDA events, the median of several; the calls that are compared take turns. Where a multiple is
above 2, or a call fails, the last lines name it and the exit status is 1.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import tileattn
from benchmarks import report
from benchmarks.gpu_cells import Cell, random_blocks
from benchmarks.gpu_device import Call, Gpu, Inputs
from benchmarks.gpu_peers import Tileattn
from benchmarks.report import Row, one_line

LIMIT = 2.0  # times as long as the clean call
EVERY = 1000
EARLY = 5  # a key that nearly all queries see
PASSES = ("forward", "backward", "deterministic")


class Configuration(NamedTuple):
    """What is timed.

    Parameters
    ----------
    name : str
        In the table.
    cell : Cell
        Sizes and mask; its kind is not looked at.
    option : str
        ``bias`` or ``block_mask``; empty where there is neither.
    """

    name: str
    cell: Cell
    option: str = ""


class Fault(NamedTuple):
    """What is not finite.

    Parameters
    ----------
    name : str
        In the table.
    array : str
        Name of the array; empty for the clean call.
    fills : tuple of (slice, float)
        Elements of the flattened array, and what is written there.
    """

    name: str
    array: str = ""
    fills: tuple[tuple[slice, float], ...] = ()


REFERENCE = Cell("forward", "fp16", 2, 16, 4096, 128, causal=True)
CONFIGURATIONS = (
    Configuration("reference", REFERENCE),
    Configuration("D 64, full", replace(REFERENCE, dtype="bf16", D=64, causal=False)),
    Configuration("D 256", replace(REFERENCE, H=8, D=256)),
    Configuration("window of 512", replace(REFERENCE, window=512)),
    Configuration("GQA 8:1", replace(REFERENCE, H=32, Hkv=4)),
    Configuration("float32", replace(REFERENCE, dtype="f32", H=4, D=64)),
    Configuration("bias", REFERENCE, "bias"),
    Configuration("half of the blocks", replace(REFERENCE, causal=False), "block_mask"),
)
ONE = {"q": math.inf, "k": math.nan, "v": math.nan, "dout": math.inf, "bias": math.nan}
MANY = (slice(0, None, 2 * EVERY), math.nan), (slice(EVERY, None, 2 * EVERY), math.inf)


def arrays_of(configuration: Configuration, device: Gpu) -> dict[str, Any]:
    """Draw the arrays of a call by name, a bias for all entries among them where there is one."""
    cell = configuration.cell
    drawn = (device.normal(shape, cell.dtype, seed) for seed, shape in enumerate(cell.shapes))
    arrays = Inputs(*drawn)._asdict()
    if configuration.option == "bias":
        arrays["bias"] = device.normal((1, cell.H, cell.N, cell.N), cell.dtype, len(arrays))
    return arrays


def faults(arrays: dict[str, Any]) -> Iterator[Fault]:
    """List what is timed of a configuration: the clean call, then each fault.

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
    """Give the arrays with a fault; that which has it is a copy."""
    if not fault.array:
        return arrays
    x = arrays[fault.array].copy()
    flat = x.reshape(-1)
    for places, value in fault.fills:
        part = flat[places]
        part[...] = xp.full(part.shape, value, x.dtype)
    return arrays | {fault.array: x}


def call_of(configuration: Configuration, kind: str, arrays: dict[str, Any]) -> Call:
    """Prepare one pass over some arrays."""
    cell = configuration.cell
    options = {"bias": arrays["bias"]} if "bias" in arrays else {}
    if configuration.option == "block_mask":
        options["block_mask"] = random_blocks(cell.N, 0.5)
    ours = Tileattn(deterministic=kind == "deterministic", **options)
    make = ours.forward if kind == "forward" else ours.backward
    return make(Inputs(*(arrays[name] for name in Inputs._fields)), cell.mask)


def compile_all(configurations: Sequence[Configuration], device: Gpu) -> None:
    """Run every pass once, on threads: their kernels are compiled side by side.

    What fails here fails again where it is timed, and is recorded there.
    """

    def run(configuration: Configuration, kind: str) -> None:
        call_of(configuration, kind, arrays_of(configuration, device))()

    with ThreadPoolExecutor() as pool:
        wait([pool.submit(run, *job) for job in product(configurations, PASSES)])
    device.release()


def rows(configuration: Configuration, kind: str, device: Gpu) -> Iterator[Row]:
    """Time one pass: a row for each fault, or one that says why there are none."""
    head = {"case": configuration.name, **configuration.cell.row(), "pass": kind}
    try:
        arrays = arrays_of(configuration, device)
        met = [f for f in faults(arrays) if kind != "forward" or f.array != "dout"]
        calls = [call_of(configuration, kind, spoiled(arrays, f, device.xp)) for f in met]
        seconds = [median(times) for times in device.time_each(calls)]
    except Exception as error:
        yield head | {"failed": one_line(error)}
    else:
        for fault, taken in zip(met, seconds, strict=True):
            times_clean = round(taken / seconds[0], 3)
            yield head | {"values": fault.name, "ms": 1e3 * taken, "multiple": times_clean}
    finally:
        device.release()


def line(row: Row) -> str:
    """Line of the table."""
    head = f"{row['case']:18} {row['pass']:13} "
    if "failed" in row:
        return f"{head} failed: {row['failed']}"
    return f"{head} {row['values']:20} {row['ms']:9.3f} ms  x {row['multiple']:.2f}"


def within(row: Row) -> bool:
    """Whether a call ran, and took no longer than the limit allows."""
    return "multiple" in row and row["multiple"] <= LIMIT


def run(arguments: argparse.Namespace, device: Gpu) -> int:
    """Time what is asked for and write it, even where a run is broken off; give the exit status."""
    configurations = CONFIGURATIONS[: 1 if arguments.quick else None]
    compile_all(configurations, device)
    done: list[Row] = []
    try:
        for job in report.tracked(list(product(configurations, PASSES)), "nonfinite"):
            for row in rows(*job, device):
                done.append(row)
                report.show(line(row))
    finally:
        if done:
            path = arguments.to / "nonfinite.json"
            report.write(path, device.machine(), done, arguments.ran, limit=LIMIT)
    slow = [row for row in done if not within(row)]
    for row in slow:
        print(f"above {LIMIT:g}, or failed: {' '.join(line(row).split())}")
    return 1 if slow else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tileattn bench nonfinite",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="the reference configuration alone")
    report.add_target(parser)
    arguments = parser.parse_args(argv)
    arguments.ran = report.command("python -m tileattn bench nonfinite", argv)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    reason = tileattn.available_backends()["cupy"]
    if reason is not None:
        sys.exit(f"there is nothing to time: the cupy backend cannot run here: {reason}")
    return run(arguments, Gpu())


if __name__ == "__main__":
    sys.exit(main())
