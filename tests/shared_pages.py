"""Caches in pages: sequences share their first pages. The same keys also without pages."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.dtypes import CACHE_DTYPES, INT8

Array = NDArray[Any]


class SharedCache(NamedTuple):
    """Queries, keys and values.

    Parameters
    ----------
    q, k, v : array
        One batch entry for each sequence.
    dense : dict
        Options for k and v: lengths and descales.
    k_pages, v_pages : array
        The same in pages. Unused rows are poisoned.
    paged : dict
        Options for the pages: lengths, block table and descales. Unused entries of the table are
        wrong.
    shared_lengths : list of int
        Keys that the sequences of each group share.
    """

    q: Array
    k: Array
    v: Array
    dense: dict[str, Any]
    k_pages: Array
    v_pages: Array
    paged: dict[str, Any]
    shared_lengths: list[int]


def shared_cache(
    rng: np.random.Generator,
    shared_pages: list[int],
    own: list[int],
    page: int,
    heads: tuple[int, int] = (4, 2),
    Nq: int = 1,
    dims: tuple[int, int] = (24, 20),
    dtype: Any = np.float32,
    kv_dtype: Any = None,
    more_columns: int = 0,
) -> SharedCache:
    """Draw a cache; ``own`` has the keys of each sequence after the shared ones."""
    (Hq, Hkv), B = heads, len(own)
    R = B // len(shared_pages)
    starts = [page * n for n in shared_pages]
    lengths = np.array([starts[b // R] + n for b, n in enumerate(own)])
    longest, kv_dtype = int(lengths.max()), np.dtype(dtype if kv_dtype is None else kv_dtype)
    q = rng.normal(size=(B, Hq, Nq, dims[0])).astype(dtype)
    k, v = (drawn(rng, (B, Hkv, longest, n), kv_dtype) for n in dims)
    descales = {n: rng.uniform(0.001, 0.02, k.shape[:-1]).astype(np.float32) for n in DESCALES}
    for x in (k, v, *descales.values()):
        for b in range(B):
            first = b - b % R
            x[b, :, : starts[b // R]] = x[first, :, : starts[b // R]]
    columns = -(-longest // page) + more_columns
    pages = B * columns + 2
    table = rng.permutation(pages)[: B * columns].reshape(B, columns)
    for b in range(B):
        table[b, : shared_pages[b // R]] = table[b - b % R, : shared_pages[b // R]]

    def moved(x: Array) -> Array:
        wrong = -128 if x.dtype == INT8 else np.nan
        found = np.full((pages, Hkv, page, *x.shape[3:]), wrong, x.dtype)
        for b, length in enumerate(lengths):
            for j in range(length):
                found[table[b, j // page], :, j % page] = x[b, :, j]
        return found

    in_pages = moved(k), moved(v)
    dense: dict[str, Any] = {"kv_lengths": lengths}
    paged: dict[str, Any] = {"kv_lengths": lengths}
    if kv_dtype in CACHE_DTYPES:
        dense |= descales
        paged |= {n: moved(x) for n, x in descales.items()}
    for b, length in enumerate(lengths):
        table[b, -(-length // page) :] = rng.choice([-1, pages, 1 << 30])
    return SharedCache(q, k, v, dense, *in_pages, {"block_table": table} | paged, starts)


DESCALES = "k_descale", "v_descale"


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Draw normal numbers, or all numbers of an 8-bit type but NaN."""
    if dtype == INT8:
        return rng.integers(-127, 128, shape).astype(INT8)
    if dtype in CACHE_DTYPES:
        bits = rng.integers(0, 256, shape).astype(np.uint8)
        found: Array = (bits - (bits & 0x7F == 0x7F)).view(dtype)
        return found
    return np.asarray(rng.normal(size=shape).astype(dtype))
