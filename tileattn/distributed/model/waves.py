"""How well the work tiles of a rank's calls fill its device, by their number and their lengths."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.layout import Layout, Segment
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.visibility import Visibility

Array = NDArray[Any]

_START = 1.2  # of a work tile, in tiles of pairs (measured forward)
_APART = 0.12  # of a work tile: how far apart units end that have as much to do (measured)
_MOST = 64  # waves: more even out by themselves
_SOURCES = 4  # ranks whose keys are looked at


class Waves:
    """The work tiles of a pass: of the first rank and the last, with the keys of some others.

    Parameters
    ----------
    visibility : Visibility
        Where keys are visible; that of the first batch entry is looked at.
    layouts : (Layout, Layout)
        Queries and keys of each rank of a ring.
    tile, units : int
        Queries and keys of a tile, and work tiles that run at a time.
    gathers, backward, only_order : bool
        Whether all keys are in one part; which pass; what `RankBlocks` knows.
    """

    def __init__(
        self,
        visibility: Visibility,
        layouts: tuple[Layout, Layout],
        tile: int,
        units: int,
        *,
        gathers: bool,
        backward: bool,
        only_order: bool,
    ) -> None:
        self._visibility, self._layouts, self._tile, self._units = visibility, layouts, tile, units
        self._gathers, self._backward, self._only_order = gathers, backward, only_order
        self.filled = lru_cache(maxsize=None)(self._filled)

    def _filled(self, heads: int, group: int, rows: int | None) -> float:
        """Give the share of the time in which tiles run, of the calls of a block.

        A call has ``heads`` of queries, backward of keys with a ``group`` of queries each, and so
        many ``rows`` at most.
        """
        if self._units == 1:
            return 1.0
        found = []
        for rank in {0, self._layouts[0].ranks - 1}:
            taken = [
                (number * ideal, number * real)
                for number, costs in self._costs(rank, group, rows)
                for ideal, real in [self._taken(costs, heads)]
            ]
            ideal, real = (sum(x) for x in zip(*taken, strict=True)) if taken else (1.0, 1.0)
            found.append(ideal / real if real else 1.0)
        return min(found)

    def _costs(self, rank: int, group: int, rows: int | None) -> Iterator[tuple[float, Array]]:
        """Yield what the work tiles of one head cost, the longest first, and of how many blocks."""
        given, size = (self._visibility, *self._layouts, rank, rows), self._layouts[0].ranks
        blocks = RankBlocks(*given, only_order=self._only_order)
        others = {(rank + n * size // _SOURCES) % size for n in range(_SOURCES)} - {rank}
        number = dict.fromkeys(others, (size - 1) / len(others)) if others else {}
        number[rank] = 1.0
        if self._gathers:
            blocks, number = blocks.of_all_keys, {0: 1.0}
        for source in sorted(number):
            for c, queries in blocks.of(source):
                for a in queries:
                    cost = self._of_block(a, c, group)
                    yield number[source], np.sort(cost[cost > 0])[::-1]

    def _of_block(self, a: Segment, c: Segment, group: int) -> Array:
        """Count the tiles of pairs of each tile of queries, backward of keys."""
        (_, right), lengths, offsets = self._visibility
        rows, keys = a.stop - a.start, min(c.stop, int(lengths[0])) - c.start
        # So many keys the first query attends to, and each next one to one more.
        first = keys if right is None else a.start + int(offsets[0]) + right - c.start + 1
        if self._backward:
            starts = np.arange(0, max(keys, 0), self._tile)
            each = group * -(-(rows - np.clip(starts + 1 - first, 0, rows)) // self._tile)
        else:
            ends = np.minimum(np.arange(0, rows, self._tile) + self._tile, rows)
            each = -(-np.clip(first + ends - 1, 0, max(keys, 0)) // self._tile)
        found: Array = np.where(each > 0, each + _START, 0.0)
        return found

    def _taken(self, costs: Array, heads: int) -> tuple[float, float]:
        """Give the time of a call if tiles could be cut anywhere, and as they are.

        Each wave takes the longest tiles left, and the unit that is free first the longest of them.
        """
        units, ideal = self._units, heads * float(costs.sum()) / self._units
        number = heads * len(costs)
        if number > _MOST * units:
            return ideal, ideal
        if not number:
            return 0.0, 0.0
        apart = _APART * float(costs.mean())
        if costs[0] == costs[-1]:
            return ideal, -(-number // units) * float(costs[0]) + apart
        tiles, busy = np.repeat(costs, heads), np.zeros(units)
        for start, stop in pairwise([*range(0, number, units), number]):
            busy.sort()
            busy[: stop - start] += tiles[start:stop]
        return ideal, float(busy.max()) + apart
