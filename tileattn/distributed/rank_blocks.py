"""The blocks that a rank computes: some of its queries, and keys that they attend to."""

from bisect import bisect_left
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from tileattn.distributed.layout import Layout, Segment
from tileattn.distributed.runs import runs_of
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
