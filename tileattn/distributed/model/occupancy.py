"""Share of time in which the work tiles of a rank's calls occupy its device.

One number for a call, ceil(tiles / SMs), is not enough: with causal masks tiles of unequal length
decide between schedules (benchmarks/results/distributed_gpu.json).
"""

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

# Both in units of one tile of pairs; H100, forward, benchmarks/results/distributed_gpu.json.
_LAUNCH = 1.2  # start of a work tile
_TAIL = 0.12  # of the mean work tile: how far apart equal work tiles end
_MAX_WAVES = 64  # more waves even out
_SOURCES = 4  # ranks whose keys are sampled


class Occupancy:
    """Occupancy in one pass, sampled on the first and the last rank with the keys of a few ranks.

    Parameters
    ----------
    visibility : Visibility
        Which keys are visible; only the first batch entry is used.
    layouts : (Layout, Layout)
        Queries and keys of each rank of a ring.
    tile, units : int
        Queries and keys of a tile, and work tiles that run at the same time.
    gathers, backward, only_order : bool
        True if one part has all keys; true for the backward pass; as in `Plan`.
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
        self.of_calls = lru_cache(maxsize=None)(self._of_calls)

    def _of_calls(self, heads: int, group: int, rows: int | None) -> float:
        """Return the occupancy of calls with some heads and at most ``rows`` queries.

        Heads are query heads; backward they are key heads with a ``group`` of query heads each.
        """
        if self._units == 1:
            return 1.0
        found = []
        for rank in {0, self._layouts[0].ranks - 1}:
            times = [
                (number * ideal, number * real)
                for number, costs in self._costs(rank, group, rows)
                for ideal, real in [self._times(costs, heads)]
            ]
            ideal, real = (sum(x) for x in zip(*times, strict=True)) if times else (1.0, 1.0)
            found.append(ideal / real if real else 1.0)
        return min(found)

    def _costs(self, rank: int, group: int, rows: int | None) -> Iterator[tuple[float, Array]]:
        """Yield the number of similar blocks, and the costs of the work tiles of one head."""
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
                    cost = self._tile_costs(a, c, group)
                    yield number[source], np.sort(cost[cost > 0])[::-1]

    def _tile_costs(self, a: Segment, c: Segment, group: int) -> Array:
        """Count the tiles of pairs of each query tile, or backward of each key tile."""
        (_, right), lengths, offsets = self._visibility
        rows, keys = a.stop - a.start, min(c.stop, int(lengths[0])) - c.start
        # The first query attends to this many keys, and each further query to one more.
        first = keys if right is None else a.start + int(offsets[0]) + right - c.start + 1
        if self._backward:
            starts = np.arange(0, max(keys, 0), self._tile)
            each = group * -(-(rows - np.clip(starts + 1 - first, 0, rows)) // self._tile)
        else:
            ends = np.minimum(np.arange(0, rows, self._tile) + self._tile, rows)
            each = -(-np.clip(first + ends - 1, 0, max(keys, 0)) // self._tile)
        found: Array = np.where(each > 0, each + _LAUNCH, 0.0)
        return found

    def _times(self, costs: Array, heads: int) -> tuple[float, float]:
        """Return the time of a call with divisible work tiles, and with whole ones.

        In each wave the unit that is free first takes the longest work tile left.
        """
        units, ideal = self._units, heads * float(costs.sum()) / self._units
        number = heads * len(costs)
        if number > _MAX_WAVES * units:
            return ideal, ideal
        if not number:
            return 0.0, 0.0
        tail = _TAIL * float(costs.mean())
        if costs[0] == costs[-1]:
            return ideal, -(-number // units) * float(costs[0]) + tail
        tiles, busy = np.repeat(costs, heads), np.zeros(units)
        for start, stop in pairwise([*range(0, number, units), number]):
            busy.sort()
            busy[: stop - start] += tiles[start:stop]
        return ideal, float(busy.max()) + tail
