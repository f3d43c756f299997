"""The tables of docs/performance-options.md: options, decoding, several GPUs, NaN, stress."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.report import Row
from tools.comparisons import NAMES
from tools.pages import folded, paragraphs, shown, table
from tools.performance_tables.slower import microseconds
from tools.tables import SHORT, by_section, columns, exclusions, origin_of, sections, table_of

FRAMEWORK_SECTIONS = {
    "host": "Microseconds on the CPU of a call of 16 tokens, B = 1, H = 8, D = 64, bf16",
    "passes": "Milliseconds of both passes of attention, B = 1, H = 16, D = 128, bf16",
    "block": "Milliseconds of both passes of a block of width 4096, compiled by PyTorch",
    "training": "Milliseconds of a step of training, width 768, B = 4, float32",
}


def _timed(names: Sequence[str], more: Sequence[str], rows: list[Row]) -> Iterator[str]:
    """Tabulate the times of all implementations, and the speedup over the fastest."""
    times = dict.fromkeys(name for row in rows for name in row["us"])
    flat = []
    for row in rows:
        us = {f"{NAMES.get(x, x)}, us": microseconds(row["us"].get(x)) for x in times}
        fastest = min(row["speedup_over"].values(), default=None)
        rates = row.get("gbytes_per_second", {})
        flat.append(row | us | {"fastest": fastest, "gbytes_per_second": rates.get("tileattn")})
    found = [x for x in more if any(row.get(x) is not None for row in flat)]
    head = [*names, *(f"{NAMES.get(x, x)}, us" for x in times), *found, "fastest"]
    yield from columns(head, flat)
    yield from exclusions(rows)


def _invariant(rows: list[Row]) -> Iterator[str]:
    """Tabulate the times with and without the option, and their quotient."""
    times = (("tileattn", "without, us"), ("invariant", "with, us"))
    quotient = " / ".join(title.removesuffix(", us") for _, title in times)
    flat = [
        row
        | {title: microseconds(row["us"].get(x)) for x, title in times}
        | {quotient: row["speed"]}
        for row in rows
    ]
    yield from columns(["D", "case", "Hq", "Hkv", *(title for _, title in times), quotient], flat)


TABLES: dict[str, tuple[str, Callable[[list[Row]], Iterator[str]]]] = {
    "options": ("Options", partial(_timed, ("pass", "option"), ("times_plain",))),
    "functions": (
        "Functions of scores and masks",
        partial(_timed, ("D", "function", "pass"), ("of_plain",)),
    ),
    "packed": (
        "Packed sequences",
        partial(_timed, ("pass", "D", "tokens", "lengths", "causal"), ("of_batch",)),
    ),
    "decode": (
        "Decoding",
        partial(_timed, ("case", "D", "Hq", "Hkv"), ("gbytes_per_second", "times_bf16")),
    ),
    "invariant": ("Invariant calls", _invariant),
    "sparse": ("Sparse masks", partial(columns, ["pass", "N", "case", "density", "ms", "speedup"])),
    "host": (
        "CPU launch overhead",
        partial(columns, ["pass", "N", "implementation", "launch_overhead_us"]),
    ),
}
"""Titles and makers of the tables of results files ``gpu_``."""


def lines(results: Mapping[str, Row]) -> Iterator[str]:
    """Make all tables of the page."""
    for name, (title, made) in TABLES.items():
        if (result := results.get(f"gpu_{name}")) is not None:
            row = result["rows"][0]
            known = {x: row[x] for x in "BHND" if _is_same(x, result["rows"])}
            facts = ", ".join([*(f"{x} = {size}" for x, size in known.items()), row["dtype"]])
            origin = f"{facts}. {origin_of(f'gpu_{name}', result)}"
            yield from paragraphs(f"## {title}", origin)
            rows = result["rows"]
            yield from folded(f"{len(rows)} rows", made(rows), is_open=len(rows) <= SHORT)
    if (result := results.get("frameworks_gpu")) is not None:
        yield from paragraphs("## Inside PyTorch", origin_of("frameworks_gpu", result))
        yield from sections(by_section(result), FRAMEWORK_SECTIONS)
    if (result := results.get("distributed_gpu")) is not None:
        yield from _gpus(result)
    yield from paragraphs("## NaN and infinity")
    yield from nonfinite(results["nonfinite"])
    yield from paragraphs("## Stress test")
    yield from _stress(results)


def _is_same(name: str, rows: Iterable[Row]) -> bool:
    return len({row.get(name) for row in rows} | {None}) == 2 and all(name in row for row in rows)


def _gpus(result: Row) -> Iterator[str]:
    """Compare the schedules of GPUs that share a sequence, a line per call."""
    machine, rows = result["machine"], result["rows"]
    nccl = machine["nccl"].strip("()").replace(", ", ".")
    known = f"{machine['ranks']} GPUs, NCCL {nccl}."
    first = rows[0]
    sizes = f"B = {first['B']}, H = {first['H']}, D = {first['D']}, {first['dtype']}"
    what = f"Milliseconds on one GPU, and the fraction of linear scaling by schedule, {sizes}:"
    title = "## GPUs that share a sequence"
    yield from paragraphs(title, f"{origin_of('distributed_gpu', result)} {known}", what)
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


def nonfinite(result: Row) -> Iterator[str]:
    """Compare calls with NaN and infinity with clean ones."""
    faults = list(dict.fromkeys(row["values"] for row in result["rows"] if "values" in row))[1:]
    what = "Slowdown over the same call with finite values"
    yield from paragraphs(f"{what}. {origin_of('nonfinite', result)}")
    calls: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        call = f"{row['case']}, {row['dtype']}, N = {row['N']}, D = {row['D']}", row["pass"]
        calls.setdefault(call, {})[row.get("values", "failed")] = row
    for title, single in (("One value", True), ("Many values", False)):
        some = [fault for fault in faults if fault.startswith("one ") is single]
        rows = [
            [*call, shown(found.get("clean", {}).get("ms"), ".3f")]
            + [shown(found.get(fault, {}).get("slowdown"), ".2f") for fault in some]
            for call, found in calls.items()
        ]
        yield from folded(title, table(["call", "pass", "finite, ms", *some], rows))


def _stress(results: Mapping[str, Row]) -> Iterator[str]:
    yield from paragraphs("Calls of both passes by `tools.stress_gpu`, which compares their bits.")
    head = ["variant", "pairs of D, Dv", "processes", "calls", "differ", "failures"]
    found = {name: x for name, x in results.items() if name.startswith("stress_gpu")}
    yield from table(head, map(stress_row, found.values()))
    origins = (f"- {x['rows'][0]['variant']}: {origin_of(n, x)}" for n, x in found.items())
    yield from paragraphs("\n".join(origins))


def stress_row(result: Row) -> list[Any]:
    """Count what one run of the stress test compared, and what differed."""
    rows = result["rows"]
    pairs, calls = {(row["D"], row["Dv"]) for row in rows}, sum(row["calls"] for row in rows)
    faults = len(result["differing"]), len(result["failures"])
    return [rows[0]["variant"], len(pairs), result["processes"], f"{calls:,}", *faults]
