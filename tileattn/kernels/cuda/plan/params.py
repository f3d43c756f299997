"""The block of parameters that every kernel takes by value: counterpart of ``src/params.cuh``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tileattn.call.problem import Problem
from tileattn.call.sequences import FAR
from tileattn.kernels.cuda.families.context import folds_scale, padded_rows
from tileattn.kernels.cuda.families.split import FEW_ROWS, MOST_ROWS, WHOLE, split_count
from tileattn.kernels.cuda.plan.layout import INTEGERS, ArrayLayout, CallLayout
from tileattn.kernels.cuda.plan.layout import ROWS as ROW_ARRAYS

# Strides, in elements: of rows, and of what is broadcast to (B, Hq, Nq, Nk).
ROWS = np.dtype([(axis, np.int64) for axis in ("b", "h", "n")])
PAIRS = np.dtype([(axis, np.int64) for axis in ("b", "h", "i", "j")])

POINTERS = (
    *("q", "k", "v", "out", "lse"),
    *("kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "block_table"),
    *("alibi_slopes", "sinks"),
    *(
        "tile_counter",
        "block_order",
        "next_tiles",
        "lockstep_counters",
        "partial_out",
        "partial_sums",
    ),
    *("dout", "dlse", "delta", "lse_log2", "row_max"),
    *("dq", "dk", "dv", "dq_accum", "head_flags", "row_counter", "dq_semaphore", "dq_counter"),
    *("bias", "dbias", "mask", "dsinks", "block_kinds", "block_bits"),
    *("tile_kinds", "tile_ranks", "tile_list", "assignment", "origin"),
)
"""Arrays, in the order of their addresses: a short call writes no more than it must."""

# Where nobody on the host knows the lengths: all keys, and the last query is aligned with the last
# key.
_OF_DEVICE = {"length": FAR, "offset": -(1 << 62)}

_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dlse")
_PAIRS = ("bias", "dbias", "mask", "block_kinds", "tile_kinds", "tile_list")
_SIZES = (
    *("alibi_slopes_b", "B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv", "group", "rows"),
    *("single_heads", "head_groups", "swizzle_rows", "swizzle_heads", "in_order"),
    *("last_keys_first", "run_keys", "stagger", "inverse_stagger", "lockstep_steps"),
    *("bias_B", "bias_H", "bias_Nq", "bias_Nk"),
    *("mask_block_q", "mask_block_k", "kinds_tile_q", "kinds_tile_k"),
    *("length", "offset", "left", "right", "entries"),
    *("pages_total", "page", "table_width", "split_keys", "splits", "max_split_rows"),
    *(f"{name}_bytes" for name in INTEGERS),
)

PARAMS = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [(f"{name}_at", ROWS) for name in _ROWS]
    + [(f"{name}_at", PAIRS) for name in _PAIRS]
    + [(name, np.int64) for name in _SIZES]
    + [(name, np.float64) for name in ("scale", "softcap", "dropout_scale", "softmax_scale")]
    + [(name, np.uint64) for name in ("seed", "threshold")]
)
"""Every field has eight bytes, so that neither side has gaps."""


def template(values: Mapping[str, Any], aux: Mapping[str, ArrayLayout] | None = None) -> bytes:
    """Write the block with null pointers; fields that are absent are zero.

    ``aux`` are the arrays of the caller's own functions, by name, which come last: of each there
    are its address, its sizes, and its strides in bytes. One without axes has one of each, unused.
    """
    block = np.zeros((), PARAMS)
    for name, value in values.items():
        block[name] = value
    cells = [(0, *(x.shape or (0,)), *(x.strides or (0,))) for x in (aux or {}).values()]
    return b"".join([block.tobytes(), *(np.array(each, np.int64).tobytes() for each in cells)])


def slots(aux: Mapping[str, ArrayLayout]) -> dict[str, int]:
    """Give the places of all addresses in the block, counted in cells of eight bytes."""
    places = {name: slot for slot, name in enumerate(POINTERS)}
    at = PARAMS.itemsize // 8
    for name, x in aux.items():
        places[name] = at
        at += 1 + 2 * max(1, len(x.shape))
    return places


def aux_name(n: int) -> str:
    """Name an array of the caller's own functions, as messages do."""
    return f"aux[{n}]"


def fields(
    problem: Problem,
    layout: CallLayout,
    arrays: Mapping[str, ArrayLayout],
    schedule: Mapping[str, int],
) -> dict[str, Any]:
    """Fill in the fields that are not zero by nature, but for the addresses.

    ``layout`` is of the caller's arrays, ``arrays`` of what kernels read and write; ``schedule`` is
    one's fields.
    """
    values = _problem_fields(problem) | dict(schedule)
    for name, x in arrays.items():
        if name in ROW_ARRAYS or name == "dlse":
            values[f"{name}_at"] = x.elements[:3]
        elif name in _PAIRS:
            values[f"{name}_at"] = x.elements
        elif name in INTEGERS:
            values[f"{name}_bytes"] = x.itemsize
    for name, array in (("length", "kv_lengths"), ("offset", "q_offset")):
        each = getattr(layout, array)
        if each is None and array not in arrays:
            values[name] = _OF_DEVICE[name]
        elif each is not None and len(set(each)) <= 1:
            values[name] = each[0] if each else 0
    if "alibi_slopes" in arrays:
        heads = arrays["alibi_slopes"].shape
        values["alibi_slopes_b"] = heads[1] if heads[0] > 1 else 0
    if "bias" in arrays:
        sizes = zip(("B", "H", "Nq", "Nk"), arrays["bias"].shape, strict=True)
        values |= {f"bias_{axis}": n for axis, n in sizes}
    if layout.block_mask is not None:
        block_q, block_k = layout.block_mask.block_size
        values |= {"mask_block_q": block_q, "mask_block_k": block_k}
    return values


def split_fields(
    problem: Problem, arrays: Mapping[str, ArrayLayout], split_keys: int, *, takes_all: bool
) -> dict[str, int]:
    """Fill in the keys of a split, 0 if keys are not split, and the pages.

    ``takes_all`` is true if packed sequences of many rows are split, too.
    """
    keys = split_keys or WHOLE
    values = {
        "split_keys": keys,
        "splits": split_count(problem, keys),
        "max_split_rows": MOST_ROWS if takes_all else FEW_ROWS,
    }
    table, k = arrays.get("block_table"), arrays["k"]
    if problem.page is not None and table is not None:
        values |= {"pages_total": k.shape[0], "page": problem.page, "table_width": table.shape[1]}
    return values


def _problem_fields(P: Problem) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in P.window)
    return {
        **{name: getattr(P, name) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv")},
        "group": P.group,
        "rows": padded_rows(P),
        "entries": P.entries,
        "left": left,
        "right": right,
        "scale": P.scale,
        "softcap": _softcap(P),
        "softmax_scale": P.scale if folds_scale(P) else 1.0,
        "dropout_scale": 1.0 / (1.0 - P.dropout_p),
        "seed": P.seed,
        "threshold": int(P.dropout_p * 2**32),
    }


def _softcap(P: Problem) -> float:
    """Clamp the softcap to what kernels can divide by: no score tells it from 0, or from larger."""
    farthest = 2.0 ** (np.finfo(P.accum_dtype).maxexp - 28)
    return min(max(P.softcap, 1 / farthest), farthest) if P.softcap else 0.0
