"""Caches of keys and values that grow in place."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tileattn.backends.buffers import ensure_writable
from tileattn.backends.registry import ensure_one_owner
from tileattn.call.descale import descale_arrays, descale_of_heads, is_of_tokens
from tileattn.call.parse import check_dtype
from tileattn.call.sequences import Paging, integers, offsets_of, paging, together
from tileattn.dtypes import CACHE_DTYPES, DTYPES, QUERY_DTYPES
from tileattn.messages import called, must_be
from tileattn.quantise import fitting_descale, quantised
from tileattn.rotary import check_tables, rope
from tileattn.validation import check_flags, require_array


def append_kv(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    kv_lengths: Any,
    block_table: Any = None,
    cu_seqlens: Any = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    k_descale: Any = None,
    v_descale: Any = None,
) -> Any:
    """Append new keys and values to a cache, in place.

    Parameters
    ----------
    k_cache : array, shape (B, Hkv, capacity, D), or with pages (pages, Hkv, page, D)
        Keys; any strides.
    v_cache : array, shape (B, Hkv, capacity, Dv), or with pages (pages, Hkv, page, Dv)
        Values.
    k : array, shape (B, Hkv, N, D), or packed (Hkv, T, D)
        New keys, of the dtype of the cache. Caches of float8_e4m3fn and int8 also take float16,
        bfloat16 and float32, and quantise them.
    v : array, shape (B, Hkv, N, Dv), or packed (Hkv, T, Dv)
        New values.
    kv_lengths : int, array or sequence of int of shape (B,)
        Number of keys in the cache for each sequence, without the new ones.
    block_table : array or sequence of int, shape (B, pages of a sequence), or None
        Key j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``.
    cu_seqlens : array or sequence of int, shape (B + 1,), or None
        Offsets of the new tokens of each sequence, if they are packed.
    rotary : (array, array) or None
        ``cos`` and ``sin`` of `rope`: each new key is rotated at its position in its sequence.
    interleaved : bool
        Which columns are a pair, as in `rope`.
    k_descale, v_descale : float or array of float32, or None
        Factors that dequantise the caches, as in ``forward``; required where new keys and values
        are quantised, and only there. Numbers, and arrays of shape (Hkv,) or (B, Hkv), are read.
        Arrays of shape ``k_cache.shape[:-1]`` have a number for each token and head, which is
        written.

    Returns
    -------
    array of int64, shape (B,)
        The new lengths; on the device where ``kv_lengths`` or ``cu_seqlens`` is.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or a sequence would pass its capacity; the message names
        it, and nothing is written. Integers on a device are not looked at: there a row that is past
        the capacity, or in a page that does not exist, is not written, and a position that the
        tables do not have takes their nearest row.

    Notes
    -----
    A page gets new keys from one sequence only. A page that sequences share, such as that of a
    common prefix, is full, or is copied before one of them grows.

    On a GPU one kernel does all of it.

    Caches of 8 bits store ``k / k_descale``, computed in float32 and rounded to the nearest number,
    ties to even. int8 holds -127 to 127 and float8_e4m3fn -448 to 448. Larger elements and
    infinities are stored as the largest number. A descale of 0 stores 0. A descale that is written
    is ``max(abs(k)) / 127``, or 448, over the elements of a token and head; for zeros it is 0.

    float8_e4m3fn stores NaN as NaN. int8 has no NaN: 0 is stored, and a descale that is written is
    NaN. An infinity also makes such a descale NaN.

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
    packed = cu_seqlens is not None
    _check_arrays(k_cache, v_cache, k, v, packed=packed)
    given_descales = _given_descales(k_cache, k, k_descale, v_descale)
    options = {"block_table": block_table, "kv_lengths": kv_lengths}
    tables = _tables(k, rotary, interleaved)
    given = {"k": k, "v": v} | tables
    arrays = descale_arrays(given_descales)
    owner = ensure_one_owner(
        {"k_cache": k_cache, "v_cache": v_cache} | given | arrays,
        options | {"cu_seqlens": cu_seqlens},
    )
    kernel = getattr(owner, "append_kv", None)
    pages = paging(options, k_cache)
    B = len(k_cache) if pages is None else len(pages.block_table)
    whose = "k_cache" if pages is None else "block_table"
    starts = _starts(k, cu_seqlens, B, whose)
    old = integers("kv_lengths", kv_lengths, B)
    if old is None:
        raise TypeError(must_be("kv_lengths", f"an integer, or integers of shape ({B},)", old))
    new = _checked_lengths(old, starts, k_cache, pages, tables)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    descales, of_tokens = _descales(caches, given_descales, B, paged=pages is not None)
    written = caches | {n: x for n, x in given_descales.items() if n in of_tokens}
    for name, x in written.items():
        others = {n: y for n, y in {**written, **arrays, **given}.items() if n != name}
        ensure_writable(name, x, others)
    if kernel is None:
        rows = k, v, rotary, bool(interleaved)
        return _append(caches, rows, (old, starts, pages), descales, of_tokens)
    there = kernel(
        *(k_cache, v_cache, k, v),
        kv_lengths=old,
        cu_seqlens=starts if packed else None,
        paging=pages,
        rotary=rotary,
        interleaved=bool(interleaved),
        descales=descales,
        of_tokens=of_tokens,
    )
    return new if there is None else there


def _append(
    caches: Mapping[str, Any],
    new: tuple[Any, Any, tuple[Any, Any] | None, bool],
    places: tuple[Any, Any, Paging | None],
    descales: Mapping[str, Any],
    of_tokens: frozenset[str],
) -> Any:
    """Append by array expressions."""
    (k, v, rotary, interleaved), (old, starts, pages), k_cache = new, places, caches["k_cache"]
    old, starts = (x.astype(np.int64, copy=False) for x in together(old, starts))
    T = k.shape[-2] * (len(k) if k.ndim == 4 else 1)
    sequence, positions = _positions(old, starts, T)
    if rotary is not None:
        N = positions.reshape(len(k), -1) if k.ndim == 4 else positions
        k = rope(k, *rotary, positions=N, interleaved=interleaved)
    entry, row = (np.asarray(n, like=k_cache) for n in _places(sequence, positions, pages))
    # Allocate before writing: a failure must leave the caches as they are.
    rows = [x.swapaxes(-3, -2).reshape(T, x.shape[-3], x.shape[-1]) for x in (k, v)]
    writes = list(zip(caches.values(), rows, strict=True))
    for n, (name, descale) in enumerate(descales.items()):
        cache, x = writes[n]
        if name in of_tokens:
            factors = fitting_descale(x, cache.dtype)
            writes.append((descale, factors))
        else:
            factors = descale[sequence, :, 0]
        writes[n] = cache, quantised(x, factors, cache.dtype)
    for cache, x in writes:
        cache.swapaxes(1, 2)[entry, row] = x
    return old + (starts[1:] - starts[:-1])


def _given_descales(k_cache: Any, k: Any, k_descale: Any, v_descale: Any) -> dict[str, Any]:
    """Return the descales of a call that quantises; refuse them in other calls."""
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    quantises = k_cache.dtype in CACHE_DTYPES and k.dtype != k_cache.dtype
    for name, x in descales.items():
        if quantises and x is None:
            raise ValueError(
                f"{name} must be given to store {k.dtype} in a cache of {k_cache.dtype}; got None"
            )
        if not quantises and x is not None:
            raise ValueError(
                f"{name} must be None with k of {k.dtype} and a cache of {k_cache.dtype}: nothing "
                "is quantised"
            )
    return descales if quantises else {}


def _descales(
    caches: Mapping[str, Any], given: Mapping[str, Any], B: int, *, paged: bool
) -> tuple[dict[str, Any], frozenset[str]]:
    """Validate the descales; view them with three axes, and name the descales of tokens.

    Descales of tokens are written.
    """
    layout = "(pages, Hkv, page)" if paged else "(B, Hkv, capacity)"
    found, of_tokens = {}, set()
    for (name, x), cache in zip(given.items(), caches.values(), strict=False):
        if is_of_tokens(name, x, cache.shape, B, layout):
            found[name] = x
            of_tokens.add(name)
        else:
            found[name] = descale_of_heads(name, x, B, cache.shape[1], cache)
    return found, frozenset(of_tokens)


def _tables(k: Any, rotary: Any, interleaved: Any) -> dict[str, Any]:
    """Check the tables of a rotation; return none without rotation."""
    check_flags(interleaved=interleaved)
    if rotary is None:
        return {}
    if not isinstance(rotary, tuple) or len(rotary) != 2:
        raise TypeError(must_be("rotary", "a tuple (cos, sin) or None", rotary))
    if k.dtype in CACHE_DTYPES:
        raise TypeError(
            f"rotary must be None with k of dtype {k.dtype}; rotate k before quantising"
        )
    tables = dict(zip(("cos", "sin"), rotary, strict=True))
    for name, x in tables.items():
        check_dtype(name, x)
    check_tables(k, *rotary)
    return tables


def _checked_lengths(
    old: Any, starts: Any, k_cache: Any, pages: Paging | None, tables: Mapping[str, Any]
) -> Any:
    """Check values on the host; return the new lengths, None if they are on a device."""
    if pages is not None:
        pages.check(old)
    if not isinstance(old, np.ndarray) or not isinstance(starts, np.ndarray):
        return None
    new = old + (starts[1:] - starts[:-1])
    capacity = k_cache.shape[2] if pages is None else pages.capacity
    for b in np.flatnonzero((old < 0) | (new > capacity)):
        raise ValueError(
            f"{called('kv_lengths')} must be from 0 to the capacity, {capacity}, without the new "
            f"keys; got {old[b]} for sequence {b}, which would have {new[b]} keys"
        )
    for b in np.flatnonzero((new > old) & (new > len(tables.get("cos", new)))) if tables else ():
        raise ValueError(
            f"{called('cos')} must have a row for each position; got {len(tables['cos'])} rows, "
            "and sequence "
            f"{b} would have {new[b]} keys, with its {old[b]} of {called('kv_lengths')}"
        )
    if pages is not None:
        pages.check(new)
        _check_writers(old, new, pages)
    return new


def _check_arrays(k_cache: Any, v_cache: Any, k: Any, v: Any, *, packed: bool) -> None:
    """Check dtypes and shapes against the cache of keys."""
    axes = 3 if packed else 4
    arrays = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    _check_dtypes(arrays)
    for name, x in arrays.items():
        cached = name.endswith("cache")
        if x.ndim != (4 if cached else axes):
            shape = "(B, Hkv, N, D)" if cached or not packed else "(Hkv, T, D)"
            raise ValueError(f"{name} must have shape {shape}; got {x.shape}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache must have the shape of k_cache, {k_cache.shape}, but for the last axis; got "
            f"{v_cache.shape}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the shape of k, {k.shape}, but for the last axis; got {v.shape}"
        )
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if (x.shape[-3], x.shape[-1]) != (cache.shape[1], cache.shape[3]):
            raise ValueError(
                f"{name} must have the heads of {name}_cache, {cache.shape[1]} of dimension "
                f"{cache.shape[3]}; got {x.shape[-3]} of {x.shape[-1]}"
            )


def _check_dtypes(arrays: Mapping[str, Any]) -> None:
    """Check that all arrays have the dtype of the cache of keys; 16 and 32 bits go into 8."""
    k_cache, like = arrays["k_cache"], "k_cache"
    check_dtype("k_cache", k_cache, (*DTYPES, *CACHE_DTYPES))
    for name, x in arrays.items():
        require_array(name, x)
        if name == "k" and k_cache.dtype in CACHE_DTYPES:
            check_dtype(name, x, (*QUERY_DTYPES, k_cache.dtype))
            like = "k"  # of v
        if x.dtype != arrays[like].dtype:
            raise TypeError(
                f"{name} must have the dtype of {like}, {arrays[like].dtype}; got {x.dtype}"
            )


def _check_writers(old: Any, new: Any, pages: Paging) -> None:
    """Raise ValueError if two sequences write to a page; a table on a device is not checked."""
    table = pages.block_table
    if not isinstance(table, np.ndarray) or not isinstance(new, np.ndarray):
        return
    first, end = np.arange(table.shape[1]) * pages.page, new[:, np.newaxis]
    start = old[:, np.newaxis]
    written = (start < end) & (start < first + pages.page) & (first < end)
    found, places = np.unique(table[written], return_counts=True)
    for page in found[places > 1]:
        (b, n), (other, m) = np.argwhere(written & (table == page))[:2]
        raise ValueError(
            f"{called('block_table')} must hold a page for each that gets new keys; got {page} for "
            f"page {n} of sequence {b} and for page {m} of sequence {other}"
        )


def _starts(k: Any, cu_seqlens: Any, B: int, whose: str) -> Any:
    """Return the offsets of the new tokens of each sequence, and their number."""
    if cu_seqlens is None:
        if len(k) != B:
            raise ValueError(f"k must have the batch size of {called(whose)}, {B}; got {len(k)}")
        return np.arange(B + 1) * k.shape[2]
    starts = offsets_of("cu_seqlens", cu_seqlens)
    if len(starts) != B + 1:
        raise ValueError(
            f"cu_seqlens must have one more entry than {called(whose)}, {B + 1}; got {len(starts)}"
        )
    if isinstance(starts, np.ndarray) and starts[-1] != k.shape[1]:
        raise ValueError(
            f"cu_seqlens must end at the number of tokens of k, {k.shape[1]}; got {starts[-1]}"
        )
    return starts


def _positions(old: Any, starts: Any, T: int) -> tuple[Any, Any]:
    """Return the sequence of each new token, and its position there."""
    token = np.arange(T, like=starts)
    sequence = np.searchsorted(starts[1:], token, side="right")
    return sequence, old[sequence] + token - starts[:-1][sequence]


def _places(sequence: Any, j: Any, pages: Paging | None) -> tuple[Any, Any]:
    """Return the batch entry or page of each new token, and its row there."""
    if pages is None:
        return sequence, j
    table, sequence, j = together(pages.block_table, sequence, j)
    return table[sequence, j // pages.page], j % pages.page
