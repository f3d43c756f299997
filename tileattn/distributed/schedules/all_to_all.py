"""All-to-all: ranks of a group exchange tokens for heads.

Each rank sends every other rank of its group its tokens of that rank's heads. So a rank computes
some heads of all tokens of the group, and sends the results back to the owners of the tokens. A
group of one rank exchanges nothing: its heads are views of the caller's arrays.

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
    """The all-to-all of a group of n ranks, from tokens to heads and back.

    n divides the number of ranks and of key heads. Head slices index the heads of one rank. Layouts
    are ``queries`` or ``keys``.
    """

    def __init__(self, comm: Communicator, q_layout: Layout, k_layout: Layout, n: int) -> None:
        group, self._n = comm.rank // n, n
        self.group = inside(comm, n)
        self.queries = layout_inside(q_layout, group, n)
        self.keys = layout_inside(k_layout, group, n)
        self._others = [rank for rank in range(n) if rank != self.group.rank]

    @property
    def is_alone(self) -> bool:
        """True if a group has one rank: heads and buffers for results are views."""
        return self._n == 1

    def heads(self, own: slice, of: int, rank: int | None = None) -> slice:
        """Return the slice of a rank's heads, by default this rank's, among all ``of`` heads."""
        first = (self.group.rank if rank is None else rank) * (of // self._n)
        return slice(first + own.start, first + own.stop)

    def to_heads(self, arrays: Sequence[Array], own: slice, layout: Layout) -> list[Array]:
        """Exchange this rank's tokens of all heads for some heads of all tokens."""
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
        """Return a buffer for some heads of all tokens, from which ``to_tokens`` fills ``x``.

        In a group of one rank it is a view of ``x``, and there is nothing to fill.
        """
        if self.is_alone:
            return x[:, own]
        shape = x.shape[0], own.stop - own.start, layout.length, *x.shape[3:]
        found: Array = library(x).empty(shape, x.dtype)
        return found

    def to_tokens(self, pairs: Iterable[tuple[Array, Array]], own: slice, layout: Layout) -> None:
        """Exchange some heads of all tokens for this rank's tokens of all heads.

        The second array of each pair is filled with the first one, rounded to its dtype.
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
        """Return an array to receive in: the view if it is contiguous."""
        if place.flags.c_contiguous:
            return place
        found: Array = library(place).empty(place.shape, place.dtype)
        return found

    def _exchange(
        self, outgoing: Sequence[Mapping[int, Array]], incoming: Sequence[Mapping[int, Array]]
    ) -> None:
        """Send arrays to each rank and receive as many, in one step."""
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
    """Yield the tokens of a rank in the group, and their rows on the rank."""
    for start, stop, rows in layout.segments(rank):
        yield slice(start, stop), rows


def _with_length(joined: Array, layout: Layout, rank: int) -> tuple[int, ...]:
    return (*joined.shape[:2], layout.length_of(rank), *joined.shape[3:])
