"""Dropout of the oracle: Philox as its paper writes it, once for each element."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def keep(
    shape: tuple[int, int, int, int], dropout_p: float, seed: int, origin: Any = None
) -> NDArray[np.bool_]:
    """Return the elements that dropout keeps, by one call of Philox for each element.

    An origin, of shape (B or 1, 4), is added to the indices.
    """
    if dropout_p == 0:
        return np.ones(shape, np.bool_)
    start = np.zeros((1, 4), np.uint64) if origin is None else np.asarray(origin, np.uint64)
    b, h, i, j = np.indices(shape, dtype=np.uint64) + start.T[:, :, None, None, None]
    sixteen, eight = np.uint64(16), np.uint64(8)
    counter = (j // sixteen * eight + j % eight, i // sixteen * eight + i % eight, h, b)
    words = philox(counter, seed)
    word = np.where(
        i // eight % 2 == 0,
        np.where(j // eight % 2 == 0, words[0], words[1]),
        np.where(j // eight % 2 == 0, words[2], words[3]),
    )
    return np.asarray(word >= np.uint64(math.floor(dropout_p * 2**32)))


def philox(counter: Sequence[Array], seed: int) -> tuple[Array, Array, Array, Array]:
    """Philox-4x32-10 as its paper writes it: ten rounds of a Feistel-like step and a new key."""
    W = np.uint64(2**32)
    c0, c1, c2, c3 = counter
    k0, k1 = seed % 2**32, seed // 2**32
    for _ in range(10):
        high0, low0 = np.divmod(c0 * np.uint64(0xD2511F53), W)
        high1, low1 = np.divmod(c2 * np.uint64(0xCD9E8D57), W)
        c0, c1 = high1 ^ c1 ^ np.uint64(k0), low1
        c2, c3 = high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3
