"""An exchange of tokens for heads: what a rank computes is some heads of all tokens of its group.

Each rank of a group sends to every other its tokens of that rank's heads, and gets the results of
its tokens back. A group of one rank exchanges nothing: its heads are views of the caller's arrays.

References
----------
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from tileattn.distributed.arrays import library
from tileattn.distributed.comm.failures import wait
from tileattn.distributed.comm.protocol import Communicator
from tileattn.distributed.comm.subset import inside
from tileattn.distributed.layout import Layout, layout_inside

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

    def to_heads(self, arrays: Sequence[Array], own: slice, layout: Layout) -> list[Array]:
        """Give some heads of all tokens, of this rank's tokens of all heads."""
        if self.is_alone:
            return [x[:, own] for x in arrays]
        outgoing = [{n: x[:, self.heads(own, x.shape[1], n)] for n in self._others} for x in arrays]
        found = [self.room(x, own, layout) for x in arrays]
        incoming = [
            {n: library(x).empty(_with_length(x, layout, n), x.dtype) for n in self._others}
            for x in found
        ]
        self._exchange(outgoing, incoming)
        for x, joined, parts in zip(arrays, found, incoming, strict=True):
            parts[self.group.rank] = x[:, self.heads(own, x.shape[1])]
            for n, part in parts.items():
                for tokens, rows in _tokens(layout, n):
                    joined[:, :, tokens] = part[:, :, rows]
        return found

    def room(self, x: Array, own: slice, layout: Layout) -> Array:
        """Give room for some heads of all tokens, of which ``to_tokens`` fills ``x``.

        In a group of one rank it is their place in ``x``, and there is nothing to fill.
        """
        if self.is_alone:
            return x[:, own]
        shape = x.shape[0], own.stop - own.start, layout.length, *x.shape[3:]
        found: Array = library(x).empty(shape, x.dtype)
        return found

    def to_tokens(self, pairs: Iterable[tuple[Array, Array]], own: slice, layout: Layout) -> None:
        """Fill the heads of all ranks in this rank's tokens, of all tokens of its heads.

        Of each pair the second is filled with the first, which is rounded to its dtype.
        """
        if self.is_alone:
            for y, x in pairs:
                x[:, own] = y
            return
        joined = [(y.astype(x.dtype, copy=False), x) for y, x in pairs]
        places = [
            {n: x[:, self.heads(own, x.shape[1], n)] for n in range(self._n)} for _, x in joined
        ]
        outgoing = [{n: layout.take(y, n, axis=2) for n in self._others} for y, _ in joined]
        incoming = [{n: self._contiguous(place[n]) for n in self._others} for place in places]
        self._exchange(outgoing, incoming)
        for (y, _), place, parts in zip(joined, places, incoming, strict=True):
            for n, part in parts.items():
                if part is not place[n]:
                    place[n][...] = part
            for tokens, rows in _tokens(layout, self.group.rank):
                place[self.group.rank][:, :, rows] = y[:, :, tokens]

    @staticmethod
    def _contiguous(place: Array) -> Array:
        """Give a place to receive in."""
        if place.flags.c_contiguous:
            return place
        found: Array = library(place).empty(place.shape, place.dtype)
        return found

    def _exchange(
        self, outgoing: Sequence[Mapping[int, Array]], incoming: Sequence[Mapping[int, Array]]
    ) -> None:
        """Send arrays to each rank, and receive as many of each, all at once."""
        sent = [{n: library(x).ascontiguousarray(x) for n, x in each.items()} for each in outgoing]
        with self.group.together():
            under_way = [
                self.group.receive(x, n, tag)
                for tag, each in enumerate(incoming)
                for n, x in each.items()
            ]
            under_way += [
                self.group.send(x, n, tag) for tag, each in enumerate(sent) for n, x in each.items()
            ]
        wait(under_way)


def _tokens(layout: Layout, rank: int) -> Iterator[tuple[slice, slice]]:
    """Give the tokens of a rank among all, and where it has them."""
    for start, stop, rows in layout.segments(rank):
        yield slice(start, stop), rows


def _with_length(joined: Array, layout: Layout, rank: int) -> tuple[int, ...]:
    return (*joined.shape[:2], layout.length_of(rank), *joined.shape[3:])
