"""The parts of docs/performance.md: what was measured, and a table of speedups for each topic."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from benchmarks.configurations import PASSES
from benchmarks.part import PARTS
from benchmarks.report import Row
from tileattn.cli.bench import BENCHMARKS
from tools.comparisons import NAMES, WIDE, Comparison, machine_of, source_of
from tools.pages import folded, paragraphs, table
from tools.tables import libraries_of, versioned

TABLES = ("grid", "decode", "packed", "options", "loops", "precision", "generic", "cpu", "ranks")
"""Parts that are a table of speedups and no more."""

RANGES = ("B", "H", "Hq", "Hkv", "N", "Nk", "D", "tokens")


def origins(results: Mapping[str, Row]) -> Iterator[str]:
    """List the machines, versions, commits and dates of the comparisons, the newest first."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, result in results.items():
        if (source := source_of(name)) is not None:
            machine = result["machine"]
            commit = f"commit {machine['commit'][:8]}"
            key = machine["date"], machine_of(result), libraries_of(machine), commit
            title = f"`{name}`" if "{" in source.title else source.title
            found.setdefault(key, []).append(title)
    lines = [
        f"- {date}, {', '.join(filter(None, known))}: {'; '.join(titles)}."
        for (date, *known), titles in sorted(found.items(), reverse=True)
    ]
    yield from folded("Machines, versions, commits and dates", [*lines, ""])


def headline(results: Mapping[str, Row], found: Iterable[Comparison]) -> Iterator[str]:
    """Say how fast the grid in bfloat16 is, beside which versions of which libraries."""
    certain = [x for x in found if x.is_certain]
    passes = {kind: [x for x in certain if x.file == f"gpu_{kind}_bf16"] for kind in PASSES}
    means = (
        f"the {kind} pass at {geometric_mean(one.speed for one in some):.2f} times"
        for kind, some in passes.items()
    )
    some = passes["forward"]
    peers = {kind: results[f"gpu_{kind}_bf16"]["machine"].get("peers", {}) for kind in PASSES}
    *first, last = (_beside(name, peers) for name in some[0].speeds)
    yield from paragraphs(
        f"On an {some[0].where} in bfloat16, tileattn runs {' and '.join(means)} the speed of the "
        f"fastest of {', '.join(first)} and {last}: geometric means of {len(some)} and "
        f"{len(passes['backward'])} configurations."
    )


def _beside(name: str, peers: Mapping[str, Mapping[str, str]]) -> str:
    """Name a library and its version; each version with its passes if passes have others."""
    passes: dict[str, list[str]] = {}
    for kind, versions in peers.items():
        passes.setdefault(versioned(NAMES[name], versions.get(name, "unknown")), []).append(kind)
    if len(passes) == 1:
        return next(iter(passes))
    return " or ".join(f"{label} ({' and '.join(kinds)})" for label, kinds in passes.items())


def part(name: str, found: Iterable[Comparison]) -> Iterator[str]:
    """Tabulate the speedups of a part of the page, a row for each measurement and pass."""
    some = [one for one in found if one.part == name]
    if not some:
        yield from paragraphs("Not measured yet.")
        return
    groups: dict[str, list[Comparison]] = {}
    for one in some:
        if one.is_certain:
            groups.setdefault(_title(one), []).append(one)
    head = ["", "speedup, mean", "least", "most", "slower", "of", "compared with the fastest of"]
    yield from table(head, ([title, *_summary(group)] for title, group in groups.items()))
    yield from paragraphs(*filter(None, (sizes(some), spreads(some))))


def _title(one: Comparison) -> str:
    kind = one.call.get("pass")
    said = kind is None or one.part == "loops" or one.what.startswith(kind.title())
    return one.what if said else f"{one.what}, {kind}"


def _summary(group: Sequence[Comparison]) -> Iterator[Any]:
    speeds = [one.speed for one in group]
    yield from map(ratio, (geometric_mean(speeds), min(speeds), max(speeds)))
    yield sum(one.is_slower for one in group)
    yield len(group)
    yield baselines_of(group)


def ratio(x: float) -> str:
    """Format a speedup: two decimals, or one digit that is not zero."""
    return f"{x:.2f}" if x >= 0.1 else f"{x:.1g}"


def baselines_of(found: Iterable[Comparison]) -> str:
    """Name the baselines that took part."""
    names = dict.fromkeys(name for one in found for name in one.speeds)
    return ", ".join(NAMES.get(name, name) for name in names)


def sizes(found: Sequence[Comparison]) -> str:
    """Say the ranges of the sizes that all calls have."""
    said = []
    for name in RANGES:
        if all(name in one.call for one in found):
            values = sorted({one.call[name] for one in found})
            ends = f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"
            said.append(f"{name} = {ends}")
    return f"{', '.join(said)}." if said else ""


def spreads(found: Sequence[Comparison]) -> str:
    """Say how far the times of a call spread."""
    widest = [max(one.spread.values()) for one in found if one.spread]
    if not widest:
        return ""
    wide = sum(x > WIDE for x in widest)
    more = f" In {wide} of {len(widest)} calls it exceeds 10 %: these do not count." if wide else ""
    return (
        f"The interquartile range of a time is {100 * median(widest):.1f} % of its median in the "
        f"middle call, {100 * max(widest):.0f} % at most.{more}"
    )


def models(found: Iterable[Comparison]) -> Iterator[str]:
    """Tabulate the speedups in the shapes of models, of all and of each."""
    found = list(found)
    yield from part("models", found)
    rows: dict[tuple[str, str], dict[str, Comparison]] = {}
    for one in found:
        if one.part == "models":
            key = one.call["case"], one.call["dtype"]
            rows.setdefault(key, {})[one.call["pass"]] = one
    if rows:
        kinds = "forward", "fastest other", "backward", "fastest other"
        head = ["model", "dtype", "B, H, N, D", *kinds]
        yield from table(head, (_model(*key, passes) for key, passes in rows.items()))


def _model(name: str, dtype: str, passes: dict[str, Comparison]) -> list[Any]:
    call = next(iter(passes.values())).call
    heads, D = (_pair(call, *names) for names in (("H", "Hkv"), ("D", "Dv")))
    row = [name, dtype, f"{call['B']}, {heads}, {_pair(call, 'N', 'Nk')}, {D}"]
    for kind in PASSES:
        one = passes.get(kind)
        row += [ratio(one.speed), NAMES.get(one.fastest, one.fastest)] if one else ["", ""]
    return row


def commands() -> Iterator[str]:
    """List the benchmarks, and the parts of the page that one command measures."""
    rows = ([f"`python -m tileattn bench {name}`", what] for name, what in BENCHMARKS.items())
    yield from table(["command", "measures"], rows)
    yield from paragraphs(f"The parts are {', '.join(f'`{name}`' for name in PARTS)}.")


def _pair(call: Row, name: str, other: str) -> str:
    """Return a size, and the other if it differs: query heads and key heads, and the like."""
    return f"{call[name]}/{call[other]}" if other in call else str(call[name])
