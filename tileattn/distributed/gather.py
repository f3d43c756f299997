"""All-gather: every rank gets the keys and values that its queries attend to, all at once.

Few messages, and blocks as long as the sequence; but each rank has room for all keys. Keys travel
to ranks that attend to some of them, and to no others. In the backward pass each rank sends
gradients back to the ranks that hold the keys, which sum them in the order of the ranks.
"""

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from tileattn.distributed.arrays import library
from tileattn.distributed.blocks import Pair, Sums, attend, precise
from tileattn.distributed.call import Call
from tileattn.distributed.comm import Transfer, wait
from tileattn.distributed.layout import Layout
from tileattn.results import Attention, Gradients

Array = NDArray[Any]

_KEYS, _GRADIENTS = 0, 2  # kinds of messages, of k and of v each


def forward(call: Call) -> Attention:
    """Compute the rows of this rank's queries."""
    return attend(_whole(call), [(0, gathered(call))])


def backward(
    call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str]
) -> Gradients:
    """Compute the gradients of this rank's arrays, and those of what all ranks share."""
    call, attention = precise(call, attention, forward)
    sums = Sums(_whole(call), dout, attention, dlse, wrt)
    return sums.gradients(*scattered(call, sums.of_keys(0, *gathered(call))))


def gathered(call: Call) -> Pair:
    """Give all keys and values; of those that no query of this rank attends to, zeros."""
    P, comm, x = call.problem, call.comm, call.operands
    xp = library(x.k)
    own: Pair = (xp.ascontiguousarray(x.k), xp.ascontiguousarray(x.v))
    lengths = [call.k_layout.length_of(n) for n in range(comm.size)]
    every = [
        own
        if n == comm.rank
        else (
            xp.zeros((P.B, P.Hkv, rows, P.D), P.dtype),
            xp.zeros((P.B, P.Hkv, rows, P.Dv), P.dtype),
        )
        for n, rows in enumerate(lengths)
    ]
    under_way: list[Transfer] = []
    with comm.together():
        for n in _others(call):
            if call.needs(comm.rank, n):
                under_way += [comm.receive(x, n, _KEYS + m) for m, x in enumerate(every[n])]
            if call.needs(n, comm.rank):
                under_way += [comm.send(x, n, _KEYS + m) for m, x in enumerate(own)]
    wait(under_way)
    k, v = (call.k_layout.join(parts, axis=2) for parts in zip(*every, strict=True))
    return k, v


def scattered(call: Call, found: Pair) -> Pair:
    """Sum the gradients of this rank's keys and values over the ranks, in their order."""
    comm, layout = call.comm, call.k_layout
    parts: list[Pair | None] = [None] * comm.size
    under_way: list[Transfer] = []
    sent = []
    own, xp = _of_rank(layout, found, comm.rank), library(found[0])
    parts[comm.rank] = own
    with comm.together():
        for n in _others(call):
            if call.needs(n, comm.rank):
                dk, dv = map(xp.empty_like, own)
                parts[n] = dk, dv
                under_way += [comm.receive(x, n, _GRADIENTS + m) for m, x in enumerate((dk, dv))]
            if call.needs(comm.rank, n):
                sent.append(_of_rank(layout, found, n))
                under_way += [comm.send(x, n, _GRADIENTS + m) for m, x in enumerate(sent[-1])]
    wait(under_way)
    first, *others = (part for part in parts if part is not None)
    dk, dv = first
    for other_dk, other_dv in others:
        dk, dv = dk + other_dk, dv + other_dv
    return dk, dv


def _whole(call: Call) -> Call:
    """Let one part hold all keys, in their order."""
    return replace(call, k_layout=Layout.contiguous([call.k_layout.length]))


def _of_rank(layout: Layout, pair: Pair, rank: int) -> Pair:
    k, v = (layout.take(x, rank, axis=2) for x in pair)
    return k, v


def _others(call: Call) -> list[int]:
    return [n for n in range(call.comm.size) if n != call.comm.rank]
