"""Packed sequences and pages in the oracle, by the equivalent dense call.

That call has a batch entry for each sequence, padded with zeros to the longest one. Padded keys are
past the lengths and padded queries are masked out, so that their probabilities and gradients are 0.
Packing the results drops them.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def dense_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the dense equivalent; options of a dense call are unchanged.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` stay as arrays, for padding and packing.
    """
    queries, keys = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if queries is None and keys is None:
        return options
    cu_seqlens_q = np.asarray(keys if queries is None else queries).astype(np.int64)
    cu_seqlens_k = np.asarray(queries if keys is None else keys).astype(np.int64)
    Nq, Nk = np.diff(cu_seqlens_q), np.diff(cu_seqlens_k)
    in_pages = options.get("block_table") is not None
    kv_lengths = _of_sequences(options.get("kv_lengths"), Nk)
    return options | {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": None if in_pages else cu_seqlens_k,
        "kv_lengths": kv_lengths,
        "q_offset": _of_sequences(options.get("q_offset"), kv_lengths - Nq),
        "mask": (np.arange(Nq.max(initial=0)) < Nq[:, np.newaxis])[:, np.newaxis, :, np.newaxis],
    }


def gathered(pages: Any, block_table: Any, kv_lengths: Any) -> Array:
    """Copy the keys of each sequence out of its pages; unused rows are 0."""
    pages, table = np.asarray(pages), np.asarray(block_table, np.int64)
    (B, n), (_, Hkv, page, D) = table.shape, pages.shape
    lengths = np.broadcast_to(np.asarray(kv_lengths, np.int64), B)
    used = np.arange(n) * page < lengths[:, np.newaxis]
    found = np.zeros((B, n, Hkv, page, D), pages.dtype)
    found[used] = pages[table[used]]
    return found.swapaxes(1, 2).reshape(B, Hkv, n * page, D)


def padded(x: Any, axes: int, cu_seqlens: Array | None = None, fill: float = 0) -> Array:
    """Pad packed sequences to batch entries: (S, H, longest, ...)."""
    whole = np.asarray(x)
    whole = whole.reshape((1,) * (axes - whole.ndim) + whole.shape)
    if cu_seqlens is None:
        return whole
    sizes = len(cu_seqlens) - 1, whole.shape[1], np.diff(cu_seqlens).max(initial=0)
    dense = np.full((*sizes, *whole.shape[3:]), fill, whole.dtype)
    for s, (start, stop) in enumerate(pairwise(cu_seqlens)):
        dense[s, :, : stop - start] = whole[0, :, start:stop]
    return dense


def packed(x: Array, cu_seqlens: Array | None = None) -> Array:
    """Concatenate the rows of all sequences, without the padding: (1, H, T, ...)."""
    if cu_seqlens is None:
        return x
    whole = np.empty((1, x.shape[1], cu_seqlens[-1], *x.shape[3:]), x.dtype)
    for s, (start, stop) in enumerate(pairwise(cu_seqlens)):
        whole[0, :, start:stop] = x[s, :, : stop - start]
    return whole


def _of_sequences(given: Any, default: Array) -> Array:
    """One integer for each sequence."""
    if given is None:
        return default
    return np.broadcast_to(np.asarray(given), default.shape).astype(np.int64)
