"""Ring attention: keys and values travel from rank to rank, and every rank keeps its queries.

At step t rank r has the keys of rank ``r - t``; while it computes with them, they travel on to rank
``r + 1``. Keys go as far as the last rank that attends to them, and no further. In the backward
pass the gradients of keys and values follow them and are summed on the way, in one order, and
return to the rank that holds the keys.

References
----------
Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.blocks import Pair, Sums, attend, precise
from tileattn.distributed.call import Call
from tileattn.distributed.comm import Transfer, wait
from tileattn.results import Attention, Gradients

Array = NDArray[Any]

_KEYS, _GRADIENTS, _RETURNED = 0, 2, 4  # kinds of messages: of k and v each, their gradients
_KINDS = 6


def forward(call: Call) -> Attention:
    """Compute the rows of this rank's queries."""
    return attend(call, travelling(call))


def backward(
    call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str]
) -> Gradients:
    """Compute the gradients of this rank's arrays, and those of what all ranks share."""
    rank, size = call.comm.rank, call.comm.size
    call, attention = precise(call, attention, forward)
    sums = Sums(call, dout, attention, dlse, wrt)
    own: Pair = (np.empty(0), np.empty(0))
    reach, sent = call.reach(), list[Transfer]()
    for source, (k, v) in travelling(call):
        step = (rank - source) % size
        found = sums.of_keys(source, k, v)
        if step:
            earlier, arriving = _receive(call, source, (rank - 1) % size, _GRADIENTS)
            wait(arriving)
            found = earlier[0] + found[0], earlier[1] + found[1]
        if step < reach[source]:
            sent += _send(call, found, source, (rank + 1) % size, _GRADIENTS)
        elif step:
            sent += _send(call, found, source, source, _RETURNED)
        else:
            own = found
    if reach[rank]:
        own, arriving = _receive(call, rank, (rank + reach[rank]) % size, _RETURNED)
        wait(arriving)
    wait(sent)
    return sums.gradients(*own)


def travelling(call: Call) -> Iterator[tuple[int, Pair]]:
    """Yield the keys and values of each rank that this one needs or passes on, its own first."""
    rank, size, reach = call.comm.rank, call.comm.size, call.reach()
    sources = [(rank - t) % size for t in range(size) if t <= reach[(rank - t) % size]]
    x = call.operands
    pair: Pair = (np.ascontiguousarray(x.k), np.ascontiguousarray(x.v))
    arriving: list[Transfer] = []
    sent = []
    for n, source in enumerate(sources):
        wait(arriving)
        if (rank - source) % size < reach[source]:
            sent += _send(call, pair, source, (rank + 1) % size, _KEYS)
        upcoming: Pair = pair
        if n + 1 < len(sources):
            upcoming, arriving = _receive(call, sources[n + 1], (rank - 1) % size, _KEYS)
        yield source, pair
        pair = upcoming
    wait(sent)


def _send(call: Call, pair: Pair, source: int, to: int, kind: int) -> list[Transfer]:
    return [call.comm.send(x, to, source * _KINDS + kind + n) for n, x in enumerate(pair)]


def _receive(call: Call, source: int, sender: int, kind: int) -> tuple[Pair, list[Transfer]]:
    """Begin to receive what belongs to the keys of a rank."""
    P, n = call.problem, call.k_layout.length_of(source)
    dtype = P.dtype if kind == _KEYS else call.sums
    k, v = (np.empty((P.B, P.Hkv, n, columns), dtype) for columns in (P.D, P.Dv))
    tags = (source * _KINDS + kind + m for m in range(2))
    return (k, v), [call.comm.receive(x, sender, tag) for x, tag in zip((k, v), tags, strict=True)]
