"""Queries of a rank that one call can take with the keys of another, where only their order counts.

Of keys in their order a query attends to the first few, and the next query to as many, or to one
more. As long as that goes on it is one causal call, whatever lies between these tokens in the
sequence: a zigzag is one call for each rank whose keys come by.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tileattn.distributed.layout import Segment
from tileattn.distributed.visibility import Visibility


class Run(NamedTuple):
    """Neighbours among the queries of a rank, and what they attend to.

    Parameters
    ----------
    start, stop : int
        Rows of the rank's arrays, from and to.
    first, last : int
        Keys that the first row attends to, and the last. From row to row there is one more, up to
        ``last``.
    """

    start: int
    stop: int
    first: int
    last: int

    def cut(self, step: int | None) -> Iterator["Run"]:
        """Cut at multiples of some rows."""
        at = self.start
        while at < self.stop:
            end = self.stop if step is None else min(self.stop, (at // step + 1) * step)
            first, last = (min(self.first + n - self.start, self.last) for n in (at, end - 1))
            yield Run(at, end, first, last)
            at = end

    def segments(self, visibility: Visibility) -> tuple[Segment, Segment]:
        """Give the keys and the queries as neighbours in a sequence without the others."""
        right, offset = visibility.window[1], int(visibility.q_offset[0])
        start = 0 if right is None else self.first - 1 - offset - right
        stop = start + self.stop - self.start
        return Segment(0, self.last, slice(0, self.last)), Segment(
            start, stop, slice(self.start, self.stop)
        )


def runs_of(
    visibility: Visibility, queries: Sequence[Segment], keys: Sequence[Segment]
) -> list[Run]:
    """List the runs of a rank's queries over the keys of a rank, which are in their order."""
    found: list[Run] = []
    for x in _pieces(visibility, queries, keys):
        before = found[-1] if found else None
        if before is not None and before.last and before.stop == x.start:
            end = before.first + before.stop - before.start - 1  # without an end to the keys
            goes_on = end == before.last and x.first == end + 1
            if goes_on or x.first == x.last == before.last:
                found[-1] = Run(before.start, x.stop, before.first, x.last)
                continue
        found.append(x)
    return [x for x in found if x.last]


def _pieces(
    visibility: Visibility, queries: Sequence[Segment], keys: Sequence[Segment]
) -> Iterator[Run]:
    """Yield rows of each segment that attend to as many keys, or to one more from row to row."""
    right, total = visibility.window[1], sum(x.stop - x.start for x in keys)
    for a in queries:
        rows = a.rows.start - a.start
        if right is None:
            yield Run(a.rows.start, a.rows.stop, total, total)
            continue
        ahead, at, before = int(visibility.q_offset[0]) + right, a.start, 0
        for c in keys:
            start, stop = (min(max(x - ahead, at), a.stop) for x in (c.start, c.stop))
            if at < start:
                yield Run(rows + at, rows + start, before, before)
            if start < stop:
                first = before + start + ahead - c.start + 1
                yield Run(rows + start, rows + stop, first, first + stop - start - 1)
            at, before = stop, before + c.stop - c.start
        if at < a.stop:
            yield Run(rows + at, rows + a.stop, before, before)
