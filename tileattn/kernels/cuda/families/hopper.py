"""The Hopper kernels (wgmma, TMA): which calls they support, and what they launch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tileattn.call.problem import Problem
from tileattn.dtypes import NAMED
from tileattn.kernels.cuda.families import generic
from tileattn.kernels.cuda.families.context import (
    COUNT,
    FAILED,
    LARGE_SCORES,
    NON_FINITE,
    ROW_WARPS,
    WARP,
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    Parts,
    option_fields,
)
from tileattn.kernels.cuda.families.family import (
    NO_TENSOR_MAPS,
    NOT_16_BIT,
    NOT_ALIGNED,
    NOT_HOPPER,
    Clause,
    Family,
    first_reason,
)
from tileattn.kernels.cuda.families.grid import OPEN, Grid, block_count
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.query_splits import splits_queries
from tileattn.kernels.cuda.families.shared_memory import (
    HOPPER_GROUP_ROWS,
    HOPPER_LIMIT,
    HOPPER_STATIC,
    hopper_backward_bytes,
    hopper_ds_bytes,
    hopper_forward_memory,
    hopper_wide_dq_bytes,
)
from tileattn.kernels.cuda.families.size_class import (
    empty_axes,
    fills_tall_tiles,
    fits_positions,
    has_dynamic_keys,
    has_short_keys,
    has_two_group_keys,
    is_head_major,
    is_window,
    short_rows,
    split_keys,
    suits_small_ds_tiles,
    suits_tall_rows,
    tall_keys,
)
from tileattn.kernels.cuda.families.tiles import (
    MAX_HEAD_DIM,
    bucket,
    invariant_keys,
    small_first,
    tuned_tiles,
)
from tileattn.kernels.cuda.tile_sizes import TileSize

HOPPER = "forward_sm90"
HOPPER_BACKWARD, HOPPER_WIDE = "backward_sm90", "backward_wide_sm90"
HOPPER_HALVES = "backward_halves_sm90"
HOPPER_WIDE_DQ = "backward_wide_dq_sm90"
HOPPER_DQ_CONVERT = "backward_dq_convert_sm90"
HOPPER_BACKWARDS = (HOPPER_BACKWARD, HOPPER_HALVES, HOPPER_WIDE)
HOPPER_DS = ("backward_dbias_sm90", "backward_daux_sm90")  # which sum dS over pairs

# Head-dimension buckets; for each backward kernel the buckets of q and of v. The first kernel with
# both buckets runs.
_NARROW = tuple(range(32, 129, 16))  # multiples of the K extent of wgmma
_NARROW_DIM = _NARROW[-1]
_FORWARD_BUCKETS = (*_NARROW, 192, 256)
_BACKWARD_BUCKETS = {
    HOPPER_BACKWARD: (_NARROW, _NARROW),
    HOPPER_HALVES: ((192,), (128,)),
    HOPPER_WIDE: ((128, 192, 256), (128, 192, 256)),
}
_PRODUCER_WARPS = 4  # one warpgroup, because setmaxnreg moves registers between warpgroups
_INVARIANT_TILE = TileSize(128, 64, 8, 1, 3)  # the last choice: some heads have no tuned one
_PIECE_BYTES = 16  # bytes of a piece of a running total, for each thread
_MANY_GROUPS = 4  # of warps: too few registers for score modifiers, a mask or dropout
_BOX_KEYS = 16  # of a TMA box; with fewer, copies of rows are faster; all key tiles are multiples
_GATHERING_GROUPS = 2  # at most: a group has one producer warp, and others that gather rows
SUPPORTED = "wgmma and tensor maps"
_CONVERTED_SUMS = 4096  # sums of dq that `ROW_WARPS` warps load at once
_DQ_CONVERT = "one thread block for each tile of dq"
_NAN_SAFE = "for heads with NaN or infinity; usually there are none, and it returns at once"

UNSUPPORTED_ANY_DIM: tuple[Clause, ...] = (
    NOT_HOPPER,
    NOT_16_BIT,
    ("an array is empty", lambda P, _: bool(empty_axes(P)) or 0 in (P.D, P.Dv)),
    ("an array has nearly 2**31 rows or more", lambda P, _: not fits_positions(P)),
    ("the head dimension of v is not a multiple of 8", lambda P, _: P.Dv % 8 > 0),
    NOT_ALIGNED,
    NO_TENSOR_MAPS,
)
_UNSUPPORTED: tuple[Clause, ...] = (
    *UNSUPPORTED_ANY_DIM[:2],
    (f"a head dimension is above {MAX_HEAD_DIM}", lambda P, _: max(P.D, P.Dv) > MAX_HEAD_DIM),
    *UNSUPPORTED_ANY_DIM[2:],
    (
        "no tile has room for the bias",
        lambda P, context: bias_size(context) > 0 and not _forward_tiles(P, context),
    ),
)
_UNSUPPORTED_BACKWARD: tuple[Clause, ...] = (
    *_UNSUPPORTED,
    ("the head dimension of q and k is not a multiple of 8", lambda P, _: P.D % 8 > 0),
    (
        "bias is in use, and a head dimension is above 128",
        lambda P, _: P.has_bias and max(P.D, P.Dv) > _NARROW_DIM,
    ),
)
_SMALL: Clause = (
    "a small tile has all queries and keys",
    lambda P, context: is_window(P) and not context.deterministic,
)


def why_not_forward(problem: Problem, context: LaunchContext) -> str | None:
    """Return why the forward kernel does not support a call; None if it does."""
    return first_reason(_UNSUPPORTED, problem, context)


def why_not_backward(problem: Problem, context: LaunchContext) -> str | None:
    """Return why the backward kernels do not support a call; None if they do."""
    return first_reason(_UNSUPPORTED_BACKWARD, problem, context)


def forward_launch(
    problem: Problem, context: LaunchContext, tiles: Sequence[TileSize] = (), value_unit: int = 1
) -> KernelLaunch:
    """Launch the forward pass, with the first tile of ``tiles`` or the best one for the problem.

    Callers pass tiles for split-KV. These use the buckets of the generic kernel that joins splits;
    that of v is a multiple of ``value_unit``.
    """
    P, tuning, tile = problem, context.tuning, (tiles or _forward_tiles(problem, context))[0]
    splits, dim, value = bool(tiles), _forward_bucket(P.D), _forward_bucket(P.Dv)
    if splits:
        dim, value = bucket(P.D), bucket(P.Dv, value_unit)
    has_totals = P.is_invariant and not splits
    sizes = dim, value, bias_size(context), P.kv_itemsize
    memory = hopper_forward_memory(tile, *sizes, totals=has_totals, splits=splits)
    key = key_of(HOPPER, P, context, dim, value, tile, memory.nbytes)
    # The kernel is persistent: a thread block takes one query block after another.
    grid = Grid("queries", key.block_q, most=context.sm_count)
    key = replace(key, gathered=is_gathered(P), invariant=P.is_invariant)
    # A box lies in one page: its keys are the largest power of two that divides page and tile.
    either = key.block_k | (P.page or 0)
    box = key.block_k if P.page is None else either & -either
    boxes = () if key.gathered else (("k", box), ("v", box))
    maps = (("q", HOPPER_GROUP_ROWS), *boxes)
    # Long blocks wait for memory, short ones for the tensor cores: small head groups mix them.
    share = tuning.short_l2_share if has_dynamic_keys(P, tuning) else _FORWARD.l2_share
    why, traits = f"{SUPPORTED}, {tile.why}", replace(_FORWARD, l2_share=share)
    if has_totals:
        keys = split_keys(P, tuning)
        totals = _Totals(context.sm_count, keys, memory.total_pieces)
        traits = replace(traits, part_keys=keys, workspace=totals)
    return KernelLaunch(key, grid, key.smem_bytes, why, maps, traits=traits)


def is_gathered(problem: Problem) -> bool:
    """Return True if TMA boxes, which lie in one page each, would be smaller than `_BOX_KEYS`."""
    return problem.page is not None and problem.page % _BOX_KEYS > 0


def _forward_tiles(problem: Problem, context: LaunchContext) -> Sequence[TileSize]:
    """List the forward tiles that fit and suit the call, the best first.

    * Short tiles are for few queries and keys, which others would pad more.
    * Two groups of warps fill the time between work tiles, but read the keys more often: they are
      for queries that attend to few keys. With score modifiers and dropout their registers spill.
      With four groups a mask makes registers spill, too. With more than two groups no warps are
      left to gather keys in pages.
    * The smallest tiles are for such calls with few keys and a causal mask: they compute fewer
      masked-out pairs.
    * With ``invariant`` all tiles have the same number of keys.
    * Tiles of 192 queries read the keys less often. Above 64 columns they must pad queries little,
      and have 64 keys if 96 would pad the keys. Tiles of 128 queries and as many keys take their
      place if SMs would have too few tall ones, if a bias leaves no room for them, and with a mask:
      128 is the usual block of a block mask.

    Otherwise the number of heads does not count, so that a row has the same bits in any batch.
    Packed lengths are known only on the device, so their tiles are the same for all lengths.
    """
    P, tuning = problem, context.tuning
    dim, value = _forward_bucket(P.D), _forward_bucket(P.Dv)
    plain = not (P.changes_scores or P.has_pair_mask or P.has_dropout)
    widest = max(dim, value)
    is_short, few = has_short_keys(P, tuning), has_two_group_keys(P, tuning)
    most_keys, fills = tall_keys(P, tuning), fills_tall_tiles(P, tuning, context.sm_count)
    cut = is_short and P.window[1] is not None and not (P.has_pair_mask or P.is_packed)
    short = short_rows(P, tuning)
    bias_bytes = bias_size(context)

    def suits(tile: TileSize) -> bool:
        if P.is_invariant:
            return tile.groups == 1 and tile.block_k == invariant_keys(widest)
        if tile.groups > _GATHERING_GROUPS and is_gathered(P):
            return False
        if tile.short:
            return tile.block_q in short and (plain or tile.groups < _MANY_GROUPS)
        if tile.is_tall and tile.block_k > most_keys:
            return False
        return tile.groups == 1 or (plain and few)

    def fits(tile: TileSize) -> bool:
        memory = hopper_forward_memory(tile, dim, value, bias_bytes, totals=P.is_invariant)
        return memory.nbytes + HOPPER_STATIC <= HOPPER_LIMIT

    tiles = []
    more = (_INVARIANT_TILE,) if P.is_invariant else ()
    for tile in filter(suits, (*tuned_tiles(HOPPER, P.dtype.itemsize, widest), *more)):
        forms = (tile, tile.lowered()) if fills else (tile.lowered(),)
        tiles += list(filter(fits, forms))[:1]
    has_groups = any(tile.groups > 1 for tile in tiles)
    return tiles[-1:] if cut and not has_groups else tiles


def _backward(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the kernel over keys, what finishes dq, and what recomputes flagged heads.

    The kernel over keys adds dq to device memory, in deterministic mode in a fixed order. Wide
    heads have a kernel of their own for dq. Heads are rarely flagged.
    """
    P, own = problem, _key_launch(problem, context)
    key, is_wide = own.key, not own.key.add_dq
    # The NaN-safe kernel has no room for a bias, and ignores that a flat score modifier masks NaN.
    has_safe = not (is_wide or key.softcap or key.score_mod or key.bias)
    left = LARGE_SCORES | FAILED | (0 if has_safe else NON_FINITE)
    dq = _wide_dq(P, context, key) if is_wide else _dq_convert(key)
    safe = (_nan_safe(own), generic.repairing(dq, context, NON_FINITE)) if has_safe else ()
    context = context._replace(dbias=False)  # a kernel of its own computes dbias of all heads
    # The kernel for dq leaves space on an SM: it starts while dq is converted, so it comes first.
    others = generic.dq_launch(P, context), generic.dkdv_launch(P, context, add_dq=False)
    repairs = (generic.repairing(launch, context, left) for launch in others)
    return own, dq, *repairs, *safe


def _key_launch(P: Problem, context: LaunchContext) -> KernelLaunch:
    """Launch the kernel over keys."""
    tuning = context.tuning
    plain = not (P.changes_scores or P.has_mask or P.has_dropout)  # the others need registers
    suited = (name for name in HOPPER_BACKWARDS if plain or name != HOPPER_HALVES)
    kernel = next(name for name in suited if 0 not in _buckets(name, P))
    dim, value = _buckets(kernel, P)

    def suits(tile: TileSize) -> bool:
        if tile.block_q % HOPPER_GROUP_ROWS > 0:
            # dq is computed transposed: each warpgroup has 64 of its columns.
            return plain and dim > 64 and suits_tall_rows(P, tuning)
        return plain or tile.block_q <= tuning.modified_rows

    tile, shared = next(
        (tile, shared)
        for tile in filter(suits, tuned_tiles(kernel, P.dtype.itemsize, max(dim, value)))
        if (shared := hopper_backward_bytes(tile, dim, value, bias_size(context)))
        <= HOPPER_LIMIT - HOPPER_STATIC
    )
    key = key_of(kernel, P, context, dim, value, tile, shared)
    key = replace(key, add_dq=kernel != HOPPER_WIDE, head_major=is_head_major(P, tuning))
    # The kernel is persistent: a thread block takes one key block after another.
    grid = Grid("keys", key.block_k, most=context.sm_count)
    maps = ("q", key.block_q), ("k", key.block_k), ("v", key.block_k), ("dout", key.block_q)
    why = f"{SUPPORTED}, {tile.why}"
    in_order, traits = context.deterministic and key.add_dq, BACKWARD_TRAITS[kernel]
    launch = KernelLaunch(key, grid, key.smem_bytes, why, maps, in_order, traits)
    # Only this kernel can join sums. Wide heads have blocks of 64 keys, and so twice as many.
    can_split = kernel == HOPPER_BACKWARD and splits_queries(P, tuning)
    return launch.split() if can_split else launch


def _forward_bucket(dim: int) -> int:
    return next(n for n in _FORWARD_BUCKETS if n >= dim)


def _buckets(kernel: str, P: Problem) -> tuple[int, int]:
    """Return the head-dimension buckets of q and of v; 0 for one that the kernel lacks."""
    of_q, of_v = _BACKWARD_BUCKETS[kernel]
    return next((n for n in of_q if n >= P.D), 0), next((n for n in of_v if n >= P.Dv), 0)


def ds_launch(kernel: str, problem: Problem, context: LaunchContext) -> KernelLaunch | None:
    """Launch the counterpart of a generic kernel that sums dS; None if it does not support it."""
    P = problem
    if max(P.D, P.Dv) > _NARROW_DIM or why_not_backward(P, context) is not None:
        return None
    kernel += "_sm90"
    dim, value = _buckets(HOPPER_BACKWARD, P)
    tiles = tuned_tiles(kernel, P.dtype.itemsize, max(dim, value))
    if suits_small_ds_tiles(P, context.tuning):
        tiles = small_first(tiles)
    bias_bytes = NAMED[context.bias].itemsize if context.bias else 0
    for tile in tiles:
        shared = hopper_ds_bytes(tile, dim, value, bias_bytes)
        if shared <= min(HOPPER_LIMIT - HOPPER_STATIC, context.shared_limit):
            key = key_of(kernel, P, context, dim, value, tile, shared)
            maps = ("q", key.block_q), ("k", key.block_k), ("v", key.block_k), ("dout", key.block_q)
            return KernelLaunch(key, OPEN, shared, f"{SUPPORTED}, {tile.why}", maps)
    return None


def bias_size(context: LaunchContext) -> int:
    """Return the bytes of an element of the bias in shared memory; 0 if it is not copied there."""
    return NAMED[context.bias].itemsize if context.bias_alignment_bytes else 0


def _nan_safe(own: KernelLaunch) -> KernelLaunch:
    """Launch the NaN-safe form of the backward kernel. It holds k twice, so it has one stage."""
    key = own.key
    tile = TileSize(key.block_q, key.block_k, key.warps_m, stages=1)
    shared = hopper_backward_bytes(tile, key.head_dim, key.value_dim, repairs=True)
    key = replace(key, stages=1, smem_bytes=shared, head_flags=NON_FINITE)
    return own._replace(key=key, shared_bytes=shared, why=_NAN_SAFE)


def _wide_dq(P: Problem, context: LaunchContext, own: KernelKey) -> KernelLaunch:
    """Launch the kernel that computes dq of wide heads."""
    dim, value = own.head_dim, own.value_dim
    tile, shared = next(
        (tile, shared)
        for tile in tuned_tiles(HOPPER_WIDE_DQ, P.dtype.itemsize, max(dim, value))
        if (shared := hopper_wide_dq_bytes(tile, dim, value)) <= HOPPER_LIMIT - HOPPER_STATIC
    )
    key = key_of(HOPPER_WIDE_DQ, P, context, dim, value, tile, shared)
    grid = Grid("queries", key.block_q, most=context.sm_count)
    rows = HOPPER_GROUP_ROWS
    maps = ("q", rows), ("k", key.block_k), ("v", key.block_k), ("dout", rows)
    return KernelLaunch(key, grid, shared, f"{SUPPORTED}, {tile.why}", maps, traits=WIDE_DQ_TRAITS)


def dq_columns(dim: int) -> int:
    """Return the columns of dq_accum: whole bulk copies of 32 columns."""
    return -(-dim // 32) * 32


def _dq_convert(key: KernelKey) -> KernelLaunch:
    """Launch the kernel that rounds the sums of dq and restores the order of their columns."""
    sizes = key.head_dim, key.value_dim, key.block_q
    sums = key.block_q * dq_columns(key.head_dim)
    convert = KernelKey(
        *(HOPPER_DQ_CONVERT, key.dtype, *sizes),
        block_k=key.block_k,
        warps_m=ROW_WARPS if sums <= _CONVERTED_SUMS else 2 * ROW_WARPS,
        packed=key.packed,
    )
    grid = Grid("queries", key.block_q)
    return KernelLaunch(convert, grid, why=_DQ_CONVERT, traits=_CONVERT)


def key_of(
    kernel: str,
    P: Problem,
    context: LaunchContext,
    dim: int,
    value: int,
    tile: TileSize,
    shared: int,
) -> KernelKey:
    sizes = dim, value, *tile[:7]
    return KernelKey(
        *(kernel, P.dtype.name, *sizes),
        mask_vector_width=context.mask_vector_width,
        bias_alignment_bytes=context.bias_alignment_bytes,
        producer_warps=_PRODUCER_WARPS,
        smem_bytes=shared,
        paged=P.is_paged,
        kv_dtype="" if P.kv_dtype is None else P.kv_dtype.name,
        **option_fields(P, context),
    )


def forward_workspace(P: Problem, key: KernelKey) -> Parts:
    """Return the dynamic scheduler's parts for packed sequences; other calls have a schedule."""
    if not P.is_packed:
        return Parts({}, {})
    blocks = P.B * P.Hq * block_count(P, P.Nq, key.block_q)
    return Parts({"tile_counter": COUNT, "next_tiles": blocks * COUNT}, {})


@dataclass(frozen=True)
class _Totals:
    """The part of the workspace for totals over parts of the keys: as in src/running_total.cuh."""

    workers: int
    part_keys: int
    pieces: int  # of a total, in the workspace

    def __call__(self, P: Problem, key: KernelKey) -> Parts:
        """Add the bytes of the totals to `forward_workspace`; a call of one part has none."""
        found = forward_workspace(P, key)
        count = self.workers if P.Nk > self.part_keys else 0
        nbytes = count * self.pieces * _PIECE_BYTES * WARP * key.warps_m
        return found._replace(scratch=found.scratch | {"partial_out": nbytes})


def backward_workspace(P: Problem, key: KernelKey) -> Parts:
    """Return the sums of dq, and the counters of work tiles, dq tiles and key heads."""
    heads = {} if P.is_packed or key.split_floats else {"row_counter": P.B * P.Hkv}
    if not key.add_dq:
        return Parts({}, _counters({"tile_counter": 2, **heads}))
    tiles = P.B * P.Hq * block_count(P, P.Nq, key.block_q)
    counts = heads | {"tile_counter": 2, "dq_semaphore": tiles, "dq_counter": P.entries * P.Hkv}
    sums = P.B * P.Hq * P.Nq * dq_columns(key.head_dim) * P.accum_dtype.itemsize
    return Parts({"dq_accum": sums}, _counters(counts))


def _counters(counts: dict[str, int]) -> dict[str, int]:
    return {name: count * COUNT for name, count in counts.items()}


_FORWARD = KernelTraits(
    main=True, persistent="queries", tile_lists=True, workspace=forward_workspace
)
_KEYS = KernelTraits(
    main=True,
    persistent="keys",
    tile_lists=True,
    beside_rows=True,
    workspace=backward_workspace,
)
BACKWARD_TRAITS = {
    HOPPER_BACKWARD: replace(_KEYS, ordered_dq=True),
    HOPPER_HALVES: _KEYS,
    HOPPER_WIDE: _KEYS,
}
WIDE_DQ_TRAITS = KernelTraits(persistent="queries", beside_rows=True)
_CONVERT = KernelTraits(beside_rows=True)


HOPPER_FORWARD_FAMILY = Family(
    "the Hopper kernel",
    lambda P, context: (forward_launch(P, context),),
    why_not_forward,
    invariant=True,
)
HOPPER_BACKWARD_FAMILY = Family(
    "the Hopper kernel", _backward, partial(first_reason, (*_UNSUPPORTED_BACKWARD, _SMALL))
)
