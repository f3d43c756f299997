"""The parameter block of a kernel: 64-bit fields, packed here and read by the kernels."""

import ctypes
import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tileattn.call.options import DESCALES, OPTIONS, options_with

_OPTIONS = options_with(value="array", lowered=False)
_INTEGERS = options_with(value="integers", lowered=False)

ARRAYS = {
    "q": "bhi", "k": "bhj", "v": "bhj", "out": "bhi", "lse": "bhi",
    "dout": "bhi", "log_l": "bhi", "delta": "bhi", "dq_accum": "bhi",
    "dq": "bhi", "dk": "bhj", "dv": "bhj", "dlse": "bhi",
    **dict.fromkeys(_INTEGERS, ""), "block_table": "bj",
    **{name: OPTIONS[name].axes for name in _OPTIONS}, **dict.fromkeys(DESCALES, "bhj"),
    "dbias": "bhij", "row_max": "bhi", "partials": "nsr", "ended": "", "aux": "",
    "block_kinds": "bhij", "block_bits": "nij", "semaphore": "", "unusual": "bh",
    "q_t": "", "v_t": "", "dout_t": "",
    "dq_high": "bhi", "dq_low": "bhi", "dq_section": "bhn",
}  # fmt: skip
"""Axes of each array that have a stride, in bytes, in the block.

The block starts with the rows of every forward pass, then of every backward pass.
"""

BF16_ARRAYS = {
    "q": ("Hq", "Nq", "D"), "k": ("Hkv", "Nk", "D"), "v": ("Hkv", "Nk", "Dv"),
    "dout": ("Hq", "Nq", "Dv"),
}  # fmt: skip
"""Heads, length and columns of each operand of the bfloat16 matmuls."""

BF16_TRANSPOSES = {"forward": ("v",), "backward": ("q", "dout")}
"""Operands that each pass reads by columns."""


class Layout(NamedTuple):
    """The memory layout of the sequences, and whether a module has code for all options."""

    packed: bool = False  # sequences are concatenated, not padded to batch entries
    paged: bool = False  # keys and values are in pages
    optional: bool = True  # False: without code for `OPTIONAL`, a third of all
    kv_dtype: str | None = None  # of quantised keys and values, which have descales
    paged_descales: tuple[str, ...] = ()  # descales that are in pages, as keys are


BATCHED = Layout()

OPTIONAL = {"mask", "block_kinds", "bias", "alibi_slopes", "softcap", "threshold", "sinks"}
"""Fields that are 0 without options that modify scores, mask pairs or drop probabilities."""

BIAS_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Dtypes by the number in the field ``bias_dtype``."""

DBIAS_OF_TILES, DBIAS_OF_ROWS, DBIAS_OF_KEYS = 1, 2, 3
"""Values of ``dbias_kind``: one element per pair, a sum over keys, or a sum over queries."""

UNKNOWN, FULL, EMPTY = -3, -2, -1
"""Kinds in ``block_kinds``: a function decides about the pairs, all are visible, none is.

Other numbers count the partial blocks, whose pairs are in ``block_bits``.
"""

SIZES = ("B", "Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv", "left", "right", "page")
"""Fields of the sizes of a problem."""

_RANDOM = ("threshold", "seed_high", "seed_low")
FLOATS = ("scale", "scale_power", "scale_rest", "softcap", "dropout_scale")
OF_PASS = (
    "tasks", "quota", "blocks", "few", "splits", "split_keys", "block_q", "block_k", "chains",
    "dq_columns", "bias_dtype", "dbias_kind", "sharing", "sharing_step", "group_step",
    "partials_n", "partials_s", "partials_r",
)  # fmt: skip
"""Fields that describe the tasks of a kernel."""

_STRIDES = {name: [f"{name}_{axis}" for axis in axes] for name, axes in ARRAYS.items()}
_OF_ARRAYS = (x for x in itertools.chain(*_STRIDES.values()) if x not in OF_PASS)
_NAMES = (*ARRAYS, *_OF_ARRAYS, *SIZES, *_RANDOM, *FLOATS, *OF_PASS)
FIELDS = {name: 8 * n for n, name in enumerate(_NAMES)}
"""Byte offset of every field: addresses (0 for an absent array), strides, numbers."""

WORDS = {name: n for n, name in enumerate(_NAMES)}
"""Place of every field, in words of 8 bytes."""

COUNTER = (8 * len(FIELDS) // 64 + 2) * 64
"""Byte offset of the task counter, on a cache line of its own."""

Block = ctypes.c_int64 * (COUNTER // 8 + 1)
"""The words of a block, its task counter included. A new one has null addresses and zeros."""

_NUMBERS = struct.Struct(f"<{len(SIZES + _RANDOM)}q{len(FLOATS)}d{len(OF_PASS)}q")
_ROWS = {name for name, axes in ARRAYS.items() if axes in ("bhi", "bhj")}.difference(DESCALES)
_STEPS = {
    name: (FIELDS[fields[0]], len(fields), struct.Struct(f"<{len(fields)}q").pack_into)
    for name, fields in _STRIDES.items()
    if fields
}
_FIRST_STEPS = [struct.Struct(f"<{3 * n}q").pack_into for n in range(14)]  # of the first rows
_put_numbers, _FIRST, _B = _NUMBERS.pack_into, FIELDS["q_b"], FIELDS["B"]


def put_numbers(
    block: Any, sizes: Sequence[int], scalars: Sequence[float], of_pass: Sequence[int]
) -> None:
    """Write the numbers of a problem and of a pass into a block, in the order of their fields."""
    _put_numbers(block, _B, *sizes, *scalars, *of_pass)


def put_strides(block: Any, arrays: Mapping[str, Any], packed: bool) -> None:
    """Write the strides of arrays into a block.

    A stride is 0 along an axis in which the array broadcasts, as rows of packed sequences do along
    the batch.
    """
    for name, x in arrays.items():
        if name in _STEPS:
            at, count, pack_into = _STEPS[name]
            steps = x.strides[:count]
            if packed or name not in _ROWS:
                steps = [0 if n == 1 else step for n, step in zip(x.shape, steps, strict=False)]
            pack_into(block, at, *steps)


def row_strides(rows: Sequence[Any], packed: bool) -> list[int]:
    """List the strides of the first arrays of a block, which are rows."""
    steps = [step for x in rows for step in x.strides[:3]]
    if packed:  # rows broadcast along the batch; pages do not
        steps[::3] = [0 if x.shape[0] == 1 else x.strides[0] for x in rows]
    return steps


def put_row_strides(block: Any, steps: Sequence[int]) -> None:
    """Write what `row_strides` lists into a block."""
    _FIRST_STEPS[len(steps) // 3](block, _FIRST, *steps)
