"""The tile scheduler of persistent kernels, decided on the host.

A worker is a thread block, or one of its groups of warps if those have work tiles of their own.
Workers take work tiles by number. If tiles differ in length, some SMs would get up to a fifth more
than the mean: an LPT assignment, the longest tile first, evens that out. With few keys the time of
a tile also depends on memory: a dynamic scheduler then hands out tiles one by one. Mostly each SM
runs one thread block; late thread blocks start when others end.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tileattn.call.problem import Problem
from tileattn.call.sequences import FAR
from tileattn.kernels.cuda.families.context import COUNT, KernelLaunch, main_of
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.query_splits import query_splits
from tileattn.kernels.cuda.plan.assignment import Array, assignment_of
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.tile_kinds import kinds_agree
from tileattn.kernels.cuda.tuning import Tuning

LOCKSTEP_TILES = 32  # tiles of a lockstep step: as in ``src/``
MAX_STEPS = 1 << 20  # steps of a worker: memory must not grow with the square of a length


class Schedule(NamedTuple):
    """The order in which a pass takes its work tiles."""

    # Fields of the parameter block.
    head_groups: int  # run one after the other: at least 1, at most B Hkv
    in_order: bool = False  # True: key blocks add to dq one after the other
    # Order of the key blocks of a head, and of their query tiles: as in `BwdWorkTile` in CUDA.
    last_keys_first: bool = False
    run_keys: int = 0
    # Claims between successive key blocks of a head; its inverse modulo the blocks of a head.
    stagger: int = 0
    inverse_stagger: int = 0
    # Splits of the query heads of a key block, heads of each, splits of its queries.
    head_splits: int = 1
    split_heads: int = 0
    query_splits: int = 1
    # L2 swizzle of packed sequences: rows and number of the key heads whose blocks alternate.
    swizzle_rows: int = 0
    swizzle_heads: int = 1
    # Counters by which thread blocks stay in lockstep, as in `Lockstep` in CUDA.
    lockstep_steps: int = 0
    single_heads: int = 0  # dynamic scheduler: heads that come one by one, before all groups
    # Known only to the host.
    dynamic_tiles: int = 0  # work tiles of the dynamic scheduler
    split_bytes: tuple[int, int] = (0, 0)  # of sums and of semaphores of the splits
    assignment: Array | None = None  # None: tiles in the order of their numbers
    is_provisional: bool = False  # True: made without tables, and a table may be faster

    @property
    def fields(self) -> dict[str, int]:
        """Return the fields of the parameter block."""
        numbers: tuple[Any, ...] = self
        return dict(zip(_FIELDS, numbers, strict=False))

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of the workspace in which thread blocks exchange numbers."""
        tiles = {"next_tiles": 4 * self.dynamic_tiles} if self.dynamic_tiles else {}
        return tiles | ({"split_sums": self.split_bytes[0]} if self.split_bytes[0] else {})

    @property
    def zeros(self) -> dict[str, int]:
        """Return the bytes of the counters that start at zero."""
        counts = {"tile_counter": 4} if self.dynamic_tiles else {}
        if self.split_bytes[0]:
            counts["split_semaphores"] = self.split_bytes[1]
        if self.lockstep_steps:
            counts["lockstep_counters"] = 4 * self.lockstep_steps
        return counts


_FIELDS = Schedule._fields[: Schedule._fields.index("dynamic_tiles")]


def schedule_of(
    problem: Problem,
    layout: CallLayout,
    launches: Sequence[KernelLaunch],
    device: Device,
    *,
    tables: bool = True,
) -> Schedule:
    """Decide in what order a pass takes its work tiles, by the needs of its main kernel.

    Without ``tables`` the order is index arithmetic or a counter: no array is made, so the time of
    this function does not grow with lengths. The results have the same bits either way.

    Packed lengths may be known only on the device, which orders the blocks itself. It interleaves
    as many heads and sequences as fit in half of the L2 cache, and one wave at most.
    """
    P, launch = problem, main_of(launches)
    if launch is not None and launch.traits.persistent == "keys":
        return _backward_schedule(P, launch, device)
    share = 0.5 if launch is None else launch.traits.l2_share
    groups = head_groups(P, int(share * device.l2_bytes))
    if launch is None or not launch.traits.persistent:
        return Schedule(groups, **_splits(P, launch, device.tuning))
    if P.is_packed:
        row = (P.D + P.Dv) * P.dtype.itemsize
        return Schedule(1, swizzle_rows=device.l2_bytes // 2 // row, swizzle_heads=launch.workers)
    if launch.traits.split_keys:  # all splits have the same length
        return Schedule(groups)
    if _is_dynamic(P, layout, launch, device.tuning):
        return _dynamic(P, launch)
    return _static_or_claimed(P, layout, launch, groups, device, tables)


def _static_or_claimed(
    P: Problem,
    layout: CallLayout,
    launch: KernelLaunch,
    groups: int,
    device: Device,
    tables: bool,
) -> Schedule:
    """Assign work tiles in advance, with late thread blocks or in lockstep.

    Without ``tables`` workers claim tiles head by head where a table would help. That is about as
    fast, and round robin is far slower (docs/tuning-log.md: plans without tables).
    """
    key, tuning = launch.key, device.tuning
    blocks, tiles = -(-P.Nq // key.block_q), -(-P.Nk // key.block_k)
    work_tiles = P.B * P.Hq * blocks
    # Without a mask all work tiles have the same length, and start together.
    row = (P.D + P.Dv) * P.dtype.itemsize
    drifts = _is_triangle(P) and P.Nk * row > tuning.lockstep_l2 * device.l2_bytes
    steps = _lockstep_steps(P, work_tiles, tiles, launch.workers) if drifts else 0
    # A late thread block has one group, and no block waits for it in lockstep.
    is_tall = key.block_q >= tuning.late_rows and key.groups == 1
    is_narrow = max(P.D, P.Dv) <= tuning.late_dim
    has_late = is_tall and is_narrow and not steps and not launch.traits.part_keys
    late_share = tuning.late_share if has_late else 0
    # One block a head, as in decoding, is little work, and lengths may differ in each call.
    few = blocks == 1 or work_tiles <= launch.workers
    many = work_tiles > tuning.max_waves * launch.workers
    if few or (tables and many):
        return Schedule(groups, lockstep_steps=steps)
    if tables:
        assignment = assignment_of(P, layout, launch, groups, late_share, tuning)
        return Schedule(groups, assignment=assignment, lockstep_steps=steps)
    own = P.mask_mod
    is_listed = layout.listed_mask is not None or (own is not None and kinds_agree(own))
    differ = is_listed or P.window != (None, None) or not _are_alike(layout)
    # A table would be made for full lengths if the device alone knows them.
    is_known = layout.kv_lengths is not None and layout.q_offset is not None
    is_provisional = is_known and not many and (differ or late_share > 0)
    if steps or (is_known and own is None and not differ and not is_provisional):
        return Schedule(groups, lockstep_steps=steps, is_provisional=is_provisional)
    return _dynamic(P, launch, is_provisional)


def _backward_schedule(P: Problem, launch: KernelLaunch, device: Device) -> Schedule:
    """Decide in what order a Hopper backward kernel takes its work tiles.

    Head groups change which heads run together, never the order of the sums within a dq tile.
    """
    key, grid, in_order, tuning = launch.key, launch.workers, launch.in_order, device.tuning
    splits = _splits(P, launch, tuning)
    P = _of_splits(P, splits)
    is_causal = P.window[1] is not None
    sums = P.D * P.accum_dtype.itemsize if key.add_dq else 0
    row = P.group * ((P.D + P.Dv) * P.dtype.itemsize + sums)
    if P.is_packed:
        rows = FAR if in_order and is_causal else device.l2_bytes // 2 // row
        turn = max(1, _in_flight(launch, tuning) if in_order else grid)
        return Schedule(1, in_order, swizzle_rows=rows, swizzle_heads=turn)
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
        **splits,
        lockstep_steps=_lockstep_steps(P, heads * blocks, tiles, launch.workers) if drifts else 0,
    )


def _splits(P: Problem, launch: KernelLaunch | None, tuning: Tuning) -> dict[str, Any]:
    """Return the fields of a schedule that describe splits of the queries of a key block.

    As in ``src/query_split_sums.cuh``: each split but one leaves its sums to another, and has a
    semaphore for each warp, at most.
    """
    if launch is None or not launch.key.split_q:
        return {}
    key, (heads, queries) = launch.key, query_splits(P, tuning)
    places = P.B * P.Hkv * -(-P.Nk // key.block_k) * (heads * queries - 1)
    sums = key.block_k * 2 * max(key.head_dim, key.value_dim) * P.accum_dtype.itemsize
    return {
        "head_splits": heads,
        "split_heads": -(-P.group // heads),
        "query_splits": queries,
        "split_bytes": (places * sums, places * key.warps_m * key.warps_n * COUNT),
    }


def _of_splits(P: Problem, splits: dict[str, Any]) -> Problem:
    """Return a problem whose key heads are splits of the queries: they run like heads."""
    if not splits:
        return P
    Hkv, queries = P.Hkv * splits["head_splits"], splits["query_splits"]
    sizes = {"B": P.B * queries, "Hkv": Hkv, "Hq": Hkv * splits["split_heads"]}
    return replace(P, **sizes, Nq=-(-P.Nq // queries))


def _heads_in_cache(P: Problem, launch: KernelLaunch, row: int, device: Device) -> int:
    """Count the heads that run together if dq is summed in any order.

    ``row`` is the bytes of a query. Each key block reads q, dout and the sums of dq again. So the
    heads of a group should fit in a quarter of the L2 cache, whose halves keep copies of what both
    read, and should have at least a wave of key blocks. With a long causal mask half of the L2
    cache or two waves are faster, there in whole waves. The same holds if dq is summed in order.
    """
    grid, blocks = launch.workers, -(-P.Nk // launch.key.block_k)
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
    if P.Nk > tuning.dynamic_keys or not _is_triangle(P) or P.has_pair_mask:
        return False
    blocks = -(-P.Nq // launch.key.block_q)
    return blocks > 1 and blocks * P.B * P.Hq > launch.workers and _are_alike(layout)


def _dynamic(P: Problem, launch: KernelLaunch, is_provisional: bool = False) -> Schedule:
    """Schedule heads one by one, and the last heads together, the longest tiles first.

    The last heads have a work tile for each worker. With fewer heads the SMs would end at different
    times; with more, the L2 cache would not hold all keys.
    """
    blocks, heads = -(-P.Nq // launch.key.block_q), P.B * P.Hq
    last = -(-launch.workers // blocks)
    return Schedule(
        1,
        dynamic_tiles=blocks * heads,
        single_heads=max(0, heads - last),
        is_provisional=is_provisional,
    )


def _are_alike(layout: CallLayout) -> bool:
    """Return True if batch entries have equal lengths and offsets, as far as the host knows."""
    return _is_uniform(layout.kv_lengths) and _is_uniform(layout.q_offset)


def _is_uniform(numbers: tuple[int, ...] | None) -> bool:
    return not numbers or numbers.count(numbers[0]) == len(numbers)


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
