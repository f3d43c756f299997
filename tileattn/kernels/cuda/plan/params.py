"""The block of parameters that every kernel takes by value: counterpart of ``src/params.cuh``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tileattn.call.problem import Problem
from tileattn.call.sequences import FAR
from tileattn.expressions.parameters import cells_of, kernel_cells
from tileattn.kernels.cuda.families.context import folds_scale
from tileattn.kernels.cuda.families.grid import padded_rows, split_count
from tileattn.kernels.cuda.plan.layout import INTEGERS, ArrayLayout, CallLayout
from tileattn.kernels.cuda.plan.layout import ROWS as ROW_ARRAYS

# Strides, in elements: of rows, and of arrays that broadcast to (B, Hq, Nq, Nk).
ROWS = np.dtype([(axis, np.int64) for axis in ("b", "h", "n")])
PAIRS = np.dtype([(axis, np.int64) for axis in ("b", "h", "i", "j")])

POINTERS = (
    *("q", "k", "v", "out", "lse"),
    *("kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "block_table"),
    *("alibi_slopes", "sinks"),
    *("tile_counter", "block_order", "next_tiles", "lockstep_counters"),
    *("partial_out", "partial_sums"),
    *("dout", "dlse", "delta", "lse_log2", "row_max"),
    *("dq", "dk", "dv", "dq_accum", "head_flags", "row_counter", "dq_semaphore", "dq_counter"),
    *("bias", "dbias", "mask", "dsinks", "block_kinds", "block_bits"),
    *("tile_kinds", "tile_ranks", "tile_list", "assignment", "origin"),
)
"""Arrays, in the order of their addresses: a short call writes only the first ones."""

_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dlse")
_PAIRS = ("bias", "dbias", "mask", "block_kinds", "tile_kinds", "tile_list")

SECTIONS: dict[str, list[tuple[str, Any]]] = {
    # Addresses: `slots` says where a launch writes them.
    "arrays": [(name, np.uint64) for name in POINTERS],
    # Numbers, from the layouts of the arrays.
    "strides": [
        *((f"{name}_at", ROWS) for name in _ROWS),
        *((f"{name}_at", PAIRS) for name in _PAIRS),
        ("alibi_slopes_b", np.int64),
    ],
    # From the problem; head dimensions and heads of a group follow from the kind.
    "sizes": [
        (name, np.int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv", "group", "rows")
    ],
    # Numbers, from the scheduler.
    "schedule": [
        (name, np.int64)
        for name in (
            *("single_heads", "head_groups", "swizzle_rows", "swizzle_heads", "in_order"),
            *("last_keys_first", "run_keys", "stagger", "inverse_stagger", "lockstep_steps"),
        )
    ],
    # Numbers, from the layouts; the tile of tile_kinds is the kernel's.
    "masks": [
        (name, np.int64)
        for name in (
            *("bias_B", "bias_H", "bias_Nq", "bias_Nk"),
            *("mask_block_q", "mask_block_k", "kinds_tile_q", "kinds_tile_k"),
        )
    ],
    # Numbers, from the problem and from lengths and offsets that the host knows.
    "window": [(name, np.int64) for name in ("length", "offset", "left", "right", "entries")],
    # Numbers; keys of a split follow from the kind.
    "splits": [
        (name, np.int64)
        for name in (
            *("pages_total", "page", "table_width"),
            *("split_keys", "splits", "max_split_rows"),
        )
    ],
    # Kind: the dtypes of the caller's integers.
    "integers": [(f"{name}_bytes", np.int64) for name in INTEGERS],
    # Numbers, from the problem.
    "scalars": [
        *((name, np.float64) for name in ("scale", "softcap", "dropout_scale", "softmax_scale")),
        *((name, np.uint64) for name in ("seed", "threshold")),
    ],
}
"""The sections of ``src/params.cuh`` in their order, each with its fields and where they come from.

Every field has eight bytes, so that neither side needs padding.
"""

PARAMS = np.dtype([field for section in SECTIONS.values() for field in section])

# Lengths known only on the device: all keys exist, and the last query is aligned with the last key.
_ON_DEVICE = {"length": FAR, "offset": -(1 << 62)}


def template(
    values: Mapping[str, Any],
    aux: Mapping[str, ArrayLayout] | None = None,
    cells: Sequence[int] = (),
) -> bytes:
    """Write the block with null addresses; fields that are absent are zero.

    The values that the caller's own functions read follow the block: ``cells``, then the arrays of
    ``aux``, by name. Of an array these are its address, its sizes, and its strides in bytes. An
    array without axes has one size and one stride, both unused.
    """
    block = np.zeros((), PARAMS)
    for name, value in values.items():
        block[name] = value
    arrays = [(0, *(x.shape or (0,)), *(x.strides or (0,))) for x in (aux or {}).values()]
    parts = (np.array(each, np.int64).tobytes() for each in (cells, *arrays))
    return b"".join([block.tobytes(), *parts])


def slots(aux: Mapping[str, ArrayLayout], cells: int = 0) -> dict[str, int]:
    """Return the index of each address in the block, counted in cells of eight bytes.

    ``cells`` is the number of those before the arrays of ``aux``.
    """
    places = {name: slot for slot, name in enumerate(POINTERS)}
    at = PARAMS.itemsize // 8 + cells
    for name, x in aux.items():
        places[name] = at
        at += 1 + 2 * max(1, len(x.shape))
    return places


def aux_name(n: int) -> str:
    """Name an array of the caller's own functions, as messages do."""
    return f"aux[{n}]"


def number_fields(
    problem: Problem,
    layout: CallLayout,
    arrays: Mapping[str, ArrayLayout],
    schedule: Mapping[str, int],
) -> dict[str, Any]:
    """Fill in what the numbers of a call decide, except the addresses.

    ``layout`` describes the caller's arrays, ``arrays`` the arrays that kernels read and write;
    ``schedule`` has the fields of that section.
    """
    return (
        _problem_fields(problem)
        | dict(schedule)
        | _stride_fields(arrays)
        | _mask_fields(layout, arrays)
        | _length_fields(layout, arrays)
    )


def constant_cells(P: Problem) -> tuple[int, ...]:
    """Return the cells that the caller's own functions read."""
    return cells_of(kernel_cells(P.score_mod, P.mask_mod), P.constants)


def _problem_fields(P: Problem) -> dict[str, Any]:
    """Fill in ``sizes`` and ``scalars``, and the window."""
    left, right = (-1 if side is None else side for side in P.window)
    return {
        **{name: getattr(P, name) for name in ("B", "Hq", "Hkv", "Nq", "Nk")},
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


def _stride_fields(arrays: Mapping[str, ArrayLayout]) -> dict[str, Any]:
    """Fill in ``strides``."""
    values: dict[str, Any] = {}
    for name, x in arrays.items():
        if name in ROW_ARRAYS or name == "dlse":
            values[f"{name}_at"] = x.elements[:3]
        elif name in _PAIRS:
            values[f"{name}_at"] = x.elements
    if "alibi_slopes" in arrays:
        heads = arrays["alibi_slopes"].shape
        values["alibi_slopes_b"] = heads[1] if heads[0] > 1 else 0
    return values


def _mask_fields(layout: CallLayout, arrays: Mapping[str, ArrayLayout]) -> dict[str, int]:
    """Fill in the sizes of the bias and of the blocks of a mask."""
    values = {}
    if "bias" in arrays:
        sizes = zip(("B", "H", "Nq", "Nk"), arrays["bias"].shape, strict=True)
        values = {f"bias_{axis}": n for axis, n in sizes}
    if layout.block_mask is not None:
        block_q, block_k = layout.block_mask.block_size
        values |= {"mask_block_q": block_q, "mask_block_k": block_k}
    return values


def _length_fields(layout: CallLayout, arrays: Mapping[str, ArrayLayout]) -> dict[str, int]:
    """Fill in the length and the offset, if all sequences have the same."""
    values = {}
    for name, array in (("length", "kv_lengths"), ("offset", "q_offset")):
        each = getattr(layout, array)
        if each is None and array not in arrays:
            values[name] = _ON_DEVICE[name]
        elif each is not None and len(set(each)) <= 1:
            values[name] = each[0] if each else 0
    return values


def split_fields(
    problem: Problem, arrays: Mapping[str, ArrayLayout], kind: Mapping[str, int]
) -> dict[str, int]:
    """Fill in the number of splits and of pages; ``kind`` has the fields of the kind."""
    values = {}
    if "split_keys" in kind:
        values["splits"] = split_count(problem, kind["split_keys"])
    if "page" in kind:
        values["pages_total"] = arrays["k"].shape[0]
        values["table_width"] = arrays["block_table"].shape[1]
    return values


def _softcap(P: Problem) -> float:
    """Clamp the softcap to what kernels can divide by, beyond which no score changes."""
    farthest = 2.0 ** (np.finfo(P.accum_dtype).maxexp - 28)
    return min(max(P.softcap, 1 / farthest), farthest) if P.softcap else 0.0
