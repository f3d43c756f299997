"""The block of parameters that every kernel takes by value: counterpart of ``src/params.cuh``."""

import math
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np

from tileattn.call.options import DESCALES
from tileattn.call.problem import Problem
from tileattn.call.sequences import FAR
from tileattn.expressions.parameters import kernel_cells
from tileattn.kernels.cuda.families.context import folds_scale
from tileattn.kernels.cuda.families.grid import padded_rows, partial_rows, split_count
from tileattn.kernels.cuda.plan.layout import INTEGERS, ArrayLayout, CallLayout

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
    *("split_sums", "split_semaphores"),
    *("bias", "dbias", "dbias_sums", "mask", "dsinks", "block_kinds", "block_bits"),
    *("tile_kinds", "tile_ranks", "tile_list", "assignment", "origin"),
    *("k_descale", "v_descale"),
    *("q_planes", "k_planes", "v_planes", "dout_planes"),
    *("q_factors", "k_factors", "v_factors", "dout_factors"),
)
"""Arrays, in the order of their addresses: a short call writes only the first ones."""

_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dlse")
_PAIRS = ("bias", "dbias", "mask", "block_kinds", "tile_kinds", "tile_list")

# Strides that kernels read.
_AXES = dict.fromkeys((*_ROWS, *DESCALES), 3) | dict.fromkeys(_PAIRS, 4)

SECTIONS: dict[str, list[tuple[str, Any]]] = {
    # Addresses: `slots` says where a launch writes them.
    "arrays": [(name, np.uint64) for name in POINTERS],
    # Numbers, from the layouts of the arrays.
    "strides": [
        *((f"{name}_at", ROWS) for name in _ROWS),
        *((f"{name}_at", PAIRS) for name in _PAIRS),
        ("alibi_slopes_b", np.int64),
        *((f"{name}_at", ROWS) for name in DESCALES),
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
            *("last_keys_first", "run_keys", "stagger", "inverse_stagger"),
            *("head_splits", "split_heads", "query_splits", "lockstep_steps"),
        )
    ],
    # Numbers, from the layouts; the tile of tile_kinds is the kernel's.
    "masks": [
        (name, np.int64)
        for name in (
            *("bias_B", "bias_H", "bias_Nq", "bias_Nk", "dbias_copies"),
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
            *("split_keys", "splits", "piece_keys", "group_keys"),
            *("max_split_rows", "partial_rows"),
            *(f"{name}_rows" for name in DESCALES),
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

_SCALARS = [name for name, _ in SECTIONS["scalars"]]
PARAMS = np.dtype([field for section in SECTIONS.values() for field in section])

# The first cell of each field, and the format of the cells in the module struct.
CELLS = {name: field[1] // 8 for name, field in (PARAMS.fields or {}).items()}
_COUNT = PARAMS.itemsize // 8
_LETTERS = {np.float64: "d", np.int64: "q", np.uint64: "Q"}
_FORMAT = "".join(
    _LETTERS.get(kind) or "q" * len(kind.names)
    for fields in SECTIONS.values()
    for _, kind in fields
)
PACKED = Struct("<" + _FORMAT)
NUMBERS = Struct("<" + _FORMAT[len(POINTERS) :])  # all cells but the addresses

# Lengths known only on the device: all keys exist, and the last query is aligned with the last key.
ON_DEVICE = {"length": FAR, "offset": -(1 << 62)}


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
    block: list[Any] = [0] * _COUNT
    for name, value in values.items():
        at = CELLS[name]
        if type(value) is tuple:
            block[at : at + len(value)] = value
        else:
            block[at] = value
    packed = PACKED.pack(*block)
    if not (aux or cells):
        return packed
    arrays = [(0, *(x.shape or (0,)), *(x.strides or (0,))) for x in (aux or {}).values()]
    parts = (np.array(each, np.int64).tobytes() for each in (cells, *arrays))
    return b"".join([packed, *parts])


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
    P = problem
    left, right = P.window
    values: dict[str, Any] = {
        **{"B": P.B, "Hq": P.Hq, "Hkv": P.Hkv, "Nq": P.Nq, "Nk": P.Nk},
        "rows": padded_rows(P),
        "entries": P.entries,
        "left": -1 if left is None else left,
        "right": -1 if right is None else right,
        **dict(zip(_SCALARS, scalar_fields(P), strict=True)),
        **schedule,
    }
    for name, x in arrays.items():
        axes = _AXES.get(name)
        if axes is not None:
            values[f"{name}_at"] = x.elements[:axes]
    if P.enabled_options:
        values |= _option_fields(layout, arrays)
    for name, array, each in (
        ("length", "kv_lengths", layout.kv_lengths),
        ("offset", "q_offset", layout.q_offset),
    ):
        if each is None:
            if array not in arrays:
                values[name] = ON_DEVICE[name]
        elif not each or each.count(each[0]) == len(each):  # all sequences have the same
            values[name] = each[0] if each else 0
    return values


def constant_cells(P: Problem) -> tuple[int, ...]:
    """Return the cells that the caller's own functions read."""
    return kernel_cells(P.score_mod, P.mask_mod).cells(P.constants)


def _option_fields(layout: CallLayout, arrays: Mapping[str, ArrayLayout]) -> dict[str, int]:
    """Fill in the sizes of slopes and bias, and of the blocks of a mask."""
    values = {}
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
    problem: Problem, arrays: Mapping[str, ArrayLayout], kind: Mapping[str, int]
) -> dict[str, int]:
    """Fill in the number of splits and of pages; ``kind`` has the fields of the kind."""
    values = {}
    if "split_keys" in kind:
        values["splits"] = split_count(problem, kind["split_keys"])
        if problem.is_packed:
            values["partial_rows"] = partial_rows(problem)
    if "page" in kind:
        values["pages_total"] = arrays["k"].shape[0]
        values["table_width"] = arrays["block_table"].shape[1]
    return values


def scalar_fields(P: Problem) -> tuple[float, ...]:
    """Return the fields of the section ``scalars``."""
    return (
        *(P.scale, softcap_field(P), 1.0 / (1.0 - P.dropout_p)),
        *(P.scale if folds_scale(P) else 1.0, P.seed, math.floor(P.dropout_p * 2**32)),
    )


def softcap_field(P: Problem) -> float:
    """Clamp the softcap to what kernels can divide by, beyond which no score changes."""
    if not P.softcap:
        return 0.0
    farthest = 2.0 ** (int(np.finfo(P.accum_dtype).maxexp) - 28)
    return min(max(P.softcap, 1 / farthest), farthest)
