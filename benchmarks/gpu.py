"""Speed on the GPU, with PyTorch, FlashAttention-3 and 4 and naive CuPy as baselines, in one run.

    python -m tileattn bench gpu                     the grid: every size, dtype, pass, baseline
    python -m tileattn bench gpu --shapes            GQA, D = 192 with Dv = 128, windows
    python -m tileattn bench gpu --sparse            windows and block masks against full attention
    python -m tileattn bench gpu --host              CPU launch overhead of a warm call
    python -m tileattn bench gpu --ceilings          matmuls and device copies
    python -m tileattn bench gpu --grid --dtype bf16 --head-dim 128 --length 2048,8192
                                 --no-causal --pass forward --peers flash,cudnn

The files are gpu.json, gpu_shapes.json, gpu_sparse.json, gpu_host.json and gpu_ceilings.json.

All implementations take turns in one process, on the same data. A time is the median of repeats, by
CUDA events. Calls alternate between sets of inputs, so that these come from HBM and not from the L2
cache. FLOPs are 4 B H N N D forward, half of it for causal, and 2.5 times that backward, whatever
an implementation computes; with a window, only those inside it. Results are compared with
tileattn's: if they differ, no speedup is given.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import geometric_mean, median
from typing import Any

from benchmarks import peers, report
from benchmarks.comparison import spread, time_in_turns
from benchmarks.configurations import (
    DTYPES,
    HEAD_DIMS,
    LENGTHS,
    PASSES,
    SHAPE_LENGTHS,
    WINDOW_LENGTHS,
    Call,
    Configuration,
    grid_of,
    normal,
    shapes_of,
    sparse_cases,
)
from benchmarks.device import AGREEMENT, Gpu, difference, in_turns, measure, prepare
from benchmarks.implementations import BASELINES, Implementation, Tileattn, find
from benchmarks.report import Row, one_line
from benchmarks.tensors import arrays

SECTIONS = ("grid", "shapes", "sparse", "host", "ceilings")
COMPARISONS = ("grid", "shapes")  # sections with baselines
OURS = ("tileattn", "deterministic")
RIVALS = ("cudnn", "fa3", "fa4")  # the baselines whose kernels are made for this GPU


def compare(
    configuration: Configuration, implementations: Iterable[Implementation], device: Gpu
) -> Row:
    """Time all that support the configuration, in turns; a failure is recorded."""
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    mismatch: dict[str, str] = {}
    expected: list[Any] | None = None
    for one in implementations:
        if not one.supports(configuration):
            continue
        name = one.name
        try:
            call = in_turns(one, configuration, device)
            results = arrays(call(), device.xp)
            expected = results if name == OURS[0] else expected
            distance = 0.0 if expected is None else difference(results, expected, device.xp)
        except Exception as error:
            failed[name] = one_line(error)
        else:
            calls[name] = call
            if not distance <= AGREEMENT[configuration.dtype]:
                mismatch[name] = f"{distance:.1e}"
        results = []
        device.release()
    times = time_in_turns(calls, device, failed)
    del calls
    device.release()
    tflops = {name: configuration.flops / median(s) / 1e12 for name, s in times.items()}
    right = tflops.keys() - mismatch.keys()
    baselines = right - set(OURS) if OURS[0] in right else set()
    return configuration.row() | {
        "tflops": {name: round(value, 2) for name, value in tflops.items()},
        "speedup_over": {
            name: round(tflops[OURS[0]] / tflops[name], 3) for name in tflops if name in baselines
        },
        "spread": {name: round(spread(seconds), 3) for name, seconds in times.items()},
        "mismatch": mismatch,
        "failed": failed,
    }


def best(row: Row) -> float | None:
    """Return the speedup over the fastest rival; None without a rival."""
    speedups = row["speedup_over"]
    return min((speedups[name] for name in RIVALS if name in speedups), default=None)


def means(rows: Iterable[Row]) -> Iterator[str]:
    """Summarise the speedup over the fastest rival, by pass."""
    passes: dict[str, list[Row]] = {}
    for row in rows:
        if best(row) is not None:
            passes.setdefault(row["pass"], []).append(row)
    for name, compared in passes.items():
        there = [x for x in RIVALS if any(x in row["speedup_over"] for row in compared)]
        speedups = [speedup for speedup in map(best, compared) if speedup is not None]
        over = f"the fastest of {' and '.join(there)}" if len(there) > 1 else there[0]
        yield (
            f"{name}, speedup over {over} in {len(speedups)} configurations: "
            f"geometric mean {geometric_mean(speedups):.2f}, smallest {min(speedups):.2f}"
        )


def verified(row: Row) -> dict[str, float]:
    """Return the TFLOP/s of results that agree; tileattn's only if a baseline confirms it."""
    alone = {"tileattn"} if row["mismatch"] and not row["speedup_over"] else set()
    return {name: x for name, x in row["tflops"].items() if name not in {*row["mismatch"], *alone}}


def compared(
    named: Sequence[tuple[str, Configuration]],
    implementations: Sequence[Implementation],
    device: Gpu,
) -> Iterator[Row]:
    """Compare over all configurations; those outside the grid have a name."""
    for name, configuration in named:
        row = compare(configuration, implementations, device)
        yield {"case": name, **row} if name else row


def cost(make: Callable[[], dict[str, Any]], configuration: Configuration, device: Gpu) -> Row:
    """Return the milliseconds of a call with options, or why it failed."""
    try:
        given = make()
        seconds = median(measure(Tileattn(**given), configuration, device)[0])
    except Exception as error:
        return {"failed": one_line(error)}
    finally:
        device.release()
    return {"ms": 1e3 * seconds}


def sparse(configurations: Sequence[Configuration], device: Gpu) -> Iterator[Row]:
    """Measure the speedup over full attention, by the density of the mask."""
    for one in configurations:
        full: float | None = None
        for name, given, density in sparse_cases(one.N):
            row = {**one.row(), "case": name, "density": density}
            row |= cost(partial(dict, given), one, device)
            full = row.get("ms") if name == "full" else full
            if full is not None and "ms" in row:
                row["speedup"] = full / row["ms"]
            yield row


def host(
    configurations: Sequence[Configuration], implementations: Sequence[Implementation], device: Gpu
) -> Iterator[Row]:
    for one in configurations:
        for implementation in implementations:
            if not implementation.supports(one):
                continue
            row = {**one.row(), "implementation": implementation.name}
            try:
                with implementation.context():
                    inputs = device.inputs(one.shapes, one.dtype)[:1]
                    seconds = device.launch_overhead(prepare(implementation, one, inputs)[0])
                yield row | {"launch_overhead_us": 1e6 * seconds}
            except Exception as error:
                yield row | {"failed": one_line(error)}


def ceilings(dtypes: Sequence[str], n: int, device: Gpu) -> Iterator[Row]:
    for dtype in dtypes:
        row: Row = {"ceiling": "matmul", "dtype": dtype, "n": n}
        try:
            a, b = (normal(device.xp, (n, n), dtype, seed) for seed in (0, 1))
            seconds = median(device.time([partial(device.xp.matmul, a, b)]))
            yield row | {"tflops": 2 * n**3 / seconds / 1e12}
        except Exception as error:
            yield row | {"failed": one_line(error)}
    yield {"ceiling": "copy", "gbytes_per_second": device.copy_rate() / 1e9}


def sections(
    arguments: argparse.Namespace, baselines: Sequence[Implementation], device: Gpu
) -> Iterator[tuple[str, Iterator[Row]]]:
    """Return the sections that the command line asks for, with their rows."""
    causals = [False, True] if arguments.causal is None else [arguments.causal]
    dtypes, passes = arguments.dtype or list(DTYPES), arguments.passes

    def few(sizes: Sequence[int]) -> Sequence[int]:
        return sizes[:1] if arguments.quick else sizes

    def grid(
        dtypes: Sequence[str], head_dims: Sequence[int], lengths: Sequence[int]
    ) -> list[Configuration]:
        head_dims, lengths = arguments.head_dim or few(head_dims), arguments.length or few(lengths)
        return grid_of(dtypes, head_dims, lengths, passes, causals)

    asked = [name for name in SECTIONS if getattr(arguments, name)] or ["grid"]
    ours, again = Tileattn(), Tileattn(OURS[1], ("backward",), deterministic=True)
    first = dtypes[:1]
    if "grid" in asked:
        named = [("", one) for one in grid(dtypes, HEAD_DIMS, LENGTHS)]
        yield "grid", compared(named, [ours, again, *baselines], device)
    if "shapes" in asked:
        lengths = arguments.length or few(SHAPE_LENGTHS)
        windowed = arguments.length or few(WINDOW_LENGTHS)
        named = list(shapes_of(first, lengths, windowed, passes, causals))
        yield "shapes", compared(named, [ours, again, *baselines], device)
    if "sparse" in asked:
        dense = grid(first, (128,), (2048,) if arguments.quick else (16384,))
        once = dict.fromkeys(replace(one, causal=False) for one in dense)
        yield "sparse", sparse(list(once), device)
    if "host" in asked:
        small = [Configuration(kind, dtypes[0], 1, 4, 64, 64) for kind in passes]
        fresh = Tileattn("new output", ("forward",), reuse=False)
        yield "host", host(small, [ours, fresh, again, *baselines], device)
    if "ceilings" in asked:
        yield "ceilings", ceilings(dtypes, 1024 if arguments.quick else 8192, device)


def _numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{min(values)} is below 1")
    return values


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; lists are separated by commas."""
    parser = report.parser("gpu", __doc__)
    add = parser.add_argument
    for section in SECTIONS:
        add(f"--{section}", action="store_true", help=f"run the {section} section")
    add("--quick", action="store_true", help="one size of each kind")
    add("--dtype", type=partial(report.names, tuple(DTYPES)), help=",".join(DTYPES))
    head_dims = ",".join(map(str, HEAD_DIMS))
    add("--head-dim", type=_numbers, help=f"{head_dims} (shapes have their own)")
    add("--length", type=_numbers, help=",".join(map(str, LENGTHS)))
    add("--causal", action=argparse.BooleanOptionalAction, help="only with, or without (both)")
    add("--pass", dest="passes", type=partial(report.names, PASSES), default=list(PASSES))
    peers.add_options(parser, BASELINES)
    add("--name", default="gpu", help="stem of the files (gpu)")
    return report.parsed(parser, argv)


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the sections; an interrupted run writes its rows, too."""
    arguments = parse(argv)
    device = device or Gpu.required()
    baselines, missing = find(arguments.peers, device.xp)
    report.show_missing(missing)
    machine = device.machine()
    print(report.line(machine))
    for section, made in sections(arguments, baselines, device):
        stem = arguments.name if section == "grid" else f"{arguments.name}_{section}"
        path = arguments.to / f"{stem}.json"
        more = {"section": section, "missing": missing}
        rows = report.written(made, path, lambda: machine, arguments.ran, **more)
        for line in means(rows) if section in COMPARISONS else ():
            print(line)


if __name__ == "__main__":
    main()
