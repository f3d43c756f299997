"""Share of time in which the work tiles of a rank's calls occupy its GPU.

Work tiles are as unequal as a causal mask makes them: rounding their number up to whole waves
chooses slower schedules (benchmarks/results/distributed_gpu.json).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.layout import Layout, Segment
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.visibility import Visibility

Array = NDArray[Any]

# Mean work tiles between the end of the first and the last of equal work tiles. 0.04 to 0.2 choose
# the same schedules of two H100, bf16, 32768 and 131072 tokens; without it one is 9 % slower
# (benchmarks/results/distributed_gpu.json, 2026-11-25).
_TAIL = 0.12
_MAX_WAVES = 64  # more waves keep all units busy until the tail
_SOURCES = 4  # ranks whose keys are sampled


class Occupancy:
    """Occupancy in one pass, sampled on the first and the last rank with the keys of a few ranks.

    Only the first batch entry counts, and the left side of a window does not. With ``gathers`` one
    block has all keys. ``units`` work tiles of ``tile`` queries (backward: keys) run at a time.
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

    def _of_calls(self, heads: int, rows: int | None) -> float:
        """Return the occupancy of calls with some heads and at most ``rows`` queries.

        Heads are query heads, backward key heads: each has work tiles of its own.
        """
        if self._units == 1:
            return 1.0
        found = [1.0]
        for rank in {0, self._layouts[0].ranks - 1}:
            ideal = real = 0.0
            for number, costs in self._blocks(rank, rows):
                ideal += number * heads * float(costs.sum()) / self._units
                real += number * self._time(costs, heads)
            if real:
                found.append(ideal / real)
        return min(found)

    def _blocks(self, rank: int, rows: int | None) -> Iterator[tuple[float, Array]]:
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
                    cost = self._tile_costs(a, c)
                    if cost.any():
                        yield number[source], np.sort(cost[cost > 0])[::-1]

    def _tile_costs(self, a: Segment, c: Segment) -> Array:
        """Count the tiles of pairs of each query tile, or backward of each key tile."""
        window = self._visibility.windows(a, c)[0]
        rows, keys, right = window.Nq, window.length, window.right
        # The first query attends to this many keys, and each further query to one more.
        first = keys if right is None else window.offset + right + 1
        if self._backward:
            counts = rows - np.clip(np.arange(0, keys, self._tile) + 1 - first, 0, rows)
        else:
            ends = np.minimum(np.arange(0, rows, self._tile) + self._tile, rows)
            counts = np.clip(first + ends - 1, 0, keys)
        found: Array = -(-counts // self._tile)
        return found

    def _time(self, costs: Array, heads: int) -> float:
        """Return the time of a call, in tiles of pairs.

        In each wave the unit that is free first takes the longest work tile left.
        """
        units, number, tail = self._units, heads * len(costs), _TAIL * float(costs.mean())
        if number > _MAX_WAVES * units:
            return heads * float(costs.sum()) / units
        tiles, busy = np.repeat(costs, heads), np.zeros(units)
        for start in range(0, number, units):
            wave = tiles[start : start + units]
            busy.sort()
            busy[: len(wave)] += wave
        return float(busy.max()) + tail
