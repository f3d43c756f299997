"""Quantisation of new keys and values to 8 bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.dtypes import FLOAT8_E4M3FN, INT8

Array = NDArray[Any]

LARGEST = {INT8: np.float32(127), FLOAT8_E4M3FN: np.float32(448)}
"""Largest number that is stored, by dtype; -128 never is."""


def fitting_descale(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return the descale of each row at which its largest element is the largest that is stored.

    A row of zeros has 0. A row with an infinity has NaN, and so has a row with a NaN in int8, which
    has none. NaN of float8_e4m3fn are stored as they are.
    """
    sizes = np.abs(x.astype(np.float32))
    largest = np.maximum if dtype == INT8 else np.fmax
    with np.errstate(all="ignore"):
        amax = largest.reduce(sizes, axis=-1, initial=0)
        return np.asarray(np.where(np.isfinite(amax), amax / LARGEST[dtype], np.nan), np.float32)


def quantised(x: Array, descale: Array, dtype: np.dtype[Any]) -> Array:
    """Round ``x / descale`` to the nearest number of 8 bits, ties to even, in float32.

    Larger numbers, and infinities, become the largest that is stored. A descale of 0 stores 0. NaN
    is stored as 0 in int8.
    """
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        stored = x / descale[..., np.newaxis]
        np.copyto(stored, 0, where=(descale == 0)[..., np.newaxis] & np.isfinite(x))
        np.clip(stored, -LARGEST[dtype], LARGEST[dtype], out=stored)
        if dtype == INT8:
            stored = np.nan_to_num(np.rint(stored, out=stored), copy=False)
        return stored.astype(dtype)
