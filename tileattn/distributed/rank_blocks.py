"""The blocks that a rank computes: pieces of its queries, and segments of keys that they see."""

from functools import cached_property
from itertools import pairwise
from typing import Any

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
        Queries of a piece, at most; None does not cut segments.
    """

    def __init__(
        self,
        visibility: Visibility,
        q_layout: Layout,
        k_layout: Layout,
        rank: int,
        rows: int | None = None,
    ) -> None:
        self.visibility, self.q_layout, self.k_layout = visibility, q_layout, k_layout
        self.rank = rank
        self.pieces = [
            piece for segment in q_layout.segments(rank) for piece in _cut(segment, rows)
        ]
        self.options: dict[tuple[int, int, int], dict[str, Any]] = {}  # of blocks, as they come
        self._of_sources: dict[int, Blocks] = {}

    def of(self, source: int) -> Blocks:
        """Give the segments of keys of a rank, each with the pieces that attend to it."""
        found = self._of_sources.get(source)
        if found is None:
            segments = self.k_layout.segments(source)
            pairs = ((c, [a for a in self.pieces if self.visibility.block(a, c)]) for c in segments)
            found = self._of_sources[source] = [(c, pieces) for c, pieces in pairs if pieces]
        return found

    @cached_property
    def number(self) -> dict[int, int]:
        """How many blocks each piece has, by where it starts."""
        found = {piece.start: 0 for piece in self.pieces}
        for source in range(self.k_layout.ranks):
            for _, pieces in self.of(source):
                for piece in pieces:
                    found[piece.start] += 1
        return found

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
        found = RankBlocks(
            self.visibility,
            self.q_layout,
            Layout.contiguous([self.k_layout.length]),
            self.rank,
        )
        found.pieces = self.pieces
        return found


def _cut(segment: Segment, rows: int | None) -> list[Segment]:
    """Cut a segment into pieces of nearly equal length."""
    start, at, length = segment.start, segment.rows.start, segment.stop - segment.start
    if not length:
        return []
    count = 1 if rows is None else -(-length // rows)
    step = -(-length // (count * _ALIGNED)) * _ALIGNED
    ends = [min(n, length) for n in range(0, length + step, step)]
    return [
        Segment(start + a, start + b, slice(at + a, at + b)) for a, b in pairwise(ends) if a < b
    ]
