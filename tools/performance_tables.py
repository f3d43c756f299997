"""Write the tables of docs/performance*.md from benchmarks/results, or check them."""

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import cpu, gpu, roofline
from benchmarks.configurations import PASSES
from benchmarks.report import RESULTS, Row, load
from tools import lived_tables, pages
from tools.pages import DOCS, paragraphs, shown, table
from tools.tables import HEADINGS, by_section, columns, origin_of, sections, table_of

BEGIN = "<!-- tables: python -m tools.performance_tables --write -->"
END = "<!-- end of tables -->"

# Results files of comparisons, in the order of the pages, each with its title.
COMPARISONS = {
    "gpu_forward_bf16": "Forward, bf16",
    "gpu_forward_fp16": "Forward, fp16",
    "gpu_backward_bf16": "Backward, bf16",
    "gpu_backward_fp16": "Backward, fp16",
    "gpu_shapes": "Forward, bf16, other shapes",
    "gpu_backward_shapes": "Backward, bf16, other shapes",
    "gpu_f32": "Float32",
    "gpu_f64": "Float64",
    "gpu_bf16": "Generic kernels, bf16",
    "gpu_fp16": "Generic kernels, fp16",
}
BASELINES = {  # of the summary, where the fastest of cuDNN and FlashAttention-4 did not take part
    "gpu_f32": "efficient",
    "gpu_f64": "math",
    "gpu_bf16": "flash",
    "gpu_fp16": "flash",
}
NAMES = {
    "best": "cuDNN or FlashAttention-4",
    "efficient": "PyTorch, memory-efficient",
    "math": "PyTorch, unfused",
    "flash": "FlashAttention-2",
}

RANKS = "distributed_cpu"
GPUS = "distributed_gpu"
SPEEDUPS = "Geometric means of the speedups in the grid:"
CPU_SECTIONS = {
    "grid": "GFLOP/s, B = 1, H = 8:",
    "small": "Microseconds of a call of 16 tokens, H = 8, D = 64:",
    "decoding": "GB/s of k and v, one query over 4096 keys of D = 128, float32:",
    "options": "Milliseconds of a call with one option, and ratio to the call without, H = 8:",
    "scaling": "GFLOP/s by number of threads, H = 16, D = 64:",
    "ceilings": "Ceilings:",
}

GPU_FRAMEWORK_SECTIONS = {
    "host": "Microseconds on the CPU of a call of 16 tokens, B = 1, H = 8, D = 64, bf16:",
    "passes": "Milliseconds of both passes of attention, B = 1, H = 16, D = 128, bf16:",
    "block": "Milliseconds of both passes of a block of width 4096, compiled by PyTorch:",
    "training": "Milliseconds of a step of training, width 768, B = 4, float32:",
}
FRAMEWORK_SECTIONS = {
    "host": "Microseconds of a call of 16 tokens, B = 1, H = 8, D = 64, float32:",
    "passes": "Milliseconds of both passes of attention, B = 1, H = 8, D = 64, float32:",
    "block": "Milliseconds of both passes of a block of width 1024, compiled by PyTorch:",
    "training": "Milliseconds of a step of training, width 384, B = 2, float32:",
}

COLUMNS = {
    "sparse": "pass N case density ms speedup",
    "host": "pass N implementation launch_overhead_us",
    "ceilings": "ceiling dtype tflops gbytes_per_second",
    "bounds": "pass dtype D causal compute_ms exp_ms memory_ms ms percent file",
    "comparison": "case D N causal tflops deterministic percent best",
}
WIDE = 0.1  # an interquartile range over a median, from which a speedup is uncertain
BOUNDS_AT = 8192  # keys, in all grids of the GPU


def summary_lines() -> Iterator[str]:
    ceilings = load(RESULTS, "gpu_ceilings")
    head = ["", "baseline", "cases", "speedup, mean", "least", "most", "TFLOP/s", "% of roofline"]
    yield from table(head, (line for name in COMPARISONS for line in _summary(name, ceilings)))
    found = {title: load(RESULTS, name) for name, title in COMPARISONS.items()}
    one = ceilings["machine"]["gpu"]
    gpus = {title: result["machine"]["gpu"] for title, result in found.items()}
    others = (f"; {title} on an {gpu}" for title, gpu in gpus.items() if gpu != one)
    dates = sorted(result["machine"]["date"] for result in found.values())
    yield from paragraphs(f"Measured on an {one}{''.join(others)}; {dates[0]} to {dates[-1]}.")
    rows = [row for result in found.values() for row in result["rows"]]
    wide = sum(max(row["spread"].values(), default=0) > WIDE for row in rows)
    yield from paragraphs(
        f"In {wide} of {len(rows)} configurations the interquartile range of an implementation's "
        "times exceeds a tenth of their median: their speedups are uncertain."
    )
    if results := _cpu_results():
        head = ["", "baseline", "cases", "speedup, mean", "least", "most", "GFLOP/s"]
        yield from table(head, (line for result in results for line in _cpu_summary(result)))


def _summary(name: str, ceilings: Row) -> Iterator[list[Any]]:
    """Summarise each pass of a comparison: speedups, and the largest TFLOP/s and % of roofline."""
    result, baseline = load(RESULTS, name), BASELINES.get(name)
    percents = roofline.percents(result, ceilings)
    for kind in ("forward", "backward"):
        found = [
            (gpu.best(row) if baseline is None else row["speedup_over"].get(baseline), row, percent)
            for row, percent in zip(result["rows"], percents, strict=True)
            if row["pass"] == kind and row["speedup_over"]
        ]
        if not found:
            continue
        rivals = NAMES["best" if baseline is None else baseline]
        title = COMPARISONS[name]
        title = title if title.startswith(kind.title()) else f"{title}, {kind}"
        speed = max(row["tflops"]["tileattn"] for _, row, _ in found)
        known = [percent for *_, percent in found if percent is not None]
        speedups = [speedup for speedup, *_ in found if speedup is not None]
        yield [
            title,
            rivals,
            *_spread(speedups),
            f"{speed:.0f}",
            shown(max(known, default=None), ".0f"),
        ]


def _cpu_summary(result: Row) -> Iterator[list[Any]]:
    """Summarise each float32 pass on a CPU: speedups by baseline, and the largest GFLOP/s."""
    grid = [x for x in result["rows"] if x["section"] == "grid" and x["dtype"] == "f32"]
    for kind, (ours, baseline) in itertools.product(PASSES, cpu.PAIRS):
        rates = [x["gflops"] for x in grid if x["pass"] == kind]
        found = [x for x in rates if ours in x and baseline in x]
        if found:
            title = f"{result['machine']['processor']}, {ours}, {kind}"
            speed = max(x[ours] for x in found)
            speedups = [x[ours] / x[baseline] for x in found]
            yield [title, HEADINGS.get(baseline, baseline), *_spread(speedups), f"{speed:.0f}"]


def _spread(speedups: list[float]) -> list[Any]:
    """Count speedups, with their geometric mean, the least and the most."""
    values = (geometric_mean(speedups), min(speedups), max(speedups))
    return [len(speedups), *(f"{x:.2f}" for x in values)]


def cpu_lines() -> Iterator[str]:
    for result in _cpu_results():
        machine = result["machine"]
        title = f"## {machine['processor']}, {machine['threads']} threads"
        yield from paragraphs(title, _cpu_origin(result))
        found = by_section(result)
        if "grid" in found:
            yield from paragraphs(SPEEDUPS)
            yield from table_of(list(cpu.speedups(found["grid"])))
        yield from sections(found, CPU_SECTIONS)
    for path in sorted({*RESULTS.glob("frameworks*.json")} - {RESULTS / "frameworks_gpu.json"}):
        result = load(RESULTS, path.stem)
        yield from paragraphs("## Inside PyTorch", _cpu_origin(result))
        yield from sections(by_section(result), FRAMEWORK_SECTIONS)
    if (RESULTS / f"{RANKS}.json").exists():
        result = load(RESULTS, RANKS)
        known = f"{result['machine']['ranks']} ranks, started by {result['machine']['started_by']}"
        yield from paragraphs("## Ranks that share a sequence", f"{_cpu_origin(result)} {known}.")
        yield from table_of(result["rows"])
    yield from paragraphs("## Peak memory on the CPU")
    yield from _memory(load(RESULTS, "memory_cpu"))


def _cpu_results() -> list[Row]:
    """Load what was recorded on each kind of CPU."""
    return [load(RESULTS, path.stem) for path in sorted(RESULTS.glob("cpu*.json"))]


def _cpu_origin(result: Row) -> str:
    """Describe the run, and the instructions of the processor."""
    machine = result["machine"]
    known = f"LLVM calls it {machine['cpu']}: {machine['features']}." if "cpu" in machine else ""
    return f"Measured by {origin_of(result)} {known}"


def gpu_lines() -> Iterator[str]:
    results = {path.stem: load(RESULTS, path.stem) for path in sorted(RESULTS.glob("gpu*.json"))}
    ceilings = results["gpu_ceilings"]
    compared = [name for name, x in results.items() if x["section"] in gpu.COMPARISONS]
    for name in [*COMPARISONS, *(name for name in compared if name not in COMPARISONS)]:
        origin = origin_of(results[name])
        yield from paragraphs(f"## {COMPARISONS.get(name, name)}", f"Measured by {origin}")
        yield from _comparison(results[name], ceilings)
    yield from paragraphs("## Lower bounds")
    yield from bounds(results, ceilings)
    yield from paragraphs(f"The rates of the bounds were measured by {origin_of(ceilings)}")
    yield from columns(COLUMNS["ceilings"].split(), ceilings["rows"])
    yield from paragraphs("## Peak memory on the GPU")
    yield from _memory(load(RESULTS, "memory_gpu"))


def option_lines() -> Iterator[str]:
    """Make the tables of options, functions, sparse masks, launch overhead, NaN and stress."""
    tables: dict[str, tuple[str, Callable[[list[Row]], Iterator[str]]]] = {
        "options": ("Options", _options),
        "functions": ("Functions of scores and masks", _functions),
        "packed": ("Packed sequences", _packed),
        "decode": ("Decoding", _decode),
        "sparse": ("Sparse masks", partial(columns, COLUMNS["sparse"].split())),
        "host": ("CPU launch overhead", partial(columns, COLUMNS["host"].split())),
    }
    measured = {path.stem for path in RESULTS.glob("gpu_*.json")}
    for name, (title, lines) in tables.items():
        if f"gpu_{name}" not in measured:
            continue
        result = load(RESULTS, f"gpu_{name}")
        row = result["rows"][0]
        known = {x: row[x] for x in "BHND" if x in row and len({y[x] for y in result["rows"]}) == 1}
        sizes = ", ".join(f"{x} = {size}" for x, size in known.items())
        origin = f"{sizes}, {row['dtype']}. Measured by {origin_of(result)}"
        yield from paragraphs(f"## {title}", origin)
        yield from lines(result["rows"])
    if (RESULTS / "frameworks_gpu.json").exists():
        result = load(RESULTS, "frameworks_gpu")
        yield from paragraphs("## Inside PyTorch", f"Measured by {origin_of(result)}")
        yield from sections(by_section(result), GPU_FRAMEWORK_SECTIONS)
    if (RESULTS / f"{GPUS}.json").exists():
        yield from _gpus(load(RESULTS, GPUS))
    yield from paragraphs("## NaN and infinity")
    yield from nonfinite(load(RESULTS, "nonfinite"))
    yield from paragraphs("## Stress test")
    yield from _stress()


def _gpus(result: Row) -> Iterator[str]:
    """Compare the schedules of GPUs that share a sequence, a line per call."""
    machine, rows = result["machine"], result["rows"]
    nccl = machine["nccl"].strip("()").replace(", ", ".")
    known = f"{machine['ranks']} GPUs, NCCL {nccl}."
    first = rows[0]
    sizes = f"B = {first['B']}, H = {first['H']}, D = {first['D']}, {first['dtype']}"
    what = f"Milliseconds on one GPU, and the fraction of linear scaling by schedule, {sizes}:"
    title = "## GPUs that share a sequence"
    yield from paragraphs(title, f"Measured by {origin_of(result)} {known}", what)
    yield from table_of(_by_schedule(rows, "fraction_of_linear"))
    if any("fraction_of_each_gpu" in row for row in rows):
        yield from paragraphs(
            "The same against the slowest GPU when all run the single-GPU call at once:"
        )
        yield from table_of(_by_schedule(rows, "fraction_of_each_gpu", "each"))
    if any("share_of_memory" in row for row in rows):
        yield from paragraphs(
            "Peak memory of a GPU, times their number, over that of a single GPU:"
        )
        yield from table_of(_by_schedule(rows, "share_of_memory"))


def _by_schedule(rows: list[Row], name: str, gpus: str = "one") -> list[Row]:
    """Return a row per call: the time on one GPU, or on each at once, and a figure per schedule."""
    calls = dict[tuple[Any, ...], Row]()
    for row in rows:
        one = {"N": row["N"], "heads of k": row.get("Hkv", row["H"]), "pass": row["pass"]}
        one |= {"causal": row["causal"]}
        call = calls.setdefault(tuple(one.values()), one | {f"{gpus} GPU, ms": None, name: {}})
        call[f"{gpus} GPU, ms"] = row.get(f"{gpus}_gpu_ms", call[f"{gpus} GPU, ms"])
        call[name][row["schedule"]] = row.get(name)
    return list(calls.values())


def _options(rows: list[Row]) -> Iterator[str]:
    """Compare the times of options with other libraries."""
    peers = dict.fromkeys(f"{name}, ms" for row in rows for name in row["peers_ms"])
    flat = [
        row | {f"{x}, ms": ms for x, ms in row["peers_ms"].items()} | {"peers": row["speedup"]}
        for row in rows
    ]
    yield from columns(["pass", "option", "ms", "times_plain", *peers, "peers"], flat)


def _functions(rows: list[Row]) -> Iterator[str]:
    """Compare the times of functions with FlexAttention and the call without one."""
    passes = ("forward", "backward", "backward, with the gradients of its arrays")
    flat = [
        {
            **row,
            "pass": kind,
            "ms": ms,
            "of_plain": plain,
            "flex, ms": flex,
            "over_flex": flex and flex / ms,
        }
        for row in rows
        for kind, ms, plain, flex in zip(
            passes,
            row["tileattn_ms"],
            [*row["of_plain"], None],
            row["flex_ms"] or [None] * len(passes),
            strict=False,
        )
    ]
    yield from columns(["D", "function", "pass", "ms", "of_plain", "flex, ms", "over_flex"], flat)


def _packed(rows: list[Row]) -> Iterator[str]:
    """Compare the times of packed sequences with FlashAttention-4 and batches."""
    flat = [
        row | {"fa4, ms": row["fa4_ms"], "batch": row["of_batch"], "over_fa4": row["speedup"]}
        for row in rows
    ]
    names = ["pass", "D", "tokens", "lengths", "causal", "ms", "batch", "fa4, ms", "over_fa4"]
    yield from columns(names, flat)


def _decode(rows: list[Row]) -> Iterator[str]:
    """Compare the rates of decoding with cuDNN and FlashAttention-4."""
    peers = dict.fromkeys(f"{name}, us" for row in rows for name in row["peers_us"])
    flat = [
        row | {f"{x}, us": us for x, us in row["peers_us"].items()} | {"peers": row["speedup"]}
        for row in rows
    ]
    names = ["case", "D", "Hq", "Hkv", "us", "gbytes_per_second", *peers, "peers"]
    yield from columns(names, flat)


def _memory(result: Row) -> Iterator[str]:
    """Peak memory beyond the inputs, a line for each sequence length."""
    first = result["rows"][0]
    heads = "one head" if first["H"] == 1 else f"{first['H']} heads"
    sizes = f"{heads} of {first['D']}, {first['dtype']}"
    yield from paragraphs(f"Measured by {origin_of(result)}", f"Peak memory in MB, {sizes}:")
    peaks: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        peaks.setdefault(row["N"], {})[f"{row['implementation']}, {row['pass']}"] = _peak(row)
    columns = list(next(iter(peaks.values())))
    yield from table(["N", *columns], ([N, *map(x.get, columns)] for N, x in peaks.items()))


def _peak(row: Row) -> str:
    """Return the megabytes, or why there are none."""
    if "peak_bytes" in row:
        return f"{row['peak_bytes'] / 1e6:.1f}"
    if "free_bytes" in row:
        return f"needs {row['needs_bytes'] / 1e6:,.0f}"
    return "failed" if "failed" in row else "too long"


def bounds(results: dict[str, Row], measured: Row) -> Iterator[str]:
    """Compare the time of each kernel with its lower bounds, at one sequence length."""
    ceilings = roofline.ceilings_of(measured)
    what = "Lower bound by each resource, and the time of tileattn"
    yield from paragraphs(f"{what}, at N = {BOUNDS_AT}:")
    found = []
    for name, result in results.items():
        if result["section"] == "grid" and result["machine"]["gpu"] == measured["machine"]["gpu"]:
            rows = (row for row in result["rows"] if row["N"] == BOUNDS_AT)
            known = [row for row in rows if row["dtype"] in ceilings.flops]
            found += [row | {"file": name} for row in roofline.lines(known, ceilings)]
    yield from columns(COLUMNS["bounds"].split(), found)


def nonfinite(result: Row) -> Iterator[str]:
    """Compare calls with NaN and infinity with clean ones."""
    faults = list(dict.fromkeys(row["values"] for row in result["rows"] if "values" in row))[1:]
    what = "Slowdown over the same call with finite values"
    yield from paragraphs(f"{what}. Measured by {origin_of(result)}")
    calls: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        call = f"{row['case']}, {row['dtype']}, N = {row['N']}, D = {row['D']}", row["pass"]
        calls.setdefault(call, {})[row.get("values", "failed")] = row
    for title, single in (("One value:", True), ("Many values:", False)):
        some = [fault for fault in faults if fault.startswith("one ") is single]
        rows = [
            [*call, shown(found.get("clean", {}).get("ms"), ".3f")]
            + [shown(found.get(fault, {}).get("slowdown"), ".2f") for fault in some]
            for call, found in calls.items()
        ]
        yield from paragraphs(title)
        yield from table(["call", "pass", "finite, ms", *some], rows)


def _stress() -> Iterator[str]:
    yield from paragraphs("Calls of both passes by `tools.stress_gpu`, which compares their bits.")
    head = ["variant", "pairs of D, Dv", "processes", "calls", "differ", "failures"]
    found = [load(RESULTS, path.stem) for path in sorted(RESULTS.glob("stress_gpu*"))]
    yield from table(head, map(stress_row, found))
    origins = (f"- {result['rows'][0]['variant']}: {origin_of(result)}" for result in found)
    yield from paragraphs("\n".join(origins))


def stress_row(result: Row) -> list[Any]:
    """Count what one run of the stress test compared, and what differed."""
    rows = result["rows"]
    pairs, calls = {(row["D"], row["Dv"]) for row in rows}, sum(row["calls"] for row in rows)
    faults = len(result["differing"]), len(result["failures"])
    return [rows[0]["variant"], len(pairs), result["processes"], f"{calls:,}", *faults]


def _comparison(result: Row, ceilings: Row) -> Iterator[str]:
    """Tabulate TFLOP/s, % of roofline and speedups, without empty columns."""
    rows = []
    for row, percent in zip(result["rows"], roofline.percents(result, ceilings), strict=True):
        speeds = gpu.verified(row)
        ours = {"tflops": speeds.get("tileattn"), "deterministic": speeds.get("deterministic")}
        rows.append(row | ours | {"percent": percent, "best": gpu.best(row)} | row["speedup_over"])
    baselines = dict.fromkeys(name for row in rows for name in row["speedup_over"])
    names = [*COLUMNS["comparison"].split(), *baselines]
    names = [x for x in names if any(row.get(x) is not None for row in rows)]
    passes = dict.fromkeys(row["pass"] for row in rows)
    for kind in passes:
        if len(passes) > 1:
            yield from paragraphs(f"{kind.capitalize()}:")
        yield from columns(names, [row for row in rows if row["pass"] == kind])
    for line in gpu.means(result["rows"]):
        yield from paragraphs(f"{line[0].upper()}{line[1:]}.")


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "performance.md": summary_lines,
    "performance-gpu.md": gpu_lines,
    "performance-options.md": option_lines,
    "performance-cpu.md": cpu_lines,
    "performance-loops.md": lambda: lived_tables.lines(RESULTS),
}


def main(argv: list[str] | None = None, docs: Path = DOCS) -> int:
    """Check or write the pages; the exit status is 1 if a check finds one stale."""
    parts = (pages.stale_part(docs / page, BEGIN, END, make()) for page, make in PAGES.items())
    return pages.main(argv, __doc__, itertools.chain.from_iterable(parts))


if __name__ == "__main__":
    sys.exit(main())
