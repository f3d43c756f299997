"""The parameter block of a kernel: 64-bit fields, packed here and read by the kernels."""

import itertools
import struct
from typing import Any, NamedTuple

from tileattn.call.options import OPTIONS, options_with

_OPTIONS = options_with(value="array", lowered=False)
_INTEGERS = options_with(value="integers", lowered=False)

ARRAYS = {
    "q": "bhi", "k": "bhj", "v": "bhj", "out": "bhi", "lse": "bhi",
    **dict.fromkeys(_INTEGERS, ""), "block_table": "bj",
    "dout": "bhi", "dlse": "bhi", "dq": "bhi", "dk": "bhj", "dv": "bhj", "dbias": "bhij",
    **{name: OPTIONS[name].axes for name in _OPTIONS},
    "row_max": "bhi", "log_l": "bhi", "delta": "bhi", "partials": "nsr", "ended": "", "aux": "",
    "block_kinds": "bhij", "block_bits": "nij", "semaphore": "", "unusual": "bh",
    "q_t": "", "v_t": "", "dout_t": "",
    "dq_accum": "bhi", "dq_high": "bhi", "dq_low": "bhi", "dq_section": "bhn",
}  # fmt: skip
"""Axes of each array that have a stride, in bytes, in the block.

The block starts with the arrays of every forward pass, lengths and offsets last.
"""

_STRIDES = {name: [f"{name}_{axis}" for axis in axes] for name, axes in ARRAYS.items()}

BF16_ARRAYS = {
    "q": ("Hq", "Nq", "D"), "k": ("Hkv", "Nk", "D"), "v": ("Hkv", "Nk", "Dv"),
    "dout": ("Hq", "Nq", "Dv"),
}  # fmt: skip
"""Heads, length and columns of each operand of the bfloat16 matmuls."""

BF16_TRANSPOSES = {"forward": ("v",), "backward": ("q", "dout")}
"""Operands that each pass reads by columns."""


class Layout(NamedTuple):
    """The memory layout of the sequences."""

    packed: bool = False  # sequences are concatenated, not padded to batch entries
    paged: bool = False  # keys and values are in pages


BATCHED = Layout()

BIAS_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Dtypes by the number in the field ``bias_dtype``."""

DBIAS_OF_TILES, DBIAS_OF_ROWS, DBIAS_OF_KEYS = 1, 2, 3
"""Values of ``dbias_kind``: one element per pair, a sum over keys, or a sum over queries."""

UNKNOWN, FULL, EMPTY = -3, -2, -1
"""Kinds in ``block_kinds``: a function decides about the pairs, all are visible, none is.

Other numbers count the partial blocks, whose pairs are in ``block_bits``.
"""

FLOATS = ("scale", "scale_power", "scale_rest", "softcap", "dropout_scale")
INTEGERS = (
    "B", "Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv", "left", "right", "tasks", "quota", "blocks",
    "seed_low", "seed_high", "threshold", "bias_dtype", "dbias_kind", "sharing", "sharing_step",
    "group_step", "chains",
    "block_q", "block_k", "dq_columns", "splits", "split_keys", "few", "page",
)  # fmt: skip

_NAMES = (*ARRAYS, *itertools.chain(*_STRIDES.values()), *INTEGERS, *FLOATS)
FIELDS = {name: 8 * n for n, name in enumerate(_NAMES)}
"""Byte offset of every field: addresses (0 for an absent array), strides, numbers."""

COUNTER = (8 * len(FIELDS) // 64 + 2) * 64
"""Byte offset of the task counter, on a cache line of its own."""

_PACK = struct.Struct(f"<{len(FIELDS) - len(FLOATS)}q{len(FLOATS)}d")
_DEFAULTS = dict.fromkeys(FIELDS, 0)


def template(values: dict[str, Any]) -> bytes:
    """Pack a block with null addresses and a task counter of 0; missing fields are 0."""
    return _PACK.pack(*(_DEFAULTS | values).values()).ljust(COUNTER + 8, b"\0")


def strides_of(name: str, x: Any) -> dict[str, int]:
    """Return the stride fields of an array; an axis of length 1 has the stride 0."""
    steps = (0 if n == 1 else step for n, step in zip(x.shape, x.strides, strict=True))
    return dict(zip(_STRIDES[name], steps, strict=False))
