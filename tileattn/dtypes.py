"""One record for each element type of q, k, v, out and floating options."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class ElementType(NamedTuple):
    """What the package knows about an element type."""

    dtype: np.dtype[Any]  # CUDA sources use its name
    accum_dtype: np.dtype[Any]  # of sums and lse
    tensor_map: int | None = None  # CUtensorMapDataType of cuda.h; None if no kernel uses it


FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
FLOAT8_E4M3FN, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)

_TYPES = {
    one.dtype: one
    for one in (
        ElementType(FLOAT16, FLOAT32, 6),
        ElementType(BFLOAT16, FLOAT32, 9),
        ElementType(FLOAT32, FLOAT32),
        ElementType(FLOAT64, FLOAT64),
    )
}

DTYPES = tuple(_TYPES)
"""All of them, 16 bits first."""

NAMED = {dtype.name: dtype for dtype in DTYPES}
"""All of them, by name."""


CACHE_DTYPES = (FLOAT8_E4M3FN, INT8)
"""Dtypes of quantised keys and values, which have descales."""

QUERY_DTYPES = (FLOAT16, BFLOAT16, FLOAT32)
"""Dtypes of the queries and outputs of a call with quantised keys and values."""


def one_of(dtypes: Sequence[np.dtype[Any]]) -> str:
    """Write down some dtypes: a, b or c."""
    *first, last = (dtype.name for dtype in dtypes)
    return f"{', '.join(first)} or {last}" if first else last


def accum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which sums over elements of this type are accumulated."""
    return _TYPES[dtype].accum_dtype


def tensor_map_type(name: str) -> int:
    """Return the ``CUtensorMapDataType`` of a type, by its name."""
    code = _TYPES[NAMED[name]].tensor_map
    if code is None:
        raise TypeError(f"{name} has no tensor map; the dtype must be float16 or bfloat16")
    return code
