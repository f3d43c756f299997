"""Speed on the GPU, beside PyTorch, FlashAttention-4 and plain CuPy, as ratios in one run.

    python -m tileattn bench gpu                     the grid: every size, dtype, pass and peer
    python -m tileattn bench gpu --shapes            grouped heads, D = 192 with Dv = 128, windows
    python -m tileattn bench gpu --options           what each option costs over the plain call
    python -m tileattn bench gpu --sparse            windows and block masks against full attention
    python -m tileattn bench gpu --host              time of the host for a warm call
    python -m tileattn bench gpu --ceilings          matrix products and device copies
    python -m tileattn bench gpu --grid --dtype bf16 --head-dim 128 --length 2048,8192
                                 --no-causal --pass forward --peers flash,cudnn

The files are gpu.json, with a chart beside it, gpu_shapes.json,
gpu_options.json, gpu_sparse.json, gpu_host.json and gpu_ceilings.json.

Contestants run in one process on the same data. Times are those of CUDA events, the median of the
repeats; the inputs take turns, so that they come from memory and not from the L2. Work is counted
as 4 B H N N D operations forward, half of it for causal, and 2.5 times that backward, whatever a
contestant computes; under a window, only what it shows counts. Results are compared with those of
tileattn: what differs gets no ratio.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

import tileattn
from benchmarks import gpu_report, report
from benchmarks.gpu_cells import (
    HEAD_DIMS,
    LENGTHS,
    PASSES,
    SHAPE_LENGTHS,
    WINDOW_LENGTHS,
    Cell,
    cells_of,
    random_blocks,
    shapes_of,
    window_share,
)
from benchmarks.gpu_device import DTYPES, Call, Gpu, Inputs
from benchmarks.gpu_peers import PEERS, Contestant, Tileattn, arrays, find
from benchmarks.report import Row, one_line

SECTIONS = ("grid", "shapes", "options", "sparse", "host", "ceilings")
OURS = ("tileattn", "deterministic")
DENSE = ("bias", "mask")  # options that are arrays of N x N

# Two right answers of 16-bit types differ by the rounding of P, of dS and of the result.
AGREEMENT = {"bf16": 2e-2, "fp16": 3e-3, "f32": 1e-5, "f64": 1e-12}


def prepare(contestant: Contestant, cell: Cell, inputs: Sequence[Inputs]) -> list[Call]:
    """One call for each set of inputs."""
    make = contestant.forward if cell.kind == "forward" else contestant.backward
    return [make(x, cell.mask) for x in inputs[: 1 if contestant.quadratic else None]]


def measure(contestant: Contestant, cell: Cell, device: Gpu) -> tuple[list[float], list[Any]]:
    """Seconds of each repeat, and the results for the first set of inputs."""
    inputs = device.inputs(cell.shapes, cell.dtype)
    with contestant.context():
        calls = prepare(contestant, cell, inputs)
        return device.time(calls), arrays(calls[0](), device.xp)


def difference(found: list[Any], expected: list[Any], xp: Any) -> float:
    """Largest relative Frobenius distance of two lists of arrays; NaN where there is one."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        a64, b64 = (x.astype(np.float64).ravel() for x in (a, b))
        errors.append(float(xp.linalg.norm(a64 - b64) / xp.linalg.norm(b64)))
    return float(np.max(errors))  # max() would lose a NaN


def race(cell: Cell, contestants: Iterable[Contestant], device: Gpu) -> Row:
    """Time who can run the cell, tileattn first; a failure is recorded and the race goes on."""
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    off: dict[str, str] = {}
    expected: list[Any] | None = None
    for contestant in contestants:
        if cell.dtype not in contestant.dtypes or cell.kind not in contestant.passes:
            continue
        name = contestant.name
        try:
            measured, results = measure(contestant, cell, device)
            expected = results if name == OURS[0] else expected
            distance = 0.0 if expected is None else difference(results, expected, device.xp)
        except Exception as error:
            failed[name] = one_line(error)
        else:
            times[name] = measured
            if not distance <= AGREEMENT[cell.dtype]:
                off[name] = f"{distance:.1e}"
        results = []
        device.release()
    tflops = {name: cell.flops / median(seconds) / 1e12 for name, seconds in times.items()}
    right = set(tflops) - set(off)
    compared = right - set(OURS) if OURS[0] in right else set()
    return cell.row() | {
        "tflops": {name: round(value, 2) for name, value in tflops.items()},
        "ratio_to": {
            name: round(tflops[OURS[0]] / tflops[name], 3) for name in tflops if name in compared
        },
        "spread": {name: round(spread(seconds), 3) for name, seconds in times.items()},
        "off": off,
        "failed": failed,
    }


def spread(seconds: list[float]) -> float:
    """Distance of the quartiles over the median."""
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def grid(cells: list[Cell], contestants: list[Contestant], device: Gpu) -> Iterator[Row]:
    """Race over every cell."""
    for cell in report.tracked(cells, "grid"):
        yield race(cell, contestants, device)


def shapes(
    cases: list[tuple[str, Cell]], contestants: list[Contestant], device: Gpu
) -> Iterator[Row]:
    """Race over problems of other shapes than those of the grid."""
    for name, cell in report.tracked(cases, "shapes"):
        yield {"case": name, **race(cell, contestants, device)}


def cost(make: Callable[[], dict[str, Any]], cell: Cell, device: Gpu) -> Row:
    """Milliseconds of a call with options, and their dense bytes; or why it failed."""
    try:
        given = make()
        seconds = median(measure(Tileattn(**given), cell, device)[0])
    except Exception as error:
        return {"failed": one_line(error)}
    finally:
        device.release()
    return {"ms": 1e3 * seconds, "dense_bytes": sum(given[x].nbytes for x in DENSE if x in given)}


def option_cases(cell: Cell, device: Gpu) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name what makes each option alone; dense arrays are full, or broadcast over some axes."""

    def bias(B: int) -> dict[str, Any]:
        values = device.normal((1, cell.H, cell.N, cell.N), cell.dtype)
        return {"bias": device.xp.broadcast_to(values, (B, *values.shape[1:])).copy()}

    def mask(B: int, H: int) -> dict[str, Any]:
        seen = device.normal((1, 1, cell.N, cell.N), "f32") > -1
        return {"mask": device.xp.broadcast_to(seen, (B, H, cell.N, cell.N)).copy()}

    slopes = device.xp.linspace(0.01, 0.5, cell.H, dtype=np.float32)
    return {
        "plain": dict,
        "bias": partial(bias, cell.B),
        "bias, one for the batch": partial(bias, 1),
        "mask": partial(mask, cell.B, cell.H),
        "mask, one for all heads": partial(mask, 1, 1),
        "alibi_slopes": lambda: {"alibi_slopes": slopes},
        "softcap": lambda: {"softcap": 20.0},
        "dropout": lambda: {"dropout_p": 0.1, "seed": 1},
        "sinks": lambda: {"sinks": device.normal((cell.H,), "f32")},
    }


def options(cells: list[Cell], device: Gpu) -> Iterator[Row]:
    """Cost of each option over the plain call, in per cent.

    ``bytes_ms`` is the time that the dense array takes at the bandwidth of a copy: read once, and
    for a bias, whose gradient is as large, written once backward. ``beyond_bytes_percent`` is the
    cost without it.
    """
    rate = device.copy_rate()
    for cell in report.tracked(cells, "options"):
        plain: float | None = None
        for name, make in option_cases(cell, device).items():
            row = {**cell.row(), "option": name, **cost(make, cell, device)}
            plain = row.get("ms") if name == "plain" else plain
            if plain is not None and "ms" in row:
                passes = 2 if cell.kind == "backward" and name.startswith("bias") else 1
                row["bytes_ms"] = 1e3 * passes * row["dense_bytes"] / rate
                row["overhead_percent"] = 100 * (row["ms"] / plain - 1)
                row["beyond_bytes_percent"] = 100 * ((row["ms"] - row["bytes_ms"]) / plain - 1)
            yield row


def sparse_cases(N: int) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Full attention, then less and less of it: name, options, share of the pairs that are seen."""
    W = N // 16  # 1024 of 16384
    yield "full", {}, 1.0
    for name, (left, right) in {
        "causal": (N - 1, 0),
        f"window of {W}": (W // 2, W // 2 - 1),
        f"causal window of {W}": (W - 1, 0),
    }.items():
        yield name, {"window": (left, right)}, window_share(N, left, right)
    mask = random_blocks(N, 0.1)
    yield "a tenth of the blocks", {"block_mask": mask}, mask.density


def sparse(cells: list[Cell], device: Gpu) -> Iterator[Row]:
    """Speed-up over full attention, and what the share of the pairs would allow."""
    for cell in report.tracked(cells, "sparse"):
        full: float | None = None
        for name, given, share in sparse_cases(cell.N):
            row = {**cell.row(), "case": name, "share": share}
            row |= cost(partial(dict, given), cell, device)
            full = row.get("ms") if name == "full" else full
            if full is not None and "ms" in row:
                row["speedup"] = full / row["ms"]
            yield row


def host(cells: list[Cell], contestants: list[Contestant], device: Gpu) -> Iterator[Row]:
    """Microseconds of the host for each of many small calls in a row."""
    for cell in report.tracked(cells, "host"):
        for contestant in contestants:
            if cell.dtype not in contestant.dtypes or cell.kind not in contestant.passes:
                continue
            row = {**cell.row(), "contestant": contestant.name}
            try:
                with contestant.context():
                    inputs = device.inputs(cell.shapes, cell.dtype)[:1]
                    seconds = device.host_time(prepare(contestant, cell, inputs)[0])
                yield row | {"microseconds": 1e6 * seconds}
            except Exception as error:
                yield row | {"failed": one_line(error)}


def ceilings(dtypes: Sequence[str], n: int, device: Gpu) -> Iterator[Row]:
    """Measure large matrix products, and a copy."""
    for dtype in report.tracked(dtypes, "ceilings"):
        row: Row = {"ceiling": "matrix product", "dtype": dtype, "n": n}
        try:
            a, b = (device.normal((n, n), dtype, seed) for seed in (0, 1))
            seconds = median(device.time([partial(device.xp.matmul, a, b)]))
            yield row | {"tflops": 2 * n**3 / seconds / 1e12}
        except Exception as error:
            yield row | {"failed": one_line(error)}
    yield {"ceiling": "device copy", "gbytes_per_second": device.copy_rate() / 1e9}


def sections(
    arguments: argparse.Namespace, peers: list[Contestant], device: Gpu
) -> Iterator[tuple[str, Iterator[Row]]]:
    """Sections that the command line asks for, with the rows that each will make."""
    short = slice(1 if arguments.quick else None)
    causals = [False, True] if arguments.causal is None else [arguments.causal]
    dtypes = arguments.dtype or list(DTYPES)

    def cells(head_dims: Sequence[int], lengths: Sequence[int], many: slice) -> list[Cell]:
        return cells_of(
            dtypes[many],
            arguments.head_dim or head_dims[short],
            arguments.length or lengths[short],
            arguments.passes,
            causals[many],
        )

    asked = [name for name in SECTIONS if getattr(arguments, name)] or ["grid"]
    ours, again = Tileattn(), Tileattn(OURS[1], ("backward",), deterministic=True)
    one, every = slice(1), slice(None)
    if "grid" in asked:
        yield "grid", grid(cells(HEAD_DIMS, LENGTHS, every), [ours, again, *peers], device)
    if "shapes" in asked:
        lengths = arguments.length or SHAPE_LENGTHS[short]
        windowed = arguments.length or WINDOW_LENGTHS[short]
        cases = list(shapes_of(dtypes[one], lengths, windowed, arguments.passes, causals))
        yield "shapes", shapes(cases, [ours, again, *peers], device)
    if "options" in asked:
        yield "options", options(cells((128,), (2048, 8192), one), device)
    if "sparse" in asked:
        lengths = (2048,) if arguments.quick else (16384,)
        whole = [replace(cell, causal=False) for cell in cells((128,), lengths, one)]
        yield "sparse", sparse(whole, device)
    if "host" in asked:
        small = [Cell(kind, dtypes[0], 1, 4, 64, 64, False) for kind in arguments.passes]
        fresh = Tileattn("new output", ("forward",), reuse=False)
        yield "host", host(small, [ours, fresh, again, *peers], device)
    if "ceilings" in asked:
        yield "ceilings", ceilings(dtypes, 1024 if arguments.quick else 8192, device)


def run(arguments: argparse.Namespace, device: Gpu) -> None:
    """Run the sections; what was measured is written even where a run is broken off."""
    peers, missing = find(arguments.peers, device.xp)
    report.show_missing(missing)
    machine = device.machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    names = [*OURS, *(peer.name for peer in peers)]
    for section, made in sections(arguments, peers, device):
        stem = arguments.name if section == "grid" else f"{arguments.name}_{section}"
        rows: list[Row] = []
        raced = section in gpu_report.RACES
        if raced:
            print(gpu_report.grid_head(names))
        try:
            for row in made:
                rows.append(row)
                report.show(gpu_report.grid_line(row, names) if raced else report.plain_line(row))
            for line in gpu_report.means(rows) if raced else ():
                print(line)
        finally:
            if rows:
                path = arguments.to / f"{stem}.json"
                report.write(path, machine, rows, arguments.ran, section=section, missing=missing)
        if section == "grid" and rows:
            gpu_report.chart(rows, names, arguments.plot or arguments.to / f"{stem}.png")


def _names(allowed: Sequence[str], text: str) -> list[str]:
    values = text.split(",")
    for value in values:
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"{value} is none of {', '.join(allowed)}")
    return values


def _numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{min(values)} is below 1")
    return values


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; lists are separated by commas."""
    parser = argparse.ArgumentParser(
        prog="python -m tileattn bench gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    for section in SECTIONS:
        parser.add_argument(f"--{section}", action="store_true", help=f"run the {section} section")
    add = parser.add_argument
    add("--quick", action="store_true", help="one size of each kind")
    add("--dtype", type=partial(_names, tuple(DTYPES)), help=",".join(DTYPES))
    add(
        "--head-dim", type=_numbers, help=",".join(map(str, HEAD_DIMS)) + " (shapes have their own)"
    )
    add("--length", type=_numbers, help=",".join(map(str, LENGTHS)))
    add("--causal", action=argparse.BooleanOptionalAction, help="only with, or without (both)")
    add("--pass", dest="passes", type=partial(_names, PASSES), default=list(PASSES))
    add("--peers", type=partial(_names, PEERS), default=list(PEERS))
    add("--name", default="gpu", help="stem of the files (gpu)")
    report.add_target(parser)
    add("--plot", type=Path, help="file of the chart (beside the results)")
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    arguments.ran = report.command("python -m tileattn bench gpu", argv)
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    arguments = parse(argv)
    reason = tileattn.available_backends()["cupy"]
    if reason is not None:
        sys.exit(f"there is nothing to time: the cupy backend cannot run here: {reason}")
    run(arguments, Gpu())


if __name__ == "__main__":
    main()
