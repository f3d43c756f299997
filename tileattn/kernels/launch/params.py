"""The block of parameters that every kernel takes by value: twin of ``src/params.cuh``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

ROWS = np.dtype([(axis, np.int64) for axis in ("b", "h", "n")])
"""Strides, in elements, between batch entries, heads and rows."""

PAIRS = np.dtype([(axis, np.int64) for axis in ("b", "h", "i", "j")])
"""Strides, in elements, of what is broadcast to (B, Hq, Nq, Nk)."""

POINTERS = (
    *("q", "k", "v", "out", "lse", "dout", "dlse", "delta", "shift", "row_max"),
    *("dq", "dk", "dv", "dq_sum", "special", "claimed", "landed"),
    *("bias", "dbias", "mask", "slopes", "sinks", "dsinks"),
    *("lengths", "offsets", "kinds", "bits", "visits", "schedule"),
)
"""Arrays, in the order of their addresses."""

_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dlse")
_PAIRS = ("bias", "dbias", "mask", "kinds", "visits")
_SIZES = (
    *("slopes_b", "B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv", "group", "rows", "parts", "in_order"),
    *("bias_B", "bias_H", "bias_Nq", "bias_Nk", "mask_block_q", "mask_block_k"),
    *("length", "offset", "left", "right"),
)

PARAMS = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [(f"{name}_at", ROWS) for name in _ROWS]
    + [(f"{name}_at", PAIRS) for name in _PAIRS]
    + [(name, np.int64) for name in _SIZES]
    + [(name, np.float64) for name in ("scale", "softcap", "gain", "natural")]
    + [(name, np.uint64) for name in ("seed", "threshold")]
)
"""Every field has eight bytes, so that neither side has gaps."""


def template(values: Mapping[str, Any]) -> bytes:
    """Write everything but the addresses.

    Parameters
    ----------
    values : mapping
        Fields by name; those that are absent are zero.

    Returns
    -------
    bytes
        The block, with null pointers.
    """
    block = np.zeros((), PARAMS)
    for name, value in values.items():
        block[name] = value
    return block.tobytes()
