"""The part of docs/performance.md that lists every call in which tileattn is slower."""

from collections.abc import Iterator, Sequence
from typing import Any

from tools.comparisons import NAMES, Comparison, label
from tools.pages import folded, paragraphs, shown, table
from tools.performance_tables.summary import baselines_of, ratio
from tools.verdicts import contradictions, verdict


def lines(found: Sequence[Comparison]) -> Iterator[str]:
    """Make a table of the measurements, then a folded table of the slower calls of each."""
    groups: dict[str, list[Comparison]] = {}
    for one in found:
        groups.setdefault(one.what, []).append(one)
    slower = {
        what: sorted((x for x in group if x.is_slower), key=lambda x: x.speed)
        for what, group in groups.items()
    }
    slower = {what: some for what, some in slower.items() if some}
    head = ["", "slower", "of", "least", "where", "compared with the fastest of"]
    yield from table(head, (_row(what, groups[what], some) for what, some in slower.items()))
    for what, some in slower.items():
        head = ["call", "fastest", "speed", "tileattn, us", "fastest, us", "verdict"]
        title = f"{what}: slower in {len(some)} of {len(groups[what])} calls"
        yield from folded(title, table(head, map(_call, some)))
    yield from _contradictions(found)


def _row(what: str, group: Sequence[Comparison], slower: Sequence[Comparison]) -> list[Any]:
    least = slower[0]
    counts = len(slower), len(group)
    return [what, *counts, ratio(least.speed), label(least.call), baselines_of(group)]


def _call(one: Comparison) -> list[Any]:
    fastest = one.fastest
    times = (microseconds(one.us.get(name)) for name in ("ours", fastest))
    name, judged = NAMES.get(fastest, fastest), verdict(one, fastest)
    return [label(one.call), name, f"{one.speed:.3g}", *times, judged]


def microseconds(us: float | None) -> str:
    """Format a time with three digits, or its whole part if that has more."""
    return shown(us, ".3g" if us is not None and us < 100 else ",.0f")


def _contradictions(found: Sequence[Comparison]) -> Iterator[str]:
    named = list(contradictions(found))
    if not named:
        yield from paragraphs("No call has one verdict in one table and another in another.")
        return
    yield from paragraphs("These calls have one verdict in one table and another in another:")
    yield from (f"- {one}." for one in named)
    yield ""
