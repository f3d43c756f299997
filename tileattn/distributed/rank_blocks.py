"""The blocks that a rank computes: some of its queries with the keys that they attend to.

If only the order of tokens matters, non-adjacent query ranges are merged into one causal call: each
query attends to the first few keys, and the next query to as many or one more. So a zigzag layout
needs one call for the keys of each rank.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tileattn.algorithm.mask import SlidingWindow
from tileattn.distributed.layout import Layout, Segment
from tileattn.distributed.visibility import Visibility, reach

_ALIGNED = 128  # queries: tile of a GPU, and a multiple of the rows that share random numbers

Blocks = list[tuple[Segment, list[Segment]]]


class RankBlocks:
    """The blocks of one rank, and which ranks attend to which keys.

    A block has at most ``rows`` queries. With ``only_order`` only the order of tokens matters, not
    their absolute positions: then a block may join tokens that are not adjacent in the sequence.
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
        self.options: dict[Any, dict[str, Any]] = {}  # options of blocks by their ends
        self._of_sources: dict[int, Blocks] = {}

    def of(self, source: int) -> Blocks:
        """Return the key segments of a rank, each with the query segments that attend to it."""
        found = self._of_sources.get(source)
        if found is None:
            keys = self.k_layout.segments(source)
            in_order = all(a.stop <= b.start for a, b in pairwise(keys))
            make = self._joined if self._only_order and in_order else self._apart
            found = self._of_sources[source] = make(keys)
        return found

    def _apart(self, keys: list[Segment]) -> Blocks:
        """Return a block for each pair of segments."""
        queries = [cut for x in self._segments for cut in _cut(x, self._rows)]
        pairs = ((c, [a for a in queries if self.visibility.block(a, c)]) for c in keys)
        return [(c, attending) for c, attending in pairs if attending]

    def _joined(self, keys: list[Segment]) -> Blocks:
        """Return as few blocks as possible, joining segments."""
        step = None if self._rows is None or not self._end else _step(self._end, self._rows)
        window, *_ = self.visibility.entries(self.q_layout.length)  # all entries have the same
        runs = runs_of(window, self._segments, keys)
        pairs = (cut.segments(window) for run in runs for cut in run.cut(step))
        return [(c, [a]) for c, a in pairs]

    @cached_property
    def number(self) -> dict[int, int]:
        """Number of blocks of each row range, by its first row; its rows are in the same blocks."""
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
    def row_ranges(self) -> list[slice]:
        """Row ranges that are in the same blocks, in ascending order."""
        return [slice(*x) for x in pairwise((*self.number, self._end))]

    def within(self, rows: slice) -> list[slice]:
        """List the row ranges of a block."""
        starts = list(self.number)
        first, end = (bisect_left(starts, x) for x in (rows.start, rows.stop))
        return self.row_ranges[first:end]

    @cached_property
    def attending(self) -> list[Any]:
        """For each rank a boolean array of the ranks that attend to its keys."""
        return [*self.visibility.attending(self.q_layout, self.k_layout)]

    @cached_property
    def reach(self) -> list[int]:
        """Ring steps that the keys of each rank travel, to the last rank that needs them."""
        return reach(self.attending)

    def needs(self, rank: int, source: int) -> bool:
        """Return True if a rank attends to some keys of another."""
        return bool(self.attending[source][rank])

    @cached_property
    def of_all_keys(self) -> "RankBlocks":
        """The blocks if all keys are one part, in sequence order."""
        whole = Layout.contiguous([self.k_layout.length])
        given = self.visibility, self.q_layout, whole, self.rank, self._rows
        return RankBlocks(*given, only_order=self._only_order)


def _cut(segment: Segment, rows: int | None) -> list[Segment]:
    """Cut a segment into segments of nearly equal length, at most ``rows`` but for alignment."""
    start, at, length = segment.start, segment.rows.start, segment.stop - segment.start
    step = length if rows is None else _step(length, rows)
    ends = [min(n, length) for n in range(0, length + step, step)]
    return [
        Segment(start + a, start + b, slice(at + a, at + b)) for a, b in pairwise(ends) if a < b
    ]


def _step(length: int, rows: int) -> int:
    """Return the length of equal row ranges of at most ``rows``, rounded up to the alignment."""
    count = -(-length // rows)
    return -(-length // (count * _ALIGNED)) * _ALIGNED


class Run(NamedTuple):
    """Adjacent rows of a rank that one causal call can compute."""

    start: int
    stop: int
    first: int  # keys that its first row attends to; one more from row to row, up to `last`
    last: int  # keys that its last row attends to

    def cut(self, step: int | None) -> Iterator["Run"]:
        """Cut at multiples of ``step`` rows."""
        at = self.start
        while at < self.stop:
            end = self.stop if step is None else min(self.stop, (at // step + 1) * step)
            first, last = (min(self.first + n - self.start, self.last) for n in (at, end - 1))
            yield Run(at, end, first, last)
            at = end

    def segments(self, window: SlidingWindow) -> tuple[Segment, Segment]:
        """Return keys and queries as segments of a sequence without other tokens."""
        start = 0 if window.right is None else self.first - 1 - window.offset - window.right
        rows = slice(self.start, self.stop)
        keys = Segment(0, self.last, slice(0, self.last))
        return keys, Segment(start, start + self.stop - self.start, rows)


def runs_of(
    window: SlidingWindow, queries: Sequence[Segment], keys: Sequence[Segment]
) -> list[Run]:
    """List the runs of a rank's queries over the ascending key segments of a rank."""
    found: list[Run] = []
    for x in _even_runs(window, queries, [c for c in keys if c.start < c.stop]):
        before = found[-1] if found else None
        if before is not None and before.last and before.stop == x.start:
            end = before.first + before.stop - before.start - 1  # as if keys went on
            goes_on = end == before.last and x.first == end + 1
            if goes_on or x.first == x.last == before.last:
                found[-1] = Run(before.start, x.stop, before.first, x.last)
                continue
        found.append(x)
    return [x for x in found if x.last]


def _even_runs(
    window: SlidingWindow, queries: Sequence[Segment], keys: Sequence[Segment]
) -> Iterator[Run]:
    """Yield rows of each segment whose number of keys is constant, or grows by one per row."""
    starts = [c.start for c in keys]
    below = [0, *accumulate(c.stop - c.start for c in keys)]

    def attended(query: int) -> int:
        end = window.key_range(query, query + 1)[1]
        n = bisect_left(starts, end)  # key segments that start below the end
        return below[n - 1] + min(end, keys[n - 1].stop) - starts[n - 1] if n else 0

    # The number grows from the first query that attends to a segment to the first of its last key.
    first_of = [[window.query_range(j, j + 1)[0] for j in (c.start, c.stop - 1)] for c in keys]
    changes = sorted({n for start, last in first_of for n in (start, last + 1)})
    for a in queries:
        inside = changes[bisect_right(changes, a.start) : bisect_left(changes, a.stop)]
        for start, stop in pairwise((a.start, *inside, a.stop)):
            row, end = (n - a.start + a.rows.start for n in (start, stop))
            yield Run(row, end, attended(start), attended(stop - 1))
