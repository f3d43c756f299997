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


FAR = (1 << 40) + (1 << 30)  # beyond all pages, also of its lower 32 bits


def paged(
    x: Array, lengths: Any, page: int, spare: float = np.nan, far: int = FAR
) -> tuple[Array, Array]:
    """Lay out keys (B, H, N, D) in pages of a random order.

    Rows past the lengths hold ``spare``, and entries of the table that are not read -1 or ``far``.
    """
    rng = np.random.default_rng(page)
    width = -(-x.shape[2] // page)
    table = rng.permutation(len(x) * width + 2)[: len(x) * width].reshape(len(x), width)
    pages = np.full((len(x) * width + 2, x.shape[1], page, x.shape[3]), spare, x.dtype)
    for b, n in np.ndindex(table.shape):
        kept = max(0, min(page, int(lengths[b]) - n * page))
        pages[table[b, n], :, :kept] = x[b, :, n * page : n * page + kept]
    for b, length in enumerate(lengths):
        table[b, -(-int(length) // page) :] = rng.choice([-1, far])
    return pages, table


def relative_error(actual: Array, expected: Array) -> float:
    """Return the norm of the difference divided by the norm of the expected array."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
