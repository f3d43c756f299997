"""The sequences of a call: batch entries, packed sequences, and keys in pages.

The loops of ``spec`` read blocks of keys and values from a ``KVSource``, however they are stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.mask import SlidingWindow
from tileattn.call.options import DESCALES
from tileattn.call.problem import Operands, Problem

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class KVSource:
    """Keys and values of some key heads of one sequence, and what dequantises them."""

    k: Array  # (heads, Nk, D)
    v: Array  # (heads, Nk, Dv)
    k_descale: Array | None = field(default=None, kw_only=True)  # (heads, Nk, 1)
    v_descale: Array | None = field(default=None, kw_only=True)  # (heads, Nk, 1)

    @property
    def heads(self) -> int:
        """Key heads."""
        return int(self.k.shape[-3])

    @property
    def N(self) -> int:  # noqa: N802 - the letter of the field
        """Keys."""
        return int(self.k.shape[-2])

    @property
    def Dv(self) -> int:  # noqa: N802 - the letter of the field
        """Head dimension of values."""
        return int(self.v.shape[-1])

    def keys(self, span: slice) -> Array:
        """Return a block of keys, shape (heads, 1, N, D)."""
        return self._rows(self.k, span)

    def values(self, span: slice) -> Array:
        """Return a block of values, shape (heads, 1, N, Dv)."""
        return self._rows(self.v, span)

    def of_heads(self, heads: slice) -> "KVSource":
        """Return the keys and values of some key heads."""
        arrays = ((name, getattr(self, name)) for name in ("k", "v", "k_descale", "v_descale"))
        return replace(self, **{n: x[..., heads, :, :] for n, x in arrays if x is not None})

    def columns(self, x: Array, span: slice) -> Array:
        """Return a number of each row, an array like ``k_descale``, as a row: (heads, 1, 1, N)."""
        return self._rows(x, span).swapaxes(-1, -2)

    def _rows(self, x: Array, span: slice) -> Array:
        return x[:, None, span]


@dataclass(frozen=True, slots=True)
class PagedKV(KVSource):
    """Keys and values in pages: key j is row ``j % page`` of page ``pages[j // page]``.

    ``k`` and ``v`` have the shapes (all pages, heads, page, D) and (all pages, heads, page, Dv).
    """

    pages: Array  # numbers of the pages of this sequence

    @property
    def N(self) -> int:  # noqa: N802 - the letter of the field
        """Keys."""
        return len(self.pages) * int(self.k.shape[-2])

    def _rows(self, x: Array, span: slice) -> Array:
        """Copy the rows of a span; pages outside it are not read."""
        page, D = x.shape[2:]
        first, end = span.start // page, -(-span.stop // page)
        pages = x[self.pages[first:end]].swapaxes(0, 1)
        rows = pages.reshape(self.heads, 1, (end - first) * page, D)
        return rows[:, :, span.start - first * page : span.stop - first * page]


class Place(NamedTuple):
    """The position of a sequence in arrays with axes (B, H, N, ...)."""

    batch: int
    queries: slice
    keys: slice


class Sequence(NamedTuple):
    """One sequence of a call."""

    entry: int  # index of options with a batch axis, and of dropout
    place: Place
    q: Array  # (Hq, Nq, D)
    kv: KVSource
    window: SlidingWindow


def sequences(problem: Problem, operands: Operands) -> Iterator[Sequence]:
    """Yield the sequences: batch entries, or packed sequences in order."""
    P, x = problem, operands
    for entry in range(P.entries):
        place = Place(entry, slice(0, P.Nq), slice(0, P.Nk))
        if x.packing is not None:
            ends = (None if x is None else x[entry : entry + 2].tolist() for x in x.packing)
            rows, keys = (slice(0, P.Nk) if x is None else slice(*x) for x in ends)
            place = Place(0, rows, keys)
        b, rows, keys = place
        q = x.q[b, :, rows]
        if x.paging is None:
            kv = KVSource(x.k[b, :, keys], x.v[b, :, keys])
        else:
            kv = PagedKV(x.k, x.v, x.paging.block_table[entry])
        if P.is_quantised:
            kv = replace(kv, **{name: _of_rows(P, x, name, entry, place) for name in DESCALES})
        length, offset = int(x.kv_lengths[entry]), int(x.q_offset[entry])
        yield Sequence(entry, place, q, kv, SlidingWindow(q.shape[1], length, offset, *P.window))


def _of_rows(P: Problem, x: Operands, name: str, entry: int, place: Place) -> Array:
    """View a descale with a number for each row of a sequence, or with pages of all pages."""
    part = slice(None) if x.paging is not None else (place.batch, slice(None), place.keys)
    descale: Array = getattr(x, name)
    descale = descale[part if name in P.token_descales else entry]
    return np.broadcast_to(descale, x.k[part].shape[:-1])[..., None]
