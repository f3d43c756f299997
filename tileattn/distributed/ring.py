"""Ring attention: keys and values travel from rank to rank, and every rank keeps its queries.

At step t rank r has the keys of rank ``r - t``; while it computes with them, they travel on to rank
``r + 1``. What a rank sends and receives in a step begins together. Keys go as far as the last rank
that attends to them, and no further. In the backward pass the gradients of keys and values follow
them and are summed on the way, in one order, and return to the rank that holds the keys.

References
----------
Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.arrays import library
from tileattn.distributed.blocks import Pair, Sums, attend, precise
from tileattn.distributed.call import Call
from tileattn.distributed.comm import Transfer, wait
from tileattn.results import Attention, Gradients

Array = NDArray[Any]

_KEYS, _GRADIENTS, _RETURNED = 0, 2, 4  # kinds of messages: of k and v each, their gradients
_KINDS = 6


def forward(call: Call) -> Attention:
    """Compute the rows of this rank's queries."""
    return attend(call, forward_pairs(call))


def backward(
    call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str]
) -> Gradients:
    """Compute the gradients of this rank's arrays, and those of what all ranks share."""
    rank, size = call.comm.rank, call.comm.size
    call, attention = precise(call, attention, forward)
    sums = Sums(call, dout, attention, dlse, wrt)
    own: Pair | None = None
    earlier: Pair | None = None
    reach, under_way = call.reach(), list[Transfer]()
    for step, source, pair in _steps(call):
        found = None if pair is None else sums.of_keys(source, *pair)
        wait(under_way)
        if found is not None and earlier is not None:
            for total, before in zip(found, earlier, strict=True):
                np.add(total, before, out=total)
        earlier, under_way = None, []
        with call.comm.together():
            if found is not None and step < reach[source]:
                under_way += _send(call, found, source, (rank + 1) % size, _GRADIENTS)
            elif found is not None and step:
                under_way += _send(call, found, source, source, _RETURNED)
            elif found is not None:
                own = found
            upcoming = (source - 1) % size  # in the next step
            if step < reach[upcoming]:
                earlier, arriving = _receive(call, upcoming, (rank - 1) % size, _GRADIENTS)
                under_way += arriving
            if step and step == reach[rank]:
                own, arriving = _receive(call, rank, (rank + step) % size, _RETURNED)
                under_way += arriving
    wait(under_way)
    if own is None:
        raise RuntimeError("gradients of this rank's keys have not returned")
    return sums.gradients(*own)


def forward_pairs(call: Call) -> Iterator[tuple[int, Pair]]:
    """Yield the keys and values of each rank that come by, this one's first."""
    for _, source, pair in _steps(call):
        if pair is not None:
            yield source, pair


def _steps(call: Call) -> Iterator[tuple[int, int, Pair | None]]:
    """Yield each step, whose keys and values there are, and these where they come so far.

    While a rank computes with them, they are sent on, and the next ones are received: two buffers.
    """
    rank, size, reach = call.comm.rank, call.comm.size, call.reach()
    xp, x = library(call.operands.k), call.operands
    pair: Pair | None = (xp.ascontiguousarray(x.k), xp.ascontiguousarray(x.v))
    under_way: list[Transfer] = []
    for step in range(size):
        source, upcoming = (rank - step) % size, (rank - step - 1) % size
        wait(under_way)
        following: Pair | None = None
        under_way = []
        with call.comm.together():
            if pair is not None and step < reach[source]:
                under_way += _send(call, pair, source, (rank + 1) % size, _KEYS)
            if step < reach[upcoming]:
                following, arriving = _receive(call, upcoming, (rank - 1) % size, _KEYS)
                under_way += arriving
        yield step, source, pair
        pair = following
    wait(under_way)


def _send(call: Call, pair: Pair, source: int, to: int, kind: int) -> list[Transfer]:
    return [call.comm.send(x, to, source * _KINDS + kind + n) for n, x in enumerate(pair)]


def _receive(call: Call, source: int, sender: int, kind: int) -> tuple[Pair, list[Transfer]]:
    """Begin to receive what belongs to the keys of a rank."""
    P, n = call.problem, call.k_layout.length_of(source)
    dtype = P.dtype if kind == _KEYS else call.sums
    xp = library(call.operands.k)
    k, v = (xp.empty((P.B, P.Hkv, n, columns), dtype) for columns in (P.D, P.Dv))
    tags = (source * _KINDS + kind + m for m in range(2))
    return (k, v), [call.comm.receive(x, sender, tag) for x, tag in zip((k, v), tags, strict=True)]
