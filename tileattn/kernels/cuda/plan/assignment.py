"""The LPT assignment: which worker of a persistent kernel takes which work tiles."""

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.mask import SlidingWindow
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.tile_kinds import tile_kinds_of
from tileattn.kernels.cuda.plan.tile_lists import tile_lists
from tileattn.kernels.cuda.tuning import Tuning

TPC = 2  # SMs that share an instruction cache

Array = NDArray[Any]


def assignment_of(
    P: Problem,
    layout: CallLayout,
    launch: KernelLaunch,
    groups: int,
    late_share: float,
    tuning: Tuning,
) -> Array | None:
    """Assign the work tiles of a forward pass; late workers take a share of all work.

    A work tile has about as many instructions as the caches of an SM hold, or more. If the two SMs
    of a TPC take tiles of one length in step, they share what they fetch. Wide heads have too few
    tiles for that.
    """
    key, workers = launch.key, launch.workers
    blocks, heads = -(-P.Nq // key.block_q), P.B * P.Hq
    costs = _costs(P, layout, key, tuning)
    if costs.min() == costs.max() and not late_share:
        return None
    block, head, group = work_tiles(blocks, heads, groups)
    alike = head % P.Hq if costs.shape[1] > 1 else 0
    cost = costs[head // P.Hq, alike, block if P.window[1] is None else blocks - 1 - block]
    # Long tiles go first within a group and among groups; equal ones stay in order.
    longest = np.zeros(heads, np.int64)
    np.maximum.at(longest, group, cost)
    order = np.lexsort((-cost, group, -longest[group]))
    cost = cost[order]
    heads_alike = (costs == costs[:1, :1]).all()
    many_tiles = max(P.D, P.Dv) <= tuning.team_dim
    team = TPC if heads_alike and many_tiles and launch.grid % TPC == 0 else 1
    late = np.searchsorted(cost[::-1].cumsum(), late_share * cost.sum(), side="right")
    # Each worker that is not late has at least one tile.
    return assign(order, cost, workers, team, min(int(late), len(order) - workers))


def work_tiles(blocks: int, heads: int, groups: int) -> tuple[Array, Array, Array]:
    """Return block, head and first head of the group of each work tile: as ``BlockCoord``."""
    index = np.arange(blocks * heads)
    size, more = divmod(heads, groups)
    longer = more * (size + 1)
    straight = index // blocks  # the head, without groups
    members = np.where(straight < longer, size + 1, size)
    start = np.where(straight < longer, 0, longer)
    first = start + (straight - start) // members * members
    within = index - first * blocks
    return within // members, first + within % members, first


def _costs(P: Problem, layout: CallLayout, key: KernelKey, tuning: Tuning) -> Array:
    """Return the cost of each query block, shape (B, Hq or 1, blocks): its tiles, and itself."""
    # Values on the GPU are not waited for: a wrong guess only costs time.
    lengths = layout.kv_lengths or (P.Nk,) * P.B
    offsets = layout.q_offset or tuple(length - P.Nq for length in lengths)
    places = zip(lengths, offsets, strict=True)
    windows = [SlidingWindow(P.Nq, *place, *P.window) for place in places]
    start = np.arange(0, P.Nq, key.block_q)
    stop = np.minimum(start + key.block_q, P.Nq)
    each = {window: window.key_range(start, stop) for window in {*windows}}
    lo, hi = np.array([each[window] for window in windows]).swapaxes(0, 1)[..., None, :]
    tiles_attended = _attended(P, layout, key, lo // key.block_k, -(-hi // key.block_k))
    return tuning.tile_cost * tiles_attended + tuning.work_tile_cost


def _attended(P: Problem, layout: CallLayout, key: KernelKey, begin: Array, end: Array) -> Array:
    """Count the tiles from ``begin`` to ``end - 1`` that masks do not leave empty."""
    mask = layout.listed_mask
    lists = tile_lists(P, tile_kinds_of(P, mask, key.tile), mask, backward=False)
    if lists is None or lists.on_device:
        return end - begin
    before = lists.tiles_before(mask)
    before = np.broadcast_to(before, (len(begin), *before.shape[1:]))[:, :, : begin.shape[-1]]

    def up_to(tile: Array) -> Array:
        places = np.broadcast_to(tile[..., None], (*before.shape[:3], 1))
        return np.take_along_axis(before, places, axis=-1)[..., 0]

    return up_to(end) - up_to(begin)


def assign(order: Array, cost: Array, workers: int, team: int = 1, late: int = 0) -> Array:
    """Assign work tiles as if each worker took the next one when it is free, then even loads out.

    ``order`` has the tile numbers in the order in which they start, ``cost`` their times. The
    workers of a team go in step: they take one tile each at a time. The last ``late`` tiles, never
    all, have a worker each, which starts when another has ended.

    The int32 table has a column for each worker, teams side by side and late workers last. Each
    column is padded with the number of all tiles, which ends it.
    """
    tiles, early = len(order), len(order) - late
    units = np.full((-(-early // team), team), tiles, np.int32)  # one tile for each of a team
    units.flat[:early] = order[:early]
    times = np.maximum.reduceat(cost[:early], np.arange(0, early, team))
    columns = _in_turn(times, workers // team)
    _even_out(columns, times)
    table = np.full((max(map(len, columns)) + 1, len(columns), team), tiles, np.int32)
    for n, column in enumerate(columns):
        table[: len(column), n] = units[sorted(column)]
    ends = np.full((len(table), late), tiles, np.int32)
    ends[0] = order[early:]
    return np.hstack([table.reshape(len(table), -1), ends])


def _in_turn(times: Array, count: int) -> list[list[int]]:
    """Give each unit to the column that is free first.

    Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969).
    """
    columns: list[list[int]] = [[] for _ in range(count)]
    # Time and column in one integer, which a heap compares faster than a pair.
    free = list(range(count))
    for unit, time in enumerate((count * times).tolist()):
        soonest = free[0]
        columns[soonest % count].append(unit)
        heapq.heapreplace(free, soonest + time)
    return columns


def _even_out(columns: list[list[int]], times: Array) -> None:
    """Exchange units of the longest column with shorter columns while that helps.

    The number of exchanges is bounded, so that planning is fast; mostly far fewer are enough.
    """
    loads = np.array([times[column].sum() for column in columns])
    for _ in range(4 * len(columns)):
        longest = int(loads.argmax())
        others = loads.argsort(kind="stable")
        if not any(_exchange(columns, times, loads, longest, other) for other in others):
            return


def _exchange(columns: list[list[int]], times: Array, loads: Array, long: int, short: int) -> bool:
    """Exchange the two units of two columns that shorten the longer one most, if any do.

    Of equal exchanges it takes the last, which keeps the first units in their order.
    """
    gap = loads[long] - loads[short]
    moved = times[columns[long]][:, None] - times[columns[short]]
    gaps = np.abs(gap - 2 * moved)  # after each exchange
    least = gaps.min(initial=gap)
    if least == gap:
        return False
    i, j = np.argwhere(gaps == least)[-1]
    columns[long][i], columns[short][j] = columns[short][j], columns[long][i]
    loads[long] -= moved[i, j]
    loads[short] += moved[i, j]
    return True
