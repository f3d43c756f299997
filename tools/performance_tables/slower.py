"""The part of docs/performance.md that lists every call in which tileattn is slower."""

from collections.abc import Iterator, Sequence
from typing import Any

from tools.comparisons import NAMES, Comparison, label
from tools.pages import folded, paragraphs, shown, table
from tools.performance_tables.summary import ratio
from tools.verdicts import contradictions, verdict


def lines(found: Sequence[Comparison]) -> Iterator[str]:
    """Make a folded table of the slower calls of each measurement."""
    groups: dict[str, list[Comparison]] = {}
    for one in found:
        groups.setdefault(one.what, []).append(one)
    slower = {
        what: sorted((x for x in group if x.is_slower), key=lambda x: x.speed)
        for what, group in groups.items()
    }
    every = [one for some in slower.values() for one in some]
    beyond = sum(verdict(one, one.fastest) == "slower" for one in every)
    yield from paragraphs(
        f"tileattn is slower in {len(every)} of {len(found)} calls; in {beyond} of them by more "
        "than the times spread."
    )
    head = ["call", "fastest", "speed", "tileattn, us", "fastest, us", "verdict"]
    for what, some in slower.items():
        if some:
            counts = f"slower in {len(some)} of {len(groups[what])} calls"
            title = f"{what}: {counts}, down to {ratio(some[0].speed)}"
            yield from folded(title, table(head, map(_call, some)))
    yield from _contradictions(found)


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
