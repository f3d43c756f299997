"""Which ranks attend to the keys of which ranks, by positions, lengths and window.

Dense masks and mask functions are ignored: they only remove pairs.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.mask import SlidingWindow
from tileattn.distributed.layout import Layout, Segment

Array = NDArray[Any]


class BlockCounts(NamedTuple):
    """Number of blocks of each rank, and the sum of their queries and of their keys."""

    number: Array
    queries: Array
    keys: Array


class Visibility(NamedTuple):
    """The window, lengths and offsets of a call."""

    window: tuple[int | None, int | None]  # keys to the left and right of a query; None: all
    kv_lengths: Array  # shape (B,)
    q_offset: Array  # position of query 0, shape (B,)

    def windows(self, queries: Segment, keys: Segment) -> list[SlidingWindow]:
        """Return the window of each batch entry, with queries and keys of a block from 0."""
        ends = queries.start, queries.stop, keys.start, keys.stop
        return [window.of_tile(*ends) for window in self.entries(queries.stop)]

    def block(self, queries: Segment, keys: Segment) -> bool:
        """Return True if some query may attend to some key."""
        return any(x.key_range(0, x.Nq) != (0, 0) for x in {*self.windows(queries, keys)})

    def attending(self, q_layout: Layout, k_layout: Layout) -> Iterator[Array]:
        """Yield for each rank a boolean array of the ranks that attend to its keys."""
        queries, windows = _segments(q_layout), {*self.entries(q_layout.length)}
        owners = np.array([rank for *_, rank in queries], np.int64)
        for rank in range(k_layout.ranks):
            found = np.zeros(q_layout.ranks, bool)
            for keys in k_layout.segments(rank):
                for first, end in _attending_segments(queries, keys, windows):
                    found[owners[first:end]] = True
            yield found

    def pairs(self, layout: Layout) -> Array:
        """Count the visible pairs of query and key of each rank, in all batch entries; shape (P,).

        The time does not grow with the sequence length.
        """
        left, right = self.window
        segments = _segments(layout)
        ranks = [rank for *_, rank in segments]
        ends = np.array([x[:2] for x in segments], np.int64).reshape(-1, 2)
        found = np.zeros(layout.ranks)
        for window, entries in Counter(self.entries(layout.length)).items():
            # Query i attends to the keys from clip(i + offset - left) to clip(i + offset + right).
            length, offset = window.length, window.offset
            keys = float(length) * (ends[:, 1] - ends[:, 0])
            if right is not None:
                keys = _clipped(ends + offset + right + 1, length)
            if left is not None:
                keys = keys - _clipped(ends + offset - left, length)
            np.add.at(found, ranks, entries * keys)
        return found

    def blocks(self, q_layout: Layout, k_layout: Layout) -> BlockCounts:
        """Count the blocks of each rank: pairs of a segment of its queries and any key segment.

        The segments that attend in different batch entries are assumed to form one range.
        """
        queries = _segments(q_layout)
        count, keys = np.zeros((2, len(queries) + 1))
        windows = {*self.entries(q_layout.length)}
        for x in (x for rank in range(k_layout.ranks) for x in k_layout.segments(rank)):
            found = [*_attending_segments(queries, x, windows)]
            if found:
                first, end = min(a for a, _ in found), max(b for _, b in found)
                for changes, weight in ((count, 1), (keys, x.stop - x.start)):
                    changes[first] += weight
                    changes[end] -= weight
        number, of_keys = count.cumsum()[:-1], keys.cumsum()[:-1]
        ranks = np.array([rank for *_, rank in queries], np.int64)
        lengths = np.array([stop - start for start, stop, _ in queries], np.int64)
        counts = number, number * lengths, of_keys
        return BlockCounts(*(np.bincount(ranks, x, q_layout.ranks) for x in counts))

    def entries(self, Nq: int) -> list[SlidingWindow]:
        """Return the window of Nq queries and all keys in each batch entry."""
        entries = zip(self.kv_lengths.tolist(), self.q_offset.tolist(), strict=True)
        return [SlidingWindow(Nq, *entry, *self.window) for entry in entries]


def _attending_segments(
    queries: Sequence[tuple[int, int, int]], keys: Segment, windows: Iterable[SlidingWindow]
) -> Iterator[tuple[int, int]]:
    """Yield the range of sorted query segments that attend to some keys, for each window."""
    for window in windows:
        start, stop = window.query_range(keys.start, keys.stop)
        if start < stop:
            first = bisect_right(queries, start, key=lambda x: x[1])
            end = bisect_left(queries, stop, key=lambda x: x[0])
            if first < end:
                yield first, end


def reach(attending: Iterable[Array]) -> list[int]:
    """Count the ring steps that the keys of each rank travel, to the last rank that needs them.

    Keys of rank s visit ranks ``s + 1``, ``s + 2`` and so on; rank 0 follows the last rank.
    """
    steps = (np.flatnonzero(np.roll(ranks, -rank)) for rank, ranks in enumerate(attending))
    return [int(found[-1]) if len(found) else 0 for found in steps]


def _segments(layout: Layout) -> list[tuple[int, int, int]]:
    """List the starts, stops and ranks of all segments that are not empty, in ascending order."""
    found = [(*x[:2], rank) for rank in range(layout.ranks) for x in layout.segments(rank)]
    return sorted(x for x in found if x[0] != x[1])


def _clipped(ends: Array, length: int) -> Array:
    """Sum min(max(j, 0), length) over each range of j; ``ends`` has starts and stops."""
    inside = np.clip(ends, 0, length).astype(np.float64)
    sums = inside * (inside - 1) / 2 + length * np.maximum(ends - length, 0.0)
    difference: Array = sums[:, 1] - sums[:, 0]
    return difference
