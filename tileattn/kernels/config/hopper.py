"""The Hopper kernels (wgmma, TMA): which calls they support, and what they launch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tileattn.kernels.config import generic
from tileattn.kernels.config.context import (
    FAILED,
    LARGE,
    NON_FINITE,
    ROW_WARPS,
    KernelLaunch,
    LaunchContext,
    option_fields,
)
from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.config.shared_memory import (
    HOPPER_GROUP_ROWS,
    HOPPER_LIMIT,
    HOPPER_STATIC,
    hopper_backward_bytes,
    hopper_forward_bytes,
)
from tileattn.kernels.config.tiles import MAX_HEAD_DIM, TileSize, bucket, candidates
from tileattn.problem import Problem

NAME = "Hopper"
HOPPER = "forward_sm90"
HOPPER_BACKWARD, HOPPER_WIDE = "backward_sm90", "backward_wide_sm90"
HOPPER_DQ_CONVERT = "backward_dq_convert_sm90"
HOPPER_BACKWARDS = (HOPPER_BACKWARD, HOPPER_WIDE)

# Head-dimension buckets of the backward kernels: the wide one where either dimension needs it.
_BACKWARD_BUCKETS = {HOPPER_BACKWARD: (64, 128), HOPPER_WIDE: (128, 192, 256)}
_PRODUCER_WARPS = 4  # a warpgroup: registers are handed from one warpgroup to another
_FEW_KEYS = 512
_NARROW_TILE = 128  # keys
_PADDED = 1.02  # at most, keys of all wide tiles over keys
_MASKED_ROWS = 128  # at most, queries of a tile under a block mask

_SUPPORTED = "wgmma and tensor maps"
_DQ_CONVERT = "one thread block for each tile of dq"
_NAN_SAFE = "for heads with something not finite; mostly there are none, and it returns at once"

_Clause = tuple[str, Callable[[Problem, LaunchContext], bool]]

# The first clause that holds is the reason why another family runs the call.
_UNSUPPORTED: tuple[_Clause, ...] = (
    ("the GPU is not of compute capability 9.0", lambda _, context: context.arch != "sm_90a"),
    ("dtype is neither float16 nor bfloat16", lambda P, _: P.dtype.itemsize != 2),
    (f"a head dimension is above {MAX_HEAD_DIM}", lambda P, _: max(P.D, P.Dv) > MAX_HEAD_DIM),
    ("bias is in use", lambda P, _: "bias" in P.enabled_options),
    ("mask is in use", lambda P, _: "mask" in P.enabled_options),
    ("dropout is in use", lambda P, _: P.dropout_p > 0),
    ("score_mod is in use", lambda P, _: P.score_mod is not None),
    ("mask_mod is in use", lambda P, _: P.mask_mod is not None),
    ("an array is empty", lambda P, _: 0 in (P.B, P.Hq, P.Hkv, P.Nq, P.Nk, P.D, P.Dv)),
    (
        # Positions have 32 bits; the margin is for what the last tile goes beyond.
        "an array has nearly 2**31 rows or more",
        lambda P, _: P.B * max(P.Hq * P.Nq, P.Hkv * P.Nk) >= (1 << 31) - (1 << 16),
    ),
    ("the head dimension of v is no multiple of 8", lambda P, _: P.Dv % 8 > 0),
    ("a row is not aligned to 16 bytes", lambda _, context: context.alignment_bytes < 16),
    (
        "an array has an axis that is broadcast, reversed or of too long strides",
        lambda _, context: not context.tensor_maps,
    ),
)
_UNSUPPORTED_BACKWARD: tuple[_Clause, ...] = (
    *_UNSUPPORTED,
    ("block_mask is in use", lambda P, _: "block_mask" in P.enabled_options),
    ("the head dimension of q and k is no multiple of 8", lambda P, _: P.D % 8 > 0),
)


def why_not(problem: Problem, context: LaunchContext, direction: str) -> str | None:
    """Why the family does not support a pass, ``"forward"`` or ``"backward"``; None if it does."""
    clauses = _UNSUPPORTED if direction == "forward" else _UNSUPPORTED_BACKWARD
    return next((why for why, holds in clauses if holds(problem, context)), None)


def forward(
    problem: Problem, context: LaunchContext, tiles: Sequence[TileSize] = ()
) -> KernelLaunch:
    """Launch the forward pass, with the first of some tiles or with those that suit the problem."""
    P, tile = problem, tiles[0] if tiles else forward_tile(problem)
    dim, value = bucket(P.D), bucket(P.Dv)
    key = _key(HOPPER, P, dim, value, tile, hopper_forward_bytes(tile, dim, value))
    # The kernel is persistent: a thread block takes one query block after the other.
    grid = min(context.sm_count, P.B * P.Hq * -(-P.Nq // key.block_q))
    maps = (("q", HOPPER_GROUP_ROWS), ("k", key.block_k), ("v", key.block_k))
    return KernelLaunch(key, grid, key.smem_bytes, f"{_SUPPORTED}, {tile.why}", maps)


def forward_tile(problem: Problem) -> TileSize:
    """Pick the forward tiles, of those that fit.

    If a diagonal cuts few keys, small tiles waste less of what it masks out (measured). Wide
    tiles are faster without a mask and without score modifiers, where keys fill the last one
    (measured); with score modifiers their registers spill. Under a block mask tiles have no more
    queries than its blocks mostly have.
    """
    P = problem
    dim, value = bucket(P.D), bucket(P.Dv)
    masked = "block_mask" in P.enabled_options
    plain = P.enabled_options.isdisjoint({"softcap", "alibi_slopes"}) and not masked
    uncut = P.window == (None, None) and plain

    def suits(tile: TileSize) -> bool:
        if hopper_forward_bytes(tile, dim, value) + HOPPER_STATIC > HOPPER_LIMIT:
            return False
        if masked and tile.block_q > _MASKED_ROWS:
            return False
        keys = -(-P.Nk // tile.block_k) * tile.block_k
        return tile.block_k <= _NARROW_TILE or (uncut and keys <= _PADDED * P.Nk)

    tiles = list(filter(suits, candidates(HOPPER, P.dtype.itemsize, max(dim, value))))
    few = not masked and P.Nk <= _FEW_KEYS and P.window[1] is not None
    return tiles[-1 if few else 0]


def backward(
    problem: Problem, context: LaunchContext, *, deterministic: bool
) -> tuple[KernelLaunch, ...]:
    """Launch the backward kernel, then what computes flagged heads again, mostly none.

    Its thread blocks add dq to device memory, one after the other where the order must be fixed.
    """
    P = problem
    kernel = next(
        name for name in HOPPER_BACKWARDS if max(P.D, P.Dv) <= _BACKWARD_BUCKETS[name][-1]
    )
    dim, value = (next(n for n in _BACKWARD_BUCKETS[kernel] if x <= n) for x in (P.D, P.Dv))
    tiles = candidates(kernel, P.dtype.itemsize, max(dim, value))
    tile = tiles[0 if P.enabled_options.isdisjoint({"softcap", "alibi_slopes"}) else -1]
    key = _key(kernel, P, dim, value, tile, hopper_backward_bytes(tile, dim, value))
    key = replace(key, add_dq=True)
    # The kernel is persistent: a thread block takes one key block after the other.
    grid = min(context.sm_count, P.B * P.Hkv * -(-P.Nk // key.block_k))
    maps = ("q", key.block_q), ("k", key.block_k), ("v", key.block_k), ("dout", key.block_q)
    why = f"{_SUPPORTED}, {tile.why}"
    own = KernelLaunch(key, grid, key.smem_bytes, why, maps, deterministic)
    # A softcap where it is flat masks a gradient of NaN: the NaN-safe kernel does not know of it.
    safe = () if key.softcap else (_nan_safe(own),)
    left = LARGE | FAILED | (0 if safe else NON_FINITE)
    others = generic.dkdv_launch(P, context, add_dq=False), generic.dq_launch(P, context)
    repairs = (generic.repairing(launch, context, left) for launch in others)
    return own, *safe, _dq_convert(P, key), *repairs


def _nan_safe(own: KernelLaunch) -> KernelLaunch:
    """Launch the backward kernel for heads with something not finite.

    It has one stage, since it needs k twice.
    """
    key = own.key
    tile = TileSize(key.block_q, key.block_k, key.warps_m, stages=1)
    shared = hopper_backward_bytes(tile, key.head_dim, key.value_dim, repairs=True)
    key = replace(key, stages=1, smem_bytes=shared, head_flags=NON_FINITE)
    return own._replace(key=key, shared_bytes=shared, why=_NAN_SAFE)


def _dq_convert(P: Problem, key: KernelKey) -> KernelLaunch:
    """Launch the kernel that rounds the sums of dq, and undoes the order that they lie in."""
    sizes = key.head_dim, key.value_dim, key.block_q
    convert = KernelKey(HOPPER_DQ_CONVERT, key.dtype, *sizes, warps_m=ROW_WARPS)
    return KernelLaunch(convert, P.B * P.Hq * -(-P.Nq // key.block_q), why=_DQ_CONVERT)


def _key(kernel: str, P: Problem, dim: int, value: int, tile: TileSize, shared: int) -> KernelKey:
    sizes, options = (dim, value, *tile[:6]), option_fields(P, "")
    return KernelKey(
        kernel, P.dtype.name, *sizes, producer_warps=_PRODUCER_WARPS, smem_bytes=shared, **options
    )
