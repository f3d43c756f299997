"""The tile scheduler of persistent kernels, decided on the host.

A worker is a thread block, or one of its groups of warps if those have work tiles of their own.
Workers take work tiles by number. If tiles differ in length, some SMs would get up to a fifth more
than the mean: an LPT assignment, the longest tile first, evens that out. With few keys the time of
a tile also depends on memory: a dynamic scheduler then hands out tiles one by one. Mostly each SM
runs one thread block; late thread blocks start when others end.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.mask import SlidingWindow
from tileattn.call.problem import Problem
from tileattn.call.sequences import FAR
from tileattn.kernels.cuda.families.context import KernelLaunch, main_of
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.assignment import assign
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.tile_lists import tile_lists
from tileattn.kernels.cuda.tuning import Tuning

TPC = 2  # SMs that share an instruction cache
LOCKSTEP_TILES = 32  # tiles of a lockstep step: as in ``src/``
MAX_STEPS = 1 << 20  # steps of a worker: memory must not grow with the square of a length

Array = NDArray[Any]


class Schedule(NamedTuple):
    """The order in which a pass takes its work tiles."""

    head_groups: int  # run one after the other: at least 1, at most B Hkv
    assignment: Array | None = None  # from `assign`; None: tiles in the order of their numbers
    in_order: bool = False  # True: key blocks add to dq one after the other
    # Order of the key blocks of a head, and of their query tiles: as in `BwdWorkTile` in CUDA.
    last_keys_first: bool = False
    run_keys: int = 0
    # Claims between successive key blocks of a head; its inverse modulo the blocks of a head.
    stagger: int = 0
    inverse_stagger: int = 0
    # L2 swizzle of packed sequences: rows and number of the key heads whose blocks alternate.
    swizzle_rows: int = 0
    swizzle_heads: int = 1
    # Counters by which thread blocks stay in lockstep, as in `Lockstep` in CUDA.
    lockstep_steps: int = 0
    # Dynamic scheduler: work tiles; heads that come one by one, before all groups.
    dynamic_tiles: int = 0
    single_heads: int = 0

    @property
    def fields(self) -> dict[str, int]:
        """Return the fields of the parameter block."""
        of_host = {"assignment", "dynamic_tiles"}
        return {name: x for name, x in self._asdict().items() if name not in of_host}

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of the workspace in which thread blocks exchange tile numbers."""
        return {"next_tiles": 4 * self.dynamic_tiles} if self.dynamic_tiles else {}

    @property
    def zeros(self) -> dict[str, int]:
        """Return the bytes of the counters that start at zero."""
        counts = {
            "tile_counter": int(self.dynamic_tiles > 0),
            "lockstep_counters": self.lockstep_steps,
        }
        return {name: 4 * count for name, count in counts.items() if count}


def schedule_of(
    problem: Problem, layout: CallLayout, launches: Sequence[KernelLaunch], device: Device
) -> Schedule:
    """Decide in what order a pass takes its work tiles, by the needs of its main kernel.

    Packed lengths may be known only on the device, which orders the blocks itself. It interleaves
    as many heads and sequences as fit in half of the L2 cache, and one wave at most.
    """
    P, launch = problem, main_of(launches)
    if launch is not None and launch.traits.persistent == "keys":
        return _backward_schedule(P, launch, device)
    share = 0.5 if launch is None else launch.traits.l2_share
    groups = head_groups(P, int(share * device.l2_bytes))
    if launch is None or not launch.traits.persistent:
        return Schedule(groups)
    if P.is_packed:
        row = (P.D + P.Dv) * P.dtype.itemsize
        return Schedule(1, swizzle_rows=device.l2_bytes // 2 // row, swizzle_heads=launch.workers)
    if launch.traits.split_keys:  # all splits have the same length
        return Schedule(groups)
    if _is_dynamic(P, layout, launch, device.tuning):
        return _dynamic(P, launch)
    return _assigned(P, layout, launch, groups, device)


def _assigned(
    P: Problem, layout: CallLayout, launch: KernelLaunch, groups: int, device: Device
) -> Schedule:
    """Assign work tiles in advance, with late thread blocks or in lockstep."""
    key, tuning = launch.key, device.tuning
    blocks, tiles = -(-P.Nq // key.block_q), -(-P.Nk // key.block_k)
    # Without a mask all work tiles have the same length, and start together.
    row = (P.D + P.Dv) * P.dtype.itemsize
    drifts = _is_triangle(P) and P.Nk * row > tuning.lockstep_l2 * device.l2_bytes
    steps = _lockstep_steps(P, P.B * P.Hq * blocks, tiles, launch.workers) if drifts else 0
    # A late thread block has one group, and no block waits for it in lockstep.
    is_tall = key.block_q >= tuning.late_rows and key.groups == 1
    is_narrow = max(P.D, P.Dv) <= tuning.late_dim
    late_share = tuning.late_share if is_tall and is_narrow and not steps else 0
    assignment = _assignment(P, layout, launch, groups, late_share, tuning)
    return Schedule(groups, assignment, lockstep_steps=steps)


def _backward_schedule(P: Problem, launch: KernelLaunch, device: Device) -> Schedule:
    """Decide in what order a Hopper backward kernel takes its work tiles.

    Head groups change which heads run together, never the order of the sums within a dq tile.
    """
    key, grid, in_order, tuning = launch.key, launch.grid, launch.in_order, device.tuning
    is_causal = P.window[1] is not None
    sums = P.D * P.accum_dtype.itemsize if key.add_dq else 0
    row = P.group * ((P.D + P.Dv) * P.dtype.itemsize + sums)
    if P.is_packed:
        rows = FAR if in_order and is_causal else device.l2_bytes // 2 // row
        turn = max(1, _in_flight(launch, tuning) if in_order else grid)
        return Schedule(1, None, in_order, swizzle_rows=rows, swizzle_heads=turn)
    alternate = not in_order and _alternate(P, key, tuning)
    in_step = _goes_in_step(P, launch) and (in_order or not is_causal)
    heads, blocks = P.B * P.Hkv, -(-P.Nk // key.block_k)
    stagger = 0
    if in_step:
        size = 2 * grid // blocks
    elif alternate:
        size = round(2 * grid / blocks)
    elif key.head_major and _spans_much(P, tuning):
        size = 4 * grid // blocks
    elif not in_order:
        size = _heads_in_cache(P, launch, row, device)
    elif _staggers(P, launch, tuning):
        size = stagger = _stagger(P.Nk, grid, blocks, heads, tuning)
    else:
        size = _heads_in_order(P, launch, row, device)
    groups = -(-heads // max(1, min(size, grid)))
    inverse = pow(stagger, -1, blocks) if stagger else 0
    # Alternating runs, and key blocks that add in order, stay together without lockstep.
    drifts = not (alternate or in_order) and P.Nq * row > tuning.lockstep_l2 * device.l2_bytes
    tiles = P.group * -(-P.Nq // key.block_q)
    return Schedule(
        groups,
        in_order=in_order,
        last_keys_first=in_step and is_causal,
        run_keys=_run_keys(P.Nk, tuning) if alternate else 0,
        stagger=stagger,
        inverse_stagger=inverse,
        lockstep_steps=_lockstep_steps(P, heads * blocks, tiles, launch.workers) if drifts else 0,
    )


def _heads_in_cache(P: Problem, launch: KernelLaunch, row: int, device: Device) -> int:
    """Count the heads that run together if dq is summed in any order.

    ``row`` is the bytes of a query. Each key block reads q, dout and the sums of dq again. So the
    heads of a group should fit in a quarter of the L2 cache, whose halves keep copies of what both
    read, and should have at least a wave of key blocks. With a long causal mask half of the L2
    cache or two waves are faster, there in whole waves. The same holds if dq is summed in order.
    """
    grid, blocks = launch.grid, -(-P.Nk // launch.key.block_k)
    is_long = P.window[1] is not None and P.Nk >= device.tuning.whole_wave_keys
    share, waves = (2, 2) if is_long or launch.in_order else (4, 1)
    size = device.l2_bytes // share // (P.Nq * row)
    if size * blocks < grid:
        return -(-waves * grid // blocks)
    if is_long and launch.key.add_dq:
        return round(size * blocks / grid) * grid // blocks
    return size


def _heads_in_order(P: Problem, launch: KernelLaunch, row: int, device: Device) -> int:
    """Count the heads that run together if dq is summed in order.

    Each key block waits for the one before it. That keeps heads together: with fewer key blocks of
    a head in flight, each waits for a shorter time. In a window a block waits for few others.
    There, and with a causal mask and heads that share keys, two waves are enough if query tiles are
    short, and half a wave if there are few keys.
    """
    key, tuning = launch.key, device.tuning
    in_flight = _in_flight(launch, tuning)
    blocks = -(-P.Nk // key.block_k)
    if key.block_q < key.block_k:
        few = P.group >= tuning.half_wave_group and P.Nk <= tuning.half_wave_keys
        if _is_triangle(P) and few:
            return launch.grid // (2 * blocks)
        if P.window[0] is not None or (_is_triangle(P) and P.group > 1):
            return min(2 * launch.grid // blocks, in_flight)
    if P.window[1] is not None:
        return in_flight
    return min(_heads_in_cache(P, launch, row, device), 2 * in_flight)


def _in_flight(launch: KernelLaunch, tuning: Tuning) -> int:
    return launch.grid * launch.key.block_k // tuning.keys_in_flight


def _spans_much(P: Problem, tuning: Tuning) -> bool:
    """Return True if a window is so long that key blocks at its end have few queries.

    In head-major order these blocks reach the next head before its dq tiles are stored. After a
    wave of key blocks of more heads they need not wait.
    """
    left, right = P.window
    part, of = tuning.long_window
    return left is not None and right is not None and of * (left + right) >= part * P.Nk


def _is_dynamic(P: Problem, layout: CallLayout, launch: KernelLaunch, tuning: Tuning) -> bool:
    """Return True if workers claim their work tiles one by one.

    Work tiles of a causal mask differ in length, and with few keys they wait for memory for an
    unknown time. Tiles assigned in advance would start earlier or later than other tiles of their
    head, and miss its keys in the L2 cache, whose two halves keep copies of what both read.
    """
    blocks = -(-P.Nq // launch.key.block_q)
    alike = all(len(set(x or ())) <= 1 for x in (layout.kv_lengths, layout.q_offset))
    few_keys = P.Nk <= tuning.dynamic_keys and _is_triangle(P) and not P.has_pair_mask
    return few_keys and alike and blocks > 1 and blocks * P.B * P.Hq > launch.workers


def _dynamic(P: Problem, launch: KernelLaunch) -> Schedule:
    """Schedule heads one by one, and the last heads together, the longest tiles first.

    The last heads have a work tile for each worker. With fewer heads the SMs would end at different
    times; with more, the L2 cache would not hold all keys.
    """
    blocks, heads = -(-P.Nq // launch.key.block_q), P.B * P.Hq
    last = -(-launch.workers // blocks)
    return Schedule(1, dynamic_tiles=blocks * heads, single_heads=max(0, heads - last))


def _lockstep_steps(P: Problem, count: int, tiles: int, workers: int) -> int:
    """Count the lockstep steps of the worker with most work; 0 without lockstep.

    A work tile has at most ``tiles`` tiles. In windows, and with other masks, work tiles have
    different keys in any case. After the last step workers run on their own.
    """
    if P.window[0] is not None or P.has_pair_mask:
        return 0
    waves = -(-count // workers)
    return min((waves + 1) * tiles // LOCKSTEP_TILES + 1, MAX_STEPS)


def _goes_in_step(P: Problem, launch: KernelLaunch) -> bool:
    """Return True if key blocks that start together add to dq one query tile apart.

    With narrow heads, whose query tiles are as long as key blocks, two such waves are fastest. With
    a causal mask they take the last keys first. The bits of dq follow from the order of keys, which
    depends only on options.
    """
    key = launch.key
    narrow = launch.traits.ordered_dq and key.block_q == key.block_k
    return narrow and P.group == 1 and P.window[0] is None and not (key.packed or _is_listed(key))


def _staggers(P: Problem, launch: KernelLaunch, tuning: Tuning) -> bool:
    """Return True if heads are staggered evenly, with dq summed in order.

    Key blocks of a head that start together wait for each other at each query tile: the later they
    add, the longer. Staggered, each block starts so long after the one before that it never waits.
    """
    key = launch.key
    applies = launch.traits.ordered_dq and P.group == 1 and _is_triangle(P) and not _is_listed(key)
    return applies and key.head_dim > tuning.stagger_dim and P.Nk <= tuning.stagger_keys


def _stagger(Nk: int, grid: int, blocks: int, heads: int, tuning: Tuning) -> int:
    """Count the claims between successive key blocks of a head: the heads that run together.

    The result has no factor in common with the blocks: each claim is one block of one head.
    """
    waves = 1 if Nk <= tuning.stagger_one_wave else 2 if Nk <= tuning.stagger_two_waves else 3
    stagger = max(1, min(waves * grid // blocks, heads))
    while math.gcd(stagger, blocks) > 1:
        stagger += 1
    return stagger


def _alternate(P: Problem, key: KernelKey, tuning: Tuning) -> bool:
    """Return True if every second run of key blocks rises: its blocks start at the diagonal.

    With a causal mask the first key blocks of a head start together at the last query tile, and
    share what they load. Later blocks start one by one, when SMs become free: at the last tile each
    would load queries alone, at the diagonal it meets blocks that run already. Rising blocks end at
    the last tile, where the next wave starts. The bits of dk and dv follow from the order, so it
    depends only on options, lengths and heads.
    """
    many = P.group >= tuning.alternate_group and P.Nk >= tuning.alternate_keys
    return many and _is_triangle(P) and not _is_listed(key)


def _run_keys(Nk: int, tuning: Tuning) -> int:
    """Count the keys of a run: each head of two waves has one run in each.

    The number of SMs does not matter, so that dk and dv have the same bits on any GPU.
    """
    heads = max(1, round(2 * tuning.wave_keys / Nk))
    return tuning.wave_keys // heads


def _is_triangle(P: Problem) -> bool:
    """Return True if queries attend to all keys before them: causal, without a left limit."""
    return P.window[0] is None and P.window[1] is not None


def _is_listed(key: KernelKey) -> bool:
    return key.block_mask or key.mask_mod


def head_groups(problem: Problem, nbytes: int) -> int:
    """Count the groups of heads that a GPU works on one after the other.

    With a causal mask, or packed sequences, query blocks differ in length. The long blocks of all
    heads of a group go first, to keep the GPU busy to the end. A group has as many heads as
    ``nbytes`` of the L2 cache hold the keys and values of.
    """
    P = problem
    left, right = P.window
    heads = max(1, P.B * P.Hkv)
    if P.sequences is None and (left is not None or right is None):
        return heads
    each = P.Nk * (P.D + P.Dv) * P.dtype.itemsize
    return -(-heads // max(1, nbytes // max(1, each)))


def _assignment(
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
    tiles = blocks * heads
    # One block a head, as in decoding, is little work, and lengths may differ in each call.
    if blocks == 1 or not workers < tiles <= tuning.max_waves * workers:
        return None
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
    return assign(order, cost, workers, team, min(int(late), tiles - workers))


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
    lists = tile_lists(P, layout.listed_mask, key.tile, backward=False)
    if lists is None or lists.on_device:
        return end - begin
    before = lists.tiles_before(layout.listed_mask)
    before = np.broadcast_to(before, (len(begin), *before.shape[1:]))[:, :, : begin.shape[-1]]

    def up_to(tile: Array) -> Array:
        places = np.broadcast_to(tile[..., None], (*before.shape[:3], 1))
        return np.take_along_axis(before, places, axis=-1)[..., 0]

    return up_to(end) - up_to(begin)
