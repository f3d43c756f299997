"""The keys that each probe is compiled and run with."""

from dataclasses import replace

from tileattn.kernels.key import KernelKey

DTYPES = ("float16", "bfloat16", "float32", "float64")
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

_BLOCKS = KernelKey("blocks", "float32", block_q=32, block_k=16, warps_m=1)
BLOCKS = (
    _BLOCKS,
    replace(_BLOCKS, mask=True),
    replace(_BLOCKS, block_mask=True),
    replace(_BLOCKS, block_mask=True, mask=True, warps_m=2),
)

_MASK = KernelKey("mask", "float32", warps_m=1, block_q=32, block_k=32)
MASK = (
    _MASK,
    replace(_MASK, mask=True, dropout=True),
    replace(_MASK, dtype="float64", block_mask=True, dropout=True),
    replace(_MASK, dtype="bfloat16", mask=True, block_mask=True),
)

PARAMS = (KernelKey("params", "float32"),)
PHILOX = (KernelKey("philox", "float32", warps_m=1, dropout=True),)

_SCORES = KernelKey("scores", "float32")
SCORES = (
    replace(_SCORES, fold=True),
    replace(_SCORES, dtype="float64"),
    replace(_SCORES, softcap=True),
    replace(_SCORES, dtype="bfloat16", softcap=True, alibi=True),
    replace(_SCORES, dtype="float64", softcap=True, alibi=True, bias="float64"),
    replace(_SCORES, alibi=True, bias="float32"),
    replace(_SCORES, softcap=True, alibi=True, bias="float16"),
    replace(_SCORES, dtype="float16", bias="bfloat16"),
    replace(_SCORES, bias="float64"),
)

_SOFTMAX = KernelKey("softmax", "float32", block_q=32, block_k=48, warps_m=1)
SOFTMAX = (_SOFTMAX, replace(_SOFTMAX, dtype="float64"))

# Rows of 80 elements need a second run of 128 bytes, or leave the last one half empty.
_COLUMNS = {"float16": 80, "bfloat16": 80, "float32": 80, "float64": 48}
TILE = tuple(
    KernelKey("tile", dtype, _COLUMNS[dtype], 64, block_q=64, block_k=48, warps_m=1)
    for dtype in DTYPES
)
COPIES = tuple(
    replace(key, warps_m=4, vector=vector)
    for key in TILE
    for vector in (2, 4, 8, 16)
    if vector >= SIZES[key.dtype]
)

TYPES = tuple(KernelKey("types", dtype) for dtype in DTYPES)

KEYS = (*BLOCKS, *MASK, *PARAMS, *PHILOX, *SCORES, *SOFTMAX, *TILE, *COPIES, *TYPES)


def name_of(key: KernelKey) -> str:
    """Name a key by what tells it from the others of its probe: the id of a test."""
    options = [name for name in ("softcap", "alibi", "mask", "block_mask", "dropout", "fold")]
    used = [name for name in options if getattr(key, name)]
    bias = [f"bias_{key.bias}"] if key.bias else []
    return "-".join([key.kernel, key.dtype, f"{key.vector}x{key.threads}", *used, *bias])
