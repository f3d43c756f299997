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
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn.algorithm.residuals import has_large_lse
from tileattn.algorithm.softmax import RowState
from tileattn.distributed.call import Call
from tileattn.distributed.comm import Transfer, sum_in_order, wait
from tileattn.results import Attention, Gradients

Array = NDArray[Any]
Pair = tuple[Array, Array]

_KEYS, _GRADIENTS, _RETURNED = 0, 2, 4  # kinds of messages: of k and v each, their gradients
_KINDS = 6


def forward(call: Call) -> Attention:
    """Compute the rows of this rank's queries."""
    P, x, segments = call.problem, call.operands, call.q_layout.segments(call.comm.rank)
    out, lse = np.empty((P.B, P.Hq, P.Nq, P.Dv), P.dtype), np.empty((P.B, P.Hq, P.Nq), call.sums)
    states = [RowState.empty((P.B, P.Hq, a.stop - a.start), P.Dv, call.sums) for a in segments]
    with np.errstate(all="ignore"):
        for source, (k, v) in travelling(call):
            for state, a in zip(states, segments, strict=True):
                for c in call.k_layout.segments(source):
                    if call.visible(a, c):
                        q = call.wide(x.q[..., a.rows, :])
                        keys = call.wide(k[..., c.rows, :]), call.wide(v[..., c.rows, :])
                        part = tileattn.forward(q, *keys, **call.block(a, c))
                        state.merge(RowState.of_result(*part, call.sums))
        for state, a in zip(states, segments, strict=True):
            if x.sinks is not None:
                state.sink(x.sinks[:, np.newaxis])
            out[..., a.rows, :], lse[..., a.rows] = state.finalize()
    return Attention(out, lse)


def backward(
    call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str]
) -> Gradients:
    """Compute the gradients of this rank's arrays, and those of what all ranks share."""
    P, rank, size = call.problem, call.comm.rank, call.comm.size
    if any(call.comm.gather(has_large_lse(attention.lse, P.dtype).any())):
        # The rounding of lse would show, and no rank has all keys to compute it again from.
        call = replace(call, sums=np.dtype(np.float64))
        attention = Attention(attention.out, forward(call).lse)
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
    with np.errstate(all="ignore"):
        dq, dk, dv = (
            g.astype(P.dtype, copy=False) if name in wrt else None
            for name, g in zip("qkv", (sums.dq, *own), strict=True)
        )
        daux = None
        if "aux" in wrt:
            daux = tuple(
                None if g is None else sum_in_order(call.comm, g).astype(a.dtype, copy=False)
                for g, a in zip(sums.daux, call.options["aux"], strict=True)
            )
        return Gradients(dq, dk, dv, sums.of_bias(), sums.of_sinks(), daux)


class Sums:
    """Gradients of this rank's queries and of parameters, summed block by block."""

    def __init__(
        self, call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str]
    ) -> None:
        x, aux = call.operands, call.options.get("aux") or ()
        self._call, self._wrt = call, wrt
        self._dlse = None if dlse is None else call.wide(dlse)
        self._dout, self._out, self._lse = map(call.wide, (dout, *attention))
        self.dq = np.zeros(x.q.shape, call.sums)
        self.dbias = None if "bias" not in wrt else np.zeros(x.bias.shape, call.sums)
        self.daux = [None if a.dtype.kind in "biu" else np.zeros(a.shape, np.float64) for a in aux]

    def of_keys(self, source: int, k: Array, v: Array) -> Pair:
        """Add the blocks of the keys of a rank; return the gradients of k and v."""
        call = self._call
        dk, dv = (np.zeros(a.shape, call.sums) for a in (k, v))
        for a in call.q_layout.segments(call.comm.rank):
            for c in call.k_layout.segments(source):
                if not call.visible(a, c):
                    continue
                keys = call.wide(k[..., c.rows, :]), call.wide(v[..., c.rows, :])
                grads = self._of_block(a.rows, *keys, call.block(a, c), self._wrt - {"sinks"})
                _add(self.dq[..., a.rows, :], grads.dq)
                _add(dk[..., c.rows, :], grads.dk)
                _add(dv[..., c.rows, :], grads.dv)
                if self.dbias is not None:
                    _add(self.dbias[(..., *call.cut(self.dbias, a, c))], grads.dbias)
                for total, part in zip(self.daux, grads.daux or (), strict=False):
                    _add(total, part)
        return dk, dv

    def of_bias(self) -> Array | None:
        """Give the gradient of the bias, over all ranks where they have it in common."""
        call = self._call
        if self.dbias is None:
            return None
        total = self.dbias if call.bias_rows else sum_in_order(call.comm, self.dbias)
        bias = call.options["bias"]
        return total.reshape(bias.shape).astype(bias.dtype, copy=False)

    def of_sinks(self) -> Array | None:
        """Give the gradient of the sinks, over all ranks: that of queries without keys."""
        call, x = self._call, self._call.operands
        if "sinks" not in self._wrt:
            return None
        k, v = (call.wide(a[..., :0, :]) for a in (x.k, x.v))
        sinks = x.sinks.astype(np.float64)
        options = {"sinks": sinks, "backend": call.backend}
        part = self._of_block(slice(None), k, v, options, frozenset({"sinks"})).dsinks
        total = sum_in_order(call.comm, part)
        return total.astype(x.sinks.dtype, copy=False)

    def _of_block(
        self, rows: slice, k: Array, v: Array, options: dict[str, Any], wrt: frozenset[str]
    ) -> Gradients:
        q = self._call.wide(self._call.operands.q[..., rows, :])
        dlse = None if self._dlse is None else self._dlse[..., rows]
        saved = self._out[..., rows, :], self._lse[..., rows]
        dout = self._dout[..., rows, :]
        return tileattn.backward(
            dout, q, k, v, *saved, dlse=dlse, wrt=tuple(sorted(wrt)), **options
        )


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


def _add(total: Array | None, part: Array | None) -> None:
    if total is not None and part is not None:
        total += part


def _send(call: Call, pair: Pair, source: int, to: int, kind: int) -> list[Transfer]:
    return [call.comm.send(x, to, source * _KINDS + kind + n) for n, x in enumerate(pair)]


def _receive(call: Call, source: int, sender: int, kind: int) -> tuple[Pair, list[Transfer]]:
    """Begin to receive what belongs to the keys of a rank."""
    P, n = call.problem, call.k_layout.length_of(source)
    dtype = P.dtype if kind == _KEYS else call.sums
    k, v = (np.empty((P.B, P.Hkv, n, columns), dtype) for columns in (P.D, P.Dv))
    tags = (source * _KINDS + kind + m for m in range(2))
    return (k, v), [call.comm.receive(x, sender, tag) for x, tag in zip((k, v), tags, strict=True)]
