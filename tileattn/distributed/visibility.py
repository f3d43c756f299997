"""Which ranks attend to the keys of which: by positions, lengths and window, other masks aside."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.layout import Layout, Segment

Array = NDArray[Any]


class Blocks(NamedTuple):
    """The blocks that each rank computes.

    Parameters
    ----------
    number, queries, keys : array, shape (P,)
        Blocks of each of P ranks, and the queries and keys of all of them: a query counts as often
        as there are blocks with it.
    """

    number: Array
    queries: Array
    keys: Array


class Visibility(NamedTuple):
    """Where keys are visible.

    Parameters
    ----------
    window : (int or None, int or None)
        Keys to the left and right of the position of a query; None is all.
    kv_lengths, q_offset : array of int64, shape (B,)
        Keys that exist, and position of query 0, for each batch entry.
    """

    window: tuple[int | None, int | None]
    kv_lengths: Array
    q_offset: Array

    def block(self, queries: Segment, keys: Segment) -> bool:
        """Whether some query may attend to some key."""
        left, right = self.window
        if queries.start == queries.stop:
            return False
        last = np.minimum(keys.stop, self.kv_lengths) - 1  # of each batch entry
        some = last >= keys.start
        if left is not None:
            some &= last >= queries.start + self.q_offset - left
        if right is not None:
            some &= keys.start <= queries.stop - 1 + self.q_offset + right
        return bool(some.any())

    def is_full(self, queries: Segment, keys: Segment) -> bool:
        """Whether all queries may attend to all keys that exist."""
        left, right = self.window
        first, last = queries.start + self.q_offset, queries.stop - 1 + self.q_offset
        full = np.full(len(self.q_offset), fill_value=True)
        if left is not None:
            full &= keys.start >= last - left
        if right is not None:
            full &= np.minimum(keys.stop, self.kv_lengths) - 1 <= first + right
        return bool(full.all())

    def attending(self, q_layout: Layout, k_layout: Layout) -> list[int]:
        """Give for each rank the set of ranks that attend to some of its keys: bit r is rank r.

        For P ranks it takes O(P log P) unions of sets of P bits, where comparing all ranks with all
        takes P * P steps.
        """
        parts = sorted((*x, rank) for rank, part in enumerate(q_layout.parts) for x in part)
        parts = [x for x in parts if x[0] != x[1]]
        starts, stops = [x[0] for x in parts], [x[1] for x in parts]
        unions = _Unions([1 << rank for _, _, rank in parts])
        (left, right), found = self.window, [0] * k_layout.ranks
        for length, offset in self._entries():
            for rank, part in enumerate(k_layout.parts):
                for start, stop in part:
                    last = min(stop, length) - 1
                    if last < start:
                        continue
                    # Parts of queries in order: those that attend are neighbours.
                    first = 0 if right is None else bisect_left(stops, start - offset - right + 1)
                    end = len(parts)
                    if left is not None:
                        end = bisect_right(starts, last - offset + left)
                    found[rank] |= unions.of(first, end)
        return found

    def pairs(self, layout: Layout) -> Array:
        """Count the visible pairs of query and key of each rank, in all batch entries; shape (P,).

        The time does not grow with the sequence length.
        """
        left, right = self.window
        ranks = np.repeat(np.arange(layout.ranks), [len(part) for part in layout.parts])
        ends = np.array([x for part in layout.parts for x in part], np.int64).reshape(-1, 2)
        found = np.zeros(layout.ranks)
        for (length, offset), entries in self._entries().items():
            # Query i attends to the keys from clip(i + offset - left) to clip(i + offset + right).
            keys = float(length) * (ends[:, 1] - ends[:, 0])
            if right is not None:
                keys = _clipped(ends + offset + right + 1, length)
            if left is not None:
                keys = keys - _clipped(ends + offset - left, length)
            np.add.at(found, ranks, entries * keys)
        return found

    def blocks(self, q_layout: Layout, k_layout: Layout) -> "Blocks":
        """Count the blocks of each rank that computes with all keys, a segment of each at a time.

        Batch entries are taken to see neighbouring segments, so that their union is a range.
        """
        (left, right), (starts, stops, ranks) = self.window, _segments(q_layout)
        k_starts, k_stops, _ = _segments(k_layout)
        first, end = np.full(len(k_starts), len(starts)), np.zeros(len(k_starts), np.int64)
        for length, offset in self._entries():
            last = np.minimum(k_stops, length) - 1
            of = np.zeros_like(end)
            if right is not None:
                of = np.searchsorted(stops, k_starts - offset - right + 1)
            to = np.full_like(end, len(starts))
            if left is not None:
                to = np.searchsorted(starts, last - offset + left, side="right")
            some = (last >= k_starts) & (of < to)
            first, end = (
                np.where(some, np.minimum(first, of), first),
                np.where(some, np.maximum(end, to), end),
            )
        first = np.minimum(first, end)
        found = []
        for weight in (np.ones(len(k_starts)), k_stops - k_starts):
            changes = np.zeros(len(starts) + 1)
            np.add.at(changes, first, weight)
            np.add.at(changes, end, -weight)
            found.append(changes.cumsum()[:-1])
        count, keys = found
        size = q_layout.ranks
        counts = (count, count * (stops - starts), keys)
        return Blocks(*(np.bincount(ranks, x, size) for x in counts))

    def _entries(self) -> Counter[tuple[int, int]]:
        """Count the batch entries of each length and offset."""
        return Counter(zip(self.kv_lengths.tolist(), self.q_offset.tolist(), strict=True))


def reach(attending: Sequence[int]) -> list[int]:
    """Count the ranks that the keys of each rank travel to: up to the last that needs them.

    Keys of rank s pass ``s + 1``, ``s + 2`` and so on; behind the last rank comes rank 0.
    """
    size, found = len(attending), []
    for rank, ranks in enumerate(attending):
        before = ranks & (1 << rank) - 1  # they come last
        last = before.bit_length() - 1 + size if before else ranks.bit_length() - 1
        found.append(max(0, last - rank))
    return found


class _Unions:
    """Unions of neighbours in a list of sets: a segment tree."""

    def __init__(self, sets: Sequence[int]) -> None:
        self._size = len(sets)
        self._tree = [*(0 for _ in sets), *sets]
        for n in reversed(range(1, self._size)):
            self._tree[n] = self._tree[2 * n] | self._tree[2 * n + 1]

    def of(self, start: int, stop: int) -> int:
        """Give the union of the sets from start to stop."""
        found, start, stop = 0, start + self._size, stop + self._size
        while start < stop:
            if start % 2:
                found |= self._tree[start]
            if stop % 2:
                found |= self._tree[stop - 1]
            start, stop = (start + 1) // 2, stop // 2
        return found


def _segments(layout: Layout) -> tuple[Array, Array, Array]:
    """Give starts, stops and ranks of all segments, in their order."""
    ends = [(*x[:2], rank) for rank in range(layout.ranks) for x in layout.segments(rank)]
    found = np.array(sorted(x for x in ends if x[0] != x[1]), np.int64).reshape(-1, 3)
    return found[:, 0], found[:, 1], found[:, 2]


def _clipped(ends: Array, length: int) -> Array:
    """Sum min(max(j, 0), length) over the j of each range; ``ends`` has starts and stops."""
    inside = np.clip(ends, 0, length).astype(np.float64)
    sums = inside * (inside - 1) / 2 + length * np.maximum(ends - length, 0.0)
    difference: Array = sums[:, 1] - sums[:, 0]
    return difference
