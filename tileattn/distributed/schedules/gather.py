"""All-gather: every rank first receives all keys and values that its queries attend to.

It needs few messages, and blocks are as long as the sequence, but each rank needs memory for all
keys of a head group. Keys are sent only to ranks that attend to them. If memory allows, the keys of
one head group arrive while the group before is computed. In the backward pass each rank sends dk
and dv back to the owners of the keys, which sum them in rank order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from numpy.typing import NDArray

from tileattn.distributed.arrays import library
from tileattn.distributed.call import Call
from tileattn.distributed.comm.failures import wait
from tileattn.distributed.comm.protocol import Transfer
from tileattn.distributed.schedules.blockwise_attention import Pair, Sums, attend, zero_sums
from tileattn.distributed.schedules.head_groups import BackwardGroup, ForwardGroup

Array = NDArray[Any]

_KEYS, _GRADIENTS = 0, 2  # tags; each has one for k and one for v

Group = TypeVar("Group", ForwardGroup, BackwardGroup)


def forward(groups: Iterable[ForwardGroup], *, ahead: bool) -> None:
    """Compute the rows of this rank's queries."""
    for group, keys in _arriving(groups, ahead=ahead):
        to = group.room()
        attend(_whole(group.call), keys.arrived(), to)
        group.finish(to)
        del to


def backward(groups: Iterable[BackwardGroup], *, ahead: bool) -> None:
    """Compute the gradients of this rank's arrays, and its part of shared gradients."""
    for group, keys in _arriving(groups, ahead=ahead):
        call, dq = group.call, group.room()
        sums = Sums(_whole(call), group.upstream, group.wrt, dq, group.parameters)
        for source, pair in keys.arrived():
            found = sums.of_keys(
                source, *pair, partial(zero_sums, call, call.blocks.k_layout.length)
            )
            del pair
        sums.finish()
        own = _scattered(call, found)
        del sums, call, found
        group.finish_rows(dq)
        group.finish_keys(*own)
        del dq, own


def _whole(call: Call) -> Call:
    """Return the call with all keys, in sequence order, as one part."""
    return replace(call, blocks=call.blocks.of_all_keys)


class _Keys:
    """The keys and values of a head group, while they arrive."""

    def __init__(self, call: Call) -> None:
        P, comm, blocks, x = call.problem, call.comm, call.blocks, call.operands
        xp, self._layout, self._under_way = library(x.k), blocks.k_layout, list[Transfer]()
        own = xp.ascontiguousarray(x.k), xp.ascontiguousarray(x.v)
        self._parts = [{comm.rank: a} for a in own]
        with comm.together():
            for n in _others(call):
                rows = self._layout.length_of(n)
                if blocks.needs(comm.rank, n):
                    for m, columns in enumerate((P.D, P.Dv)):
                        part = xp.empty((P.B, P.Hkv, rows, columns), P.dtype)
                        self._under_way.append(comm.receive(part, n, _KEYS + m))
                        self._parts[m][n] = part
                if blocks.needs(n, comm.rank):
                    self._under_way += [comm.send(a, n, _KEYS + m) for m, a in enumerate(own)]

    def wait(self) -> None:
        """Wait until they have arrived."""
        wait(self._under_way)
        self._under_way = []

    def arrived(self) -> Iterator[tuple[int, Pair]]:
        """Yield them as one part, with zeros for keys that no query of this rank attends to."""
        self.wait()
        k, v = (self._joined(parts) for parts in self._parts)
        pair = k, v
        del k, v
        yield 0, pair

    def _joined(self, parts: dict[int, Array]) -> Array:
        x = next(iter(parts.values()))
        make = library(x).empty if len(parts) == self._layout.ranks else library(x).zeros
        joined: Array = make((*x.shape[:2], self._layout.length, x.shape[3]), x.dtype)
        del x
        while parts:
            rank, part = parts.popitem()
            for start, stop, rows in self._layout.segments(rank):
                joined[:, :, start:stop] = part[:, :, rows]
        return joined


def _arriving(groups: Iterable[Group], *, ahead: bool) -> Iterator[tuple[Group, _Keys]]:
    """Yield each head group with its keys; with ``ahead`` they arrive during the group before."""
    before = None
    for group in groups:
        if before is not None:
            before[1].wait()  # no pending messages: the next ones start before a kernel
        following = group, _Keys(group.call)
        if not ahead:
            yield following
            continue
        if before is not None:
            yield before
        before = following
    if before is not None:
        yield before


def _scattered(call: Call, found: Pair) -> Pair:
    """Sum the gradients of this rank's keys and values over the ranks, in their order."""
    comm, blocks, xp = call.comm, call.blocks, library(found[0])
    parts = {comm.rank: _of_rank(call, found, comm.rank)}
    under_way: list[Transfer] = []
    with comm.together():
        for n in _others(call):
            if blocks.needs(n, comm.rank):
                dk, dv = parts[n] = tuple(map(xp.empty_like, parts[comm.rank]))
                under_way += [comm.receive(x, n, _GRADIENTS + m) for m, x in enumerate((dk, dv))]
            if blocks.needs(comm.rank, n):
                sent = _of_rank(call, found, n)
                under_way += [comm.send(x, n, _GRADIENTS + m) for m, x in enumerate(sent)]
    wait(under_way)
    (dk, dv), *others = (parts[n] for n in sorted(parts))
    for other_dk, other_dv in others:
        dk += other_dk
        dv += other_dv
    return dk, dv


def _of_rank(call: Call, pair: Pair, rank: int) -> Pair:
    dk, dv = (call.blocks.k_layout.take(x, rank, axis=2) for x in pair)
    return dk, dv


def _others(call: Call) -> list[int]:
    return [n for n in range(call.comm.size) if n != call.comm.rank]
