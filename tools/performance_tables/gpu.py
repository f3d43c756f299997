"""The tables of docs/performance-gpu.md: every configuration, lower bounds and peak memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean

from benchmarks import gpu, roofline
from benchmarks.report import Row
from tools.comparisons import NAMES, SOURCES, WIDE
from tools.pages import folded, paragraphs, shown
from tools.performance_tables import memory
from tools.performance_tables.slower import microseconds
from tools.tables import columns, exclusions, origin_of

SIZES = ["case", "dtype", "B", "H", "Hkv", "N", "Nk", "D", "Dv", "causal", "window", "options"]
OURS = [f"{name}, {unit}" for unit in ("TFLOP/s", "us") for name in gpu.OURS]
COLUMNS = {
    "ceilings": ["ceiling", "dtype", "tflops", "gbytes_per_second"],
    "bounds": [
        "pass",
        "dtype",
        "D",
        "causal",
        "compute_ms",
        "exp_ms",
        "memory_ms",
        "ms",
        "percent",
        "file",
    ],
    "comparison": [*SIZES, *OURS, "percent"],
}
BOUNDS_AT = 8192  # keys, in all grids of the GPU
SECTIONS = (*gpu.COMPARISONS, "models")


def lines(results: Mapping[str, Row]) -> Iterator[str]:
    """Make a folded table of each comparison, then the tables of bounds and of memory."""
    ceilings = results["gpu_ceilings"]
    compared = [name for name in results if results[name].get("section") in SECTIONS]
    known = [name for name in SOURCES if name in compared]
    for name in (*known, *(name for name in compared if name not in known)):
        title = SOURCES[name].title if name in SOURCES else name
        yield from paragraphs(f"## {title}", origin_of(name, results[name]))
        yield from _comparison(results[name], ceilings)
    yield from paragraphs("## Lower bounds")
    yield from bounds(results, ceilings)
    yield from paragraphs(f"The rates of the bounds: {origin_of('gpu_ceilings', ceilings)}")
    yield from columns(COLUMNS["ceilings"], ceilings["rows"])
    yield from paragraphs("## Peak memory on the GPU")
    yield from memory.lines("memory_gpu", results["memory_gpu"])


def _comparison(result: Row, ceilings: Row) -> Iterator[str]:
    """Tabulate the times, % of roofline and speedups of each pass, without empty columns."""
    rows = []
    grid = all("tflops" in row for row in result["rows"])
    percents = roofline.percents(result, ceilings) if grid else [None] * len(result["rows"])
    for row, percent in zip(result["rows"], percents, strict=True):
        most = max(row["spread"].values(), default=0.0)
        found = {"percent": percent, "fastest": min(row["speedup_over"].values(), default=None)}
        found |= {"most_spread": most, "spread": shown(100 * most, ".0f") if most > WIDE else None}
        for name in gpu.OURS:
            if grid:
                found[f"{name}, TFLOP/s"] = shown(gpu.verified(row).get(name), ".0f")
            else:
                found[f"{name}, us"] = microseconds(row["us"].get(name))
        rows.append(row | found | {NAMES.get(x, x): y for x, y in row["speedup_over"].items()})
    baselines = dict.fromkeys(NAMES.get(x, x) for row in rows for x in row["speedup_over"])
    names = [
        *COLUMNS["comparison"],
        *(baselines if len(baselines) > 1 else ()),
        "fastest",
        "spread",
    ]
    names = [x for x in names if any(row.get(x) not in (None, "") for row in rows)]
    if len({row["dtype"] for row in rows}) == 1:
        names.remove("dtype")
    for kind in dict.fromkeys(row["pass"] for row in rows):
        some = [row for row in rows if row["pass"] == kind]
        yield from folded(f"{kind.capitalize()}: {_mean(some, baselines)}", columns(names, some))
    yield from exclusions(result["rows"])


def _mean(rows: Sequence[Row], baselines: Iterable[str]) -> str:
    """Say how many rows there are, and the mean speedup over each baseline in certain ones."""
    said = [f"{len(rows)} configurations"]
    rows = [row for row in rows if row["most_spread"] <= WIDE]
    for name in baselines:
        speeds = [row[name] for row in rows if name in row]
        if speeds:
            said.append(f"speedup over {name} {geometric_mean(speeds):.2f}")
    return "; ".join(said)


def bounds(results: Mapping[str, Row], measured: Row) -> Iterator[str]:
    """Compare the time of each kernel with its lower bounds, at one sequence length."""
    ceilings = roofline.ceilings_of(measured)
    what = "Lower bound by each resource, and the time of tileattn"
    yield from paragraphs(f"{what}, at N = {BOUNDS_AT}:")
    found = []
    for name, result in results.items():
        one = result["machine"].get("gpu") == measured["machine"]["gpu"]
        if result.get("section") == "grid" and one:
            rows = (row for row in result["rows"] if row["N"] == BOUNDS_AT)
            known = [row for row in rows if row["dtype"] in ceilings.flops]
            found += [row | {"file": name} for row in roofline.lines(known, ceilings)]
    yield from columns(COLUMNS["bounds"], found)
