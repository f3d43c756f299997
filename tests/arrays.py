"""The arrays that most tests call attention with."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Given = tuple[Array, Array, Array, Array]
"""q, k, v and dout."""
Sizes = tuple[int, ...]
"""B, Hq, Hkv, Nq, Nk, D and Dv."""


def normal(sizes: Sizes, dtype: Any = np.float32, seed: int = 0) -> Given:
    """Draw standard-normal q, k, v and dout."""
    B, Hq, Hkv, Nq, Nk, D, Dv = sizes
    rng = np.random.default_rng(seed)
    shapes = ((B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv), (B, Hq, Nq, Dv))
    q, k, v, dout = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return q, k, v, dout


def relative_error(actual: Array, expected: Array) -> float:
    """Give the norm of the difference over that of what is expected."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
