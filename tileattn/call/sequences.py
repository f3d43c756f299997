"""Validation of lengths, offsets, packed sequences and pages: where sequences are in memory."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.options import options_with
from tileattn.errors import UnsupportedError
from tileattn.messages import called, must_be
from tileattn.validation import refuse_masked

FAR = 1 << 60  # largest position or length; sums of a few must fit 64 bits

_MOST = 1 << 31  # end of the range of origins: dropout counters have 32 bits


class Packing(NamedTuple):
    """Offsets of packed sequences; the last offset is the number of tokens.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : array of int64, or on a device of integers, shape (S + 1,)
        Tokens of q, and of k and v, before each sequence; None where keys are in pages.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any

    @property
    def sizes(self) -> tuple[int, Any, Any]:
        """Number of sequences, and the queries and keys of each; None if on a device."""
        queries, keys = (x[1:] - x[:-1] if isinstance(x, np.ndarray) else None for x in self)
        return self.cu_seqlens_q.shape[0] - 1, queries, keys

    def longest(self, Nq: int, Nk: int) -> tuple[int, int]:
        """Return the greatest numbers of queries and keys; Nq and Nk if on a device."""
        _, queries, keys = self.sizes
        if queries is not None:
            Nq = int(queries.max(initial=0))
        return Nq, Nk if keys is None else int(keys.max(initial=0))


class Paging(NamedTuple):
    """Pages of keys and values, and the pages of each sequence.

    Parameters
    ----------
    block_table : array of int64, or on a device of integers, shape (B, n)
        The pages of each sequence, in the order of its keys.
    pages, page : int
        Number of pages, and keys per page.
    """

    block_table: Any
    pages: int
    page: int

    @property
    def capacity(self) -> int:
        """Maximum number of keys of a sequence."""
        return int(self.block_table.shape[1]) * self.page

    def check(self, kv_lengths: Any) -> None:
        """Raise ValueError if a used page does not exist; a table on a device is not checked."""
        table, count = self.block_table, len(kv_lengths)
        if table.shape[0] != count:
            raise ValueError(
                f"{called('block_table')} must have shape ({count}, pages of a sequence); got "
                f"{table.shape}"
            )
        if not isinstance(table, np.ndarray) or not isinstance(kv_lengths, np.ndarray):
            return
        used = np.arange(table.shape[1]) * self.page < kv_lengths[:, np.newaxis]
        for b, n in np.argwhere(used & ((table < 0) | (table >= self.pages))):
            raise ValueError(
                f"{called('block_table')} must hold pages from 0 to {self.pages - 1}; got "
                f"{table[b, n]} for page {n} of sequence {b}"
            )


class Places(NamedTuple):
    """The integer arrays of a call: where each sequence is in memory.

    Parameters
    ----------
    kv_lengths, q_offset : array of int64, or on a device of integers, shape (entries,), or None
        Number of keys, and position of query 0, for each sequence. None if known only on a device:
        then all keys, or the last query is at the last key.
    packing : Packing or None
        Offsets of packed sequences.
    paging : Paging or None
        Pages of each sequence, if k and v have pages in place of batch entries.
    origin : array of int64, shape (entries, 4), or None
        Indices (b, h, i, j) at which the call starts in a larger one, for each sequence.
    """

    kv_lengths: Any
    q_offset: Any
    packing: Packing | None
    paging: Paging | None
    origin: Any = None

    @classmethod
    def of(cls, operands: Any) -> "Places":
        """Take the fields of the same names from the operands of a call."""
        return cls(*(getattr(operands, name) for name in cls._fields))

    @property
    def integers(self) -> dict[str, Any]:
        """Lengths, offsets and block table that are given, by the names of the options."""
        found = {"kv_lengths": self.kv_lengths, "q_offset": self.q_offset}
        if self.packing is not None:
            found |= self.packing._asdict()
        if self.paging is not None:
            found["block_table"] = self.paging.block_table
        return {name: x for name, x in found.items() if x is not None}

    def with_integers(self, **others: Any) -> "Places":
        """Replace some of the arrays."""
        x, packing, paging = self.integers | others, self.packing, self.paging
        return Places(
            x.get("kv_lengths"),
            x.get("q_offset"),
            packing and Packing(x.get("cu_seqlens_q"), x.get("cu_seqlens_k")),
            paging and paging._replace(block_table=x["block_table"]),
            self.origin,
        )


_BOTH = {"cu_seqlens_q": "cu_seqlens_k", "cu_seqlens_k": "cu_seqlens_q"}


def given_for(name: str, options: Mapping[str, Any]) -> Any:
    """Look up an array of a valid call; one array of offsets holds for queries and keys."""
    x = options.get(name)
    return options[_BOTH[name]] if x is None else x


def places_of(options: Mapping[str, Any], k: Any, B: int, Nq: int, Nk: int) -> Places:
    """Validate the integers of a call; Nk is ignored with pages."""
    paged = paging(options, k)
    Nk = Nk if paged is None else paged.capacity
    packed = packing(options, B, Nq, Nk)
    entries, queries, keys = (B, Nq, Nk) if packed is None else packed.sizes
    keys = keys if paged is None else Nk
    kv_lengths = kv_lengths_of(options.get("kv_lengths"), entries, keys)
    if paged is not None:
        paged.check(kv_lengths)
    q_offset = integers("q_offset", options.get("q_offset"), entries)
    # Kernels subtract lengths that are on a device.
    if q_offset is None and _on_host(kv_lengths) and (packed is None or _on_host(queries)):
        q_offset = kv_lengths - queries
    return Places(kv_lengths, q_offset, packed, paged, origin_of(options.get("origin"), entries))


def _on_host(*given: Any) -> bool:
    return all(isinstance(x, np.ndarray) for x in given)


def paging(options: Mapping[str, Any], k: Any) -> Paging | None:
    """Return the pages of each sequence; None if keys and values are not in pages."""
    table = options.get("block_table")
    if table is None:
        return None
    if options.get("cu_seqlens_k") is not None:
        raise ValueError(
            f"{called('cu_seqlens_k')} must be None with {called('block_table')}; "
            f"{called('kv_lengths')} has the lengths"
        )
    if options.get("kv_lengths") is None:
        raise ValueError(
            f"{called('kv_lengths')} must be given with {called('block_table')}; got None"
        )
    table = as_integers("block_table", table, "integers of shape (B, pages of a sequence)")
    if table.ndim != 2:
        raise ValueError(
            f"{called('block_table')} must have shape (B, pages of a sequence); got {table.shape}"
        )
    return Paging(_copied(table), *(k.shape[n] for n in (0, 2)))


_INSTEAD_PACKED = {  # of an option that packed sequences do not have
    "tree_mask": "use mask_mod=lambda b, h, i, j, tree, first: (j < first[b]) | "
    "tree[b, i, j - first[b]] with aux=(tree, first), where tree b starts at key first[b]"
}


def packing(options: Mapping[str, Any], batch: int, Nq: int, Nk: int) -> Packing | None:
    """Return the offsets of packed sequences; None if sequences are batch entries."""
    given = {n: options.get(n) for n in Packing._fields if options.get(n) is not None}
    if not given:
        return None
    name = next(iter(given))
    for option in options_with(packed=False):
        if options.get(option) is not None:
            instead = _INSTEAD_PACKED.get(option, "use score_mod or mask_mod")
            raise UnsupportedError(
                f"{called(option)} is not supported with {called(name)}; {instead}, or pad the "
                "sequences to a batch"
            )
    if batch != 1:
        raise ValueError(
            f"{called('q')} must have shape (H, T, D) or (1, H, T, D) with {called(name)}; got "
            f"batch size {batch}"
        )
    found = [offsets_of(n, x) for n, x in given.items()]
    if options.get("block_table") is not None:
        return _checked_ends(Packing(found[0], None), (name, name), (Nq, Nk))
    packed = Packing(found[0], found[-1])
    queries, keys = (x.shape[0] for x in packed)
    if queries != keys:
        raise ValueError(
            f"{called('cu_seqlens_k')} must have as many entries as {called('cu_seqlens_q')}, "
            f"{queries}; got {keys}"
        )
    both = f" (without {called(_BOTH[name])} it holds for {called('q')} and {called('k')})"
    return _checked_ends(packed, (name, [*given][-1]), (Nq, Nk), "" if len(given) == 2 else both)


def _checked_ends(
    packed: Packing, names: tuple[str, str], tokens: tuple[int, int], more: str = ""
) -> Packing:
    """Check that the offsets, given by the named options, end at the number of tokens."""
    for offsets, name, array, n in zip(packed, names, "qk", tokens, strict=True):
        if isinstance(offsets, np.ndarray) and offsets[-1] != n:
            raise ValueError(
                f"{called(name)} must end at the number of tokens of {called(array)}, {n}; got "
                f"{offsets[-1]}{more}"
            )
    return packed


def offsets_of(name: str, x: Any) -> Any:
    """Return valid offsets: the tokens before each sequence, then the number of tokens."""
    x = as_integers(name, x, "integers of shape (S + 1,)")
    if x.ndim != 1 or not x.shape[0]:
        raise ValueError(f"{called(name)} must have shape (S + 1,) for S sequences; got {x.shape}")
    offsets = _copied(x)
    if not isinstance(x, np.ndarray):
        return offsets
    if offsets[0]:
        raise ValueError(f"{called(name)} must start with 0; got {offsets[0]}")
    for n in np.flatnonzero(offsets[1:] < offsets[:-1]):
        raise ValueError(
            f"{called(name)} must not decrease; got {offsets[n + 1]} after {offsets[n]}"
        )
    return offsets


def kv_lengths_of(x: Any, count: int, keys: Any) -> Any:
    """Return the valid length of each sequence of ``keys`` keys; None if known on a device."""
    lengths = integers("kv_lengths", x, count)
    if lengths is None:
        return np.full(count, keys, np.int64) if isinstance(keys, int) else keys
    if isinstance(lengths, np.ndarray) and isinstance(keys, int | np.ndarray):
        for n in np.flatnonzero((lengths < 0) | (lengths > keys)):
            most = (
                f"Nk = {keys}" if isinstance(keys, int) else f"the {keys[n]} keys of sequence {n}"
            )
            raise ValueError(f"{called('kv_lengths')} must be from 0 to {most}; got {lengths[n]}")
    return lengths


def origin_of(x: Any, entries: int) -> Any:
    """Return the valid origin of each sequence."""
    if x is None:
        return None
    what = f"integers of shape (4,) or ({entries}, 4), of Python or NumPy"
    x = as_integers("origin", x, what)
    if not isinstance(x, np.ndarray):
        raise TypeError(must_be("origin", what, x))
    if x.shape not in ((4,), (entries, 4)):
        raise ValueError(f"origin must be {what}; got shape {x.shape}")
    for wrong in x[(x < 0) | (x >= _MOST)].flat:
        raise ValueError(f"origin must hold integers from 0 to 2**31 - 1; got {wrong}")
    return np.array(np.broadcast_to(x, (entries, 4)), np.int64, order="C")


def integers(name: str, x: Any, count: int) -> Any:
    """Return one integer for each sequence, from an integer, a sequence or an array."""
    if x is None:
        return None
    what = f"an integer, or integers of shape ({count},)"
    x = as_integers(name, x, what)
    if x.shape not in ((), (count,)):
        raise ValueError(f"{called(name)} must be {what}; got shape {x.shape}")
    if not x.shape:
        return np.full(count, int(x), np.int64)
    return _copied(x)


def _copied(x: Any) -> Any:
    """Copy an array of the host, which the cache keeps; a copy on a device costs a kernel."""
    return x.astype(np.int64) if isinstance(x, np.ndarray) else x


def together(*integers: Any) -> list[Any]:
    """Copy host arrays to the device, if any array is on a device."""
    there = (x for x in integers if not isinstance(x, np.ndarray))
    like = next(there, integers[0])
    return [np.asarray(x, like=like) for x in integers]


def as_integers(name: str, x: Any, what: str) -> Any:
    """Convert an integer, a sequence or an array to an array of integers."""
    given = x
    if isinstance(x, int | list | tuple | np.integer) and not isinstance(x, bool):
        try:
            x = np.asarray(x) if np.size(x) else np.zeros(np.shape(x), np.int64)
        except (ValueError, TypeError, OverflowError):
            raise TypeError(must_be(name, what, given)) from None
    if isinstance(x, type) or not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(must_be(name, what, given))
    refuse_masked(name, x)
    if getattr(x.dtype, "kind", None) not in ("i", "u"):
        raise TypeError(must_be(name, what, given))
    if isinstance(x, np.ndarray):
        x = np.asarray(x)  # also from a subclass
        for wrong in x[(x < -FAR) | (x > FAR)].flat:
            raise ValueError(f"{called(name)} must hold integers up to 2**60 in size; got {wrong}")
    return x
