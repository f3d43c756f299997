"""An exchange of tokens for heads: what a rank computes is some heads of all tokens of its group.

Each rank of a group sends to every other its tokens of that rank's heads, and gets the results of
its tokens back. A group of one rank exchanges nothing: its heads are views of the caller's arrays.

References
----------
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from tileattn.distributed.arrays import library
from tileattn.distributed.comm import Communicator, wait
from tileattn.distributed.groups import inside, layout_inside
from tileattn.distributed.layout import Layout

Array = NDArray[Any]


class Exchange:
    """Sends tokens for heads, and heads for tokens, inside a group.

    Heads are numbered among those of each rank. A layout is ``queries`` or ``keys``.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    q_layout, k_layout : Layout
        Their queries and keys.
    n : int
        Ranks of a group; it divides their number, and the heads of k.
    """

    def __init__(self, comm: Communicator, q_layout: Layout, k_layout: Layout, n: int) -> None:
        group, self._n = comm.rank // n, n
        self.group = inside(comm, n)
        self.queries = layout_inside(q_layout, group, n)
        self.keys = layout_inside(k_layout, group, n)
        self._others = [rank for rank in range(n) if rank != self.group.rank]

    @property
    def is_alone(self) -> bool:
        """Whether a group has one rank: its heads are views, and so is the room for results."""
        return self._n == 1

    def heads(self, own: slice, of: int, rank: int | None = None) -> slice:
        """Give the place of a rank's heads, by default this one's, among all ``of``."""
        first = (self.group.rank if rank is None else rank) * (of // self._n)
        return slice(first + own.start, first + own.stop)

    def to_heads(self, x: Array, own: slice, layout: Layout) -> Array:
        """Give some heads of all tokens, of this rank's tokens of all heads."""
        if self.is_alone:
            return x[:, own]
        joined, xp = self.room(x, own, layout), library(x)
        outgoing = {n: x[:, self.heads(own, x.shape[1], n)] for n in self._others}
        incoming = {n: xp.empty(_with_length(joined, layout, n), x.dtype) for n in self._others}
        self._exchange(outgoing, incoming)
        incoming[self.group.rank] = x[:, self.heads(own, x.shape[1])]
        for n, part in incoming.items():
            for tokens, rows in _tokens(layout, n):
                joined[:, :, tokens] = part[:, :, rows]
        return joined

    def room(self, x: Array, own: slice, layout: Layout) -> Array:
        """Give room for some heads of all tokens, of which ``to_tokens`` fills ``x``.

        In a group of one rank it is their place in ``x``, and there is nothing to fill.
        """
        if self.is_alone:
            return x[:, own]
        shape = x.shape[0], own.stop - own.start, layout.length, *x.shape[3:]
        found: Array = library(x).empty(shape, x.dtype)
        return found

    def to_tokens(self, joined: Array, x: Array, own: slice, layout: Layout) -> None:
        """Fill the heads of all ranks in this rank's tokens ``x``, of all tokens of its heads.

        They are rounded to the dtype of ``x``.
        """
        if self.is_alone:
            x[:, own] = joined
            return
        joined = joined.astype(x.dtype, copy=False)
        places = {n: x[:, self.heads(own, x.shape[1], n)] for n in range(self._n)}
        outgoing = {n: layout.take(joined, n, axis=2) for n in self._others}
        incoming = {n: self._contiguous(places[n]) for n in self._others}
        self._exchange(outgoing, incoming)
        for n, part in incoming.items():
            if part is not places[n]:
                places[n][...] = part
        for tokens, rows in _tokens(layout, self.group.rank):
            places[self.group.rank][:, :, rows] = joined[:, :, tokens]

    @staticmethod
    def _contiguous(place: Array) -> Array:
        """Give a place to receive in."""
        if place.flags.c_contiguous:
            return place
        found: Array = library(place).empty(place.shape, place.dtype)
        return found

    def _exchange(self, outgoing: Mapping[int, Array], incoming: Mapping[int, Array]) -> None:
        """Send an array to each rank, and receive one of each."""
        sent = {n: library(x).ascontiguousarray(x) for n, x in outgoing.items()}
        with self.group.together():
            under_way = [self.group.receive(x, n, 0) for n, x in incoming.items()]
            under_way += [self.group.send(x, n, 0) for n, x in sent.items()]
        wait(under_way)


def _tokens(layout: Layout, rank: int) -> Iterator[tuple[slice, slice]]:
    """Give the tokens of a rank among all, and where it has them."""
    for start, stop, rows in layout.segments(rank):
        yield slice(start, stop), rows


def _with_length(joined: Array, layout: Layout, rank: int) -> tuple[int, ...]:
    return (*joined.shape[:2], layout.length_of(rank), *joined.shape[3:])
