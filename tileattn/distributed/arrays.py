"""Arrays of NumPy's and of CuPy's: what differs between them for parts of a call."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def is_on_gpu(x: Any) -> bool:
    """Whether an array is one of CuPy's, found without importing it."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def library(x: Any) -> Any:
    """Give the library of an array: its functions have the names of NumPy's."""
    return sys.modules["cupy"] if is_on_gpu(x) else np


def add(total: Any, part: Any, rows: slice) -> None:
    """Add a part to some rows of a sum with four axes, contiguous and in the dtype of the sum."""
    if is_on_gpu(total):
        from tileattn.backends.cupy.partial_rows import add_rows

        add_rows(total, part, rows)
    else:
        total[..., rows, :] += part


def add_narrow(total: Any, part: Any) -> None:
    """Add a part of any shape, in the dtype of the sum."""
    total += part.astype(total.dtype, copy=False)
