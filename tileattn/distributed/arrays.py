"""Operations that differ between NumPy and CuPy arrays."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def is_on_gpu(x: Any) -> bool:
    """Return True for a CuPy array, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def library(x: Any) -> Any:
    """Return the library of an array, NumPy or CuPy."""
    return sys.modules["cupy"] if is_on_gpu(x) else np


def add(total: Any, part: Any, rows: slice) -> None:
    """Add a contiguous part of the same dtype to some rows of a sum with four axes."""
    if is_on_gpu(total):
        from tileattn.backends.cupy.partial_rows import add_rows

        add_rows(total, part, rows)
    else:
        total[..., rows, :] += part


def add_narrow(total: Any, part: Any) -> None:
    """Add a part of any shape; convert it to the dtype of the sum."""
    total += part.astype(total.dtype, copy=False)
