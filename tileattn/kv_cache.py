"""Caches of keys and values that grow in place."""

from typing import Any

import numpy as np

from tileattn.backends.buffers import ensure_writable
from tileattn.lengths import Paging, integers, offsets_of, paging
from tileattn.problem import check_dtype


def append_kv(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    kv_lengths: Any,
    block_table: Any = None,
    cu_seqlens: Any = None,
) -> Any:
    """Write new keys and values behind those of a cache, in place.

    Parameters
    ----------
    k_cache : array, shape (B, Hkv, capacity, D), or with pages (pages, Hkv, page, D)
        Keys; any strides.
    v_cache : array, shape (B, Hkv, capacity, Dv), or with pages (pages, Hkv, page, Dv)
        Values.
    k : array, shape (B, Hkv, N, D), or packed (Hkv, T, D)
        New keys, of the dtype of the cache.
    v : array, shape (B, Hkv, N, Dv), or packed (Hkv, T, Dv)
        New values.
    kv_lengths : int, array or sequence of int of shape (B,)
        Keys that each sequence has by now.
    block_table : array or sequence of int, shape (B, pages of a sequence), or None
        Key j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``.
    cu_seqlens : array or sequence of int, shape (B + 1,), or None
        Where the new tokens of each sequence start, if they are packed.

    Returns
    -------
    array of int64, shape (B,)
        The new lengths.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or a sequence would pass its capacity; the message names
        it, and nothing is written. Integers on a device are not looked at.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> k_cache, v_cache = np.zeros((2, 2, 1, 100, 8))
    >>> k, v = np.ones((2, 2, 1, 3, 8))
    >>> tileattn.append_kv(k_cache, v_cache, k, v, kv_lengths=[0, 40])
    array([ 3, 43])
    >>> k_cache[1, 0, 38:45, 0]
    array([0., 0., 1., 1., 1., 0., 0.])
    """
    _check_arrays(k_cache, v_cache, k, v, packed=cu_seqlens is not None)
    options = {"block_table": block_table, "kv_lengths": kv_lengths}
    pages = paging(options, k_cache)
    B = len(k_cache) if pages is None else len(pages.block_table)
    if cu_seqlens is None:
        if len(k) != B:
            raise ValueError(f"k has batch size {len(k)}; it must be that of the cache, {B}")
        starts = np.arange(B + 1) * k.shape[2]
    else:
        starts = offsets_of("cu_seqlens", cu_seqlens)
        if len(starts) != B + 1:
            raise ValueError(f"cu_seqlens has {len(starts)} entries; {B + 1} are accepted")
    given = {"k": k, "v": v}
    T = k.shape[-2] * (1 if cu_seqlens is not None else B)
    if isinstance(starts, np.ndarray) and starts[-1] != T:
        raise ValueError(
            f"cu_seqlens ends with {starts[-1]}; it must end with the number of tokens of k, {T}"
        )
    old = integers("kv_lengths", kv_lengths, B)
    if old is None:
        raise TypeError(f"kv_lengths is None; integers of shape ({B},) are accepted")
    new = old + (starts[1:] - starts[:-1])
    _check_room(old, new, k_cache.shape[2] if pages is None else pages.capacity)
    if pages is not None:
        pages.check(new)
    entry, row = _places(old, starts, T, pages)
    ensure_writable("k_cache", k_cache, {"v_cache": v_cache, **given})
    ensure_writable("v_cache", v_cache, given)
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache[entry, :, row] = x.swapaxes(-3, -2).reshape(T, x.shape[-3], x.shape[-1])
    return new


def _check_arrays(k_cache: Any, v_cache: Any, k: Any, v: Any, *, packed: bool) -> None:
    """Check dtypes and shapes against those of the cache of keys."""
    axes = 3 if packed else 4
    arrays = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    for name, x in arrays.items():
        check_dtype(name, x)
        if x.dtype != k_cache.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype}; it must be that of k_cache, {k_cache.dtype}"
            )
        cached = name.endswith("cache")
        if x.ndim != (4 if cached else axes):
            accepted = "(B, Hkv, N, D)" if cached or not packed else "(Hkv, T, D)"
            raise ValueError(f"{name} has shape {x.shape}; {accepted} is accepted")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache has shape {v_cache.shape}; but for the last axis it must be that of k_cache, "
            f"{k_cache.shape}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v has shape {v.shape}; but for the last axis it must be that of k, {k.shape}"
        )
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if (x.shape[-3], x.shape[-1]) != (cache.shape[1], cache.shape[3]):
            raise ValueError(
                f"{name} has {x.shape[-3]} heads of dimension {x.shape[-1]}; those of {name}_cache "
                f"are {cache.shape[1]} of {cache.shape[3]}"
            )


def _check_room(old: Any, new: Any, capacity: int) -> None:
    """Raise ValueError if lengths are negative or pass the capacity; the host looks at its own."""
    if isinstance(new, np.ndarray):
        for b in np.flatnonzero((old < 0) | (new > capacity)):
            raise ValueError(
                f"kv_lengths holds {old[b]} for sequence {b}, which would have {new[b]} keys; "
                f"lengths from 0 on are accepted, up to {capacity} keys"
            )


def _places(old: Any, starts: Any, T: int, pages: Paging | None) -> tuple[Any, Any]:
    """Say where each new token goes: batch entry or page, and row."""
    token = np.arange(T, like=starts)
    sequence = np.searchsorted(starts[1:], token, side="right")
    j = old[sequence] + token - starts[:-1][sequence]
    if pages is None:
        return sequence, j
    page, row = pages.block_table[sequence, j // pages.page], j % pages.page
    if isinstance(page, np.ndarray):
        places, counts = np.unique(page * pages.page + row, return_counts=True)
        for place in places[counts > 1]:
            raise ValueError(
                f"block_table gives row {place % pages.page} of page {place // pages.page} to more "
                "than one key that is written"
            )
    return page, row
