"""The blocks that a rank computes: some of its queries, and keys that they attend to."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tileattn.distributed.layout import Layout, Segment
from tileattn.distributed.visibility import Visibility, reach

_ALIGNED = 128  # queries: a tile of a GPU, and a multiple of those that draw dropout together

Blocks = list[tuple[Segment, list[Segment]]]


class RankBlocks:
    """Who attends to what, of all ranks and of one.

    Parameters
    ----------
    visibility : Visibility
        Where keys are visible.
    q_layout, k_layout : Layout
        Queries and keys of each rank.
    rank : int
        Whose queries.
    rows : int or None
        Queries of a block, at most; None does not cut them.
    only_order : bool
        Whether of the positions of tokens nothing but their order counts: then tokens that are no
        neighbours in the sequence may be in one block.
    """

    def __init__(
        self,
        visibility: Visibility,
        q_layout: Layout,
        k_layout: Layout,
        rank: int,
        rows: int | None = None,
        *,
        only_order: bool = False,
    ) -> None:
        self.visibility, self.q_layout, self.k_layout = visibility, q_layout, k_layout
        self.rank, self._rows, self._only_order = rank, rows, only_order
        self._segments = [x for x in q_layout.segments(rank) if x.start != x.stop]
        self._end = q_layout.length_of(rank)
        self.options: dict[tuple[int, int, int, int], dict[str, Any]] = {}  # as blocks come
        self._of_sources: dict[int, Blocks] = {}

    def of(self, source: int) -> Blocks:
        """Give the keys of a rank in parts, each with the queries that attend to it."""
        found = self._of_sources.get(source)
        if found is None:
            keys = self.k_layout.segments(source)
            in_order = all(a.stop <= b.start for a, b in pairwise(keys))
            make = self._joined if self._only_order and in_order else self._apart
            found = self._of_sources[source] = make(keys)
        return found

    def _apart(self, keys: list[Segment]) -> Blocks:
        """Give a block for each pair of segments."""
        queries = [piece for x in self._segments for piece in _cut(x, self._rows)]
        pairs = ((c, [a for a in queries if self.visibility.block(a, c)]) for c in keys)
        return [(c, pieces) for c, pieces in pairs if pieces]

    def _joined(self, keys: list[Segment]) -> Blocks:
        """Give as few blocks as there may be."""
        step = None if self._rows is None or not self._end else _step(self._end, self._rows)
        runs = runs_of(self.visibility, self._segments, keys)
        return [
            (c, [a])
            for x in (piece for run in runs for piece in run.cut(step))
            for c, a in [x.segments(self.visibility)]
        ]

    @cached_property
    def number(self) -> dict[int, int]:
        """In how many blocks each piece is, by its first row: rows that are in the same ones."""
        blocks = [
            a.rows
            for source in range(self.k_layout.ranks)
            for _, queries in self.of(source)
            for a in queries
        ]
        changes = {0: 0, self._end: 0} | {n: 0 for x in blocks for n in (x.start, x.stop)}
        for x in blocks:
            changes[x.start] += 1
            changes[x.stop] -= 1
        ends = sorted(changes)
        return dict(zip(ends[:-1], accumulate(changes[n] for n in ends), strict=False))

    @cached_property
    def pieces(self) -> list[slice]:
        """The pieces in their order."""
        return [slice(*x) for x in pairwise((*self.number, self._end))]

    def within(self, rows: slice) -> list[slice]:
        """List the pieces of a block."""
        starts = list(self.number)
        first, end = (bisect_left(starts, x) for x in (rows.start, rows.stop))
        return self.pieces[first:end]

    @cached_property
    def attending(self) -> list[int]:
        """Ranks that attend to the keys of each rank: bit r stands for rank r."""
        return self.visibility.attending(self.q_layout, self.k_layout)

    @cached_property
    def reach(self) -> list[int]:
        """How many ranks the keys of each rank travel to: up to the last that needs them."""
        return reach(self.attending)

    def needs(self, rank: int, source: int) -> bool:
        """Whether a rank attends to some of the keys of another."""
        return bool(self.attending[source] >> rank & 1)

    @cached_property
    def of_all_keys(self) -> "RankBlocks":
        """The blocks where one part holds all keys, in their order."""
        whole = Layout.contiguous([self.k_layout.length])
        given = self.visibility, self.q_layout, whole, self.rank, self._rows
        return RankBlocks(*given, only_order=self._only_order)


def _cut(segment: Segment, rows: int | None) -> list[Segment]:
    """Cut a segment into pieces of nearly equal length."""
    start, at, length = segment.start, segment.rows.start, segment.stop - segment.start
    step = length if rows is None else _step(length, rows)
    ends = [min(n, length) for n in range(0, length + step, step)]
    return [
        Segment(start + a, start + b, slice(at + a, at + b)) for a, b in pairwise(ends) if a < b
    ]


def _step(length: int, rows: int) -> int:
    """Give the length of equal pieces of at most so many rows, but for alignment."""
    count = -(-length // rows)
    return -(-length // (count * _ALIGNED)) * _ALIGNED


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
