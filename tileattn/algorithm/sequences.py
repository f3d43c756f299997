"""The sequences of a call: batch entries, packed sequences, and keys in pages.

The loops of ``spec`` read blocks of keys and values from a ``KVSource``, however they are stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from tileattn.algorithm.mask import SlidingWindow
from tileattn.call.problem import Operands, Problem

Array = NDArray[Any]


class KVSource(Protocol):
    """Keys and values of some key heads of one sequence."""

    @property
    def heads(self) -> int:
        """Key heads."""

    @property
    def N(self) -> int:  # noqa: N802 - the letter of the field
        """Keys."""

    @property
    def Dv(self) -> int:  # noqa: N802 - the letter of the field
        """Head dimension of values."""

    def keys(self, span: slice) -> Array:
        """Return a block of keys, shape (heads, 1, N, D)."""

    def values(self, span: slice) -> Array:
        """Return a block of values, shape (heads, 1, N, Dv)."""

    def of_heads(self, heads: slice) -> "KVSource":
        """Return the keys and values of some key heads."""


@dataclass(frozen=True, slots=True)
class ContiguousKV:
    """Keys and values that are slices of two arrays."""

    k: Array  # (heads, Nk, D)
    v: Array  # (heads, Nk, Dv)

    @property
    def heads(self) -> int:
        return len(self.k)

    @property
    def N(self) -> int:  # noqa: N802 - the letter of the field
        return int(self.k.shape[-2])

    @property
    def Dv(self) -> int:  # noqa: N802 - the letter of the field
        return int(self.v.shape[-1])

    def keys(self, span: slice) -> Array:
        return self.k[:, None, span]

    def values(self, span: slice) -> Array:
        return self.v[:, None, span]

    def of_heads(self, heads: slice) -> "ContiguousKV":
        return ContiguousKV(self.k[heads], self.v[heads])


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values in pages: key j is row ``j % page`` of page ``pages[j // page]``."""

    k: Array  # (all pages, heads, page, D)
    v: Array  # (all pages, heads, page, Dv)
    pages: Array  # numbers of the pages of this sequence

    @property
    def heads(self) -> int:
        return int(self.k.shape[1])

    @property
    def N(self) -> int:  # noqa: N802 - the letter of the field
        return len(self.pages) * int(self.k.shape[2])

    @property
    def Dv(self) -> int:  # noqa: N802 - the letter of the field
        return int(self.v.shape[-1])

    def keys(self, span: slice) -> Array:
        return self._gathered(self.k, span)

    def values(self, span: slice) -> Array:
        return self._gathered(self.v, span)

    def of_heads(self, heads: slice) -> "PagedKV":
        return PagedKV(self.k[:, heads], self.v[:, heads], self.pages)

    def _gathered(self, x: Array, span: slice) -> Array:
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
        kv: KVSource
        if x.paging is None:
            kv = ContiguousKV(x.k[b, :, keys], x.v[b, :, keys])
        else:
            kv = PagedKV(x.k, x.v, x.paging.block_table[entry])
        length, offset = int(x.kv_lengths[entry]), int(x.q_offset[entry])
        yield Sequence(entry, place, q, kv, SlidingWindow(q.shape[1], length, offset, *P.window))
