"""The keys that each probe is compiled and run with."""

from dataclasses import replace

from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import (
    hopper_backward_bytes,
    hopper_forward_memory,
)
from tileattn.kernels.cuda.tile_sizes import TileSize

DTYPES = ("float16", "bfloat16", "float32", "float64")

# The bias of two warps, with rows of 64 bytes, 96, 128 or more, copied 4, 8 or 16 bytes at a time.
_BIAS = KernelKey("bias", "float32", warps_m=2)
BIAS = tuple(
    replace(
        _BIAS, dtype=dtype, bias=bias, block_q=rows, block_k=columns, bias_alignment_bytes=vector
    )
    for dtype, bias, rows, columns, vector in (
        ("bfloat16", "bfloat16", 64, 32, 16),
        ("float16", "bfloat16", 128, 48, 16),
        ("float32", "float16", 64, 64, 4),
        ("float16", "float32", 32, 48, 8),
        ("bfloat16", "float32", 64, 32, 16),
        ("float64", "float16", 64, 16, 8),
        ("float32", "float64", 32, 32, 8),
        ("float64", "float64", 64, 16, 16),
        ("bfloat16", "bfloat16", 64, 32, 0),
        ("float64", "float32", 32, 48, 0),
    )
)

# With 64 elements a thread copies a column of chunks. With 80 it does not: such rows leave a
# run of 128 bytes half empty.
COPIES = tuple(
    KernelKey("copies", dtype, head_dim, block_q=48, warps_m=4, alignment_bytes=vector)
    for dtype, size in zip(DTYPES, (2, 2, 4, 8), strict=True)
    for head_dim in (64, 80)
    for vector in (2, 4, 8, 16)
    if vector >= size
)

_MASK = KernelKey("mask", "float32", block_q=32, block_k=16, warps_m=1)
MASK = (
    _MASK,
    replace(_MASK, mask=True),
    replace(_MASK, block_mask=True),
    replace(_MASK, block_mask=True, mask=True, warps_m=2),
)

# Words of 16 rows: an odd number, one, more than a warp looks at. Warps with whole rows, or parts.
_NONFINITE = KernelKey("nonfinite", "float16", block_q=64, block_k=48, warps_m=2)
NONFINITE = (
    _NONFINITE,
    replace(_NONFINITE, dtype="bfloat16", block_k=176, dropout=True),
    replace(_NONFINITE, dtype="bfloat16", block_k=128, warps_n=2, value_dim=96, dropout=True),
    replace(_NONFINITE, dtype="float32", block_q=32, block_k=16, value_dim=32, dropout=True),
    replace(_NONFINITE, dtype="float32", block_k=64, warps_n=4),
    replace(_NONFINITE, dtype="float64", block_k=32, warps_n=2, value_dim=32, dropout=True),
)

PARAMS = (KernelKey("params", "float32"),)
_PHILOX = KernelKey("philox", "float32", warps_m=1, dropout=True)
PHILOX = (_PHILOX, replace(_PHILOX, origin=True))

_SCORE_MOD = KernelKey("score_mod", "float32")
SCORE_MOD = (
    replace(_SCORE_MOD, fold_scale=True),
    replace(_SCORE_MOD, dtype="float64"),
    replace(_SCORE_MOD, softcap=True),
    replace(_SCORE_MOD, dtype="bfloat16", softcap=True, alibi=True),
    replace(_SCORE_MOD, dtype="float64", softcap=True, alibi=True, bias="float64"),
    replace(_SCORE_MOD, alibi=True, bias="float32"),
    replace(_SCORE_MOD, softcap=True, alibi=True, bias="float16"),
    replace(_SCORE_MOD, dtype="float16", bias="bfloat16"),
    replace(_SCORE_MOD, bias="float64"),
)

_SCORE_TILE = KernelKey("score_tile", "float32", warps_m=1, block_q=32, block_k=32)
SCORE_TILE = (
    _SCORE_TILE,
    replace(_SCORE_TILE, mask=True, dropout=True),
    replace(_SCORE_TILE, dtype="float64", block_mask=True, dropout=True),
    replace(_SCORE_TILE, dtype="bfloat16", mask=True, block_mask=True),
    replace(_SCORE_TILE, mask=True, mask_vector_width=2),
    replace(_SCORE_TILE, mask=True, mask_vector_width=16, dropout=True),
    replace(_SCORE_TILE, mask=True, mask_vector_width=16, block_q=48, block_k=48),
)

_SOFTMAX = KernelKey("softmax", "float32", block_q=32, block_k=48, warps_m=1)
SOFTMAX = (_SOFTMAX, replace(_SOFTMAX, dtype="float64"))

SPLITTING = (KernelKey("splitting", "float32"),)

# A warp's half of the columns takes 64 bytes, 96, 128 or more: tiles find their way by bits or not.
TILE = tuple(
    KernelKey("tile", dtype, head_dim, block_q=48, block_k=32, warps_m=1)
    for dtype, head_dims in zip(DTYPES, ((64, 128), (64, 96), (32, 96), (32, 64)), strict=True)
    for head_dim in head_dims
)

TILE_SCHEDULER = tuple(replace(key, kernel="tile_scheduler") for key in MASK)

TYPES = tuple(KernelKey("types", dtype) for dtype in DTYPES)


def _laid_out(kernel: str, tile: TileSize, dim: int, value: int = 0) -> KernelKey:
    """Make a key with the shared memory that the Hopper kernels have with such tiles."""
    sizes = dim, value or dim
    if kernel == "fwd_smem":
        shared = hopper_forward_memory(tile, *sizes).nbytes
    else:
        shared = hopper_backward_bytes(tile, *sizes)
    return KernelKey(kernel, "float16", *sizes, *tile[:7], producer_warps=4, smem_bytes=shared)


FORWARD_SMEM = (
    _laid_out("fwd_smem", TileSize(128, 64, 8, stages=2), 64),
    _laid_out("fwd_smem", TileSize(192, 128, 12, stages=2), 64),
    _laid_out("fwd_smem", TileSize(128, 64, 8, stages=4, groups=2), 64, 32),
)
BACKWARD_SMEM = (
    _laid_out("bwd_smem", TileSize(128, 128, 8, stages=2), 64),
    _laid_out("bwd_smem", TileSize(64, 128, 8, stages=2), 128),
    _laid_out("bwd_smem", TileSize(64, 128, 8, stages=2), 192, 128),
    _laid_out("bwd_smem", TileSize(64, 64, 8, stages=1), 256),
)

KEYS = (
    *BIAS,
    *COPIES,
    *MASK,
    *NONFINITE,
    *PARAMS,
    *PHILOX,
    *SCORE_MOD,
    *SCORE_TILE,
    *SOFTMAX,
    *SPLITTING,
    *TILE,
    *TILE_SCHEDULER,
    *TYPES,
    *BACKWARD_SMEM,
    *FORWARD_SMEM,
)


def name_of(key: KernelKey) -> str:
    """Return the id of a test: what distinguishes a key from the others of its probe."""
    options = ("softcap", "alibi", "mask", "block_mask", "dropout", "fold_scale")
    used = [name for name in options if getattr(key, name)]
    bias = [f"bias_{key.bias}x{key.bias_alignment_bytes}"] if key.bias else []
    width = key.mask_vector_width
    size = f"{key.head_dim}x{key.alignment_bytes}" + f"s{width}" * (width > 1)
    return "-".join([key.kernel, key.dtype, size, *used, *bias])
