"""Attention by heads: ranks exchange tokens for heads, and each computes some heads of all tokens.

Of q, k and v each rank sends to every other its tokens of that rank's heads, and gets the output of
its tokens back. Nothing is computed in blocks, so results are those of one call to the bit.

References
----------
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn.distributed.call import Call
from tileattn.distributed.comm import sum_in_order, wait
from tileattn.distributed.layout import Layout
from tileattn.problem import Problem
from tileattn.results import Attention, Gradients

Array = NDArray[Any]


def why_not(problem: Problem, ranks: int) -> str | None:
    """Why heads cannot be shared among so many ranks."""
    if problem.Hkv % ranks == 0:
        return None
    return f"k has {problem.Hkv} heads, and {ranks} ranks share them; schedule='ring' is accepted"


def forward(call: Call) -> Attention:
    """Compute the rows of this rank's queries."""
    exchange = Exchange(call)
    attention = tileattn.forward(*exchange.operands(), **exchange.options())
    return Attention(*(exchange.to_tokens(x, call.q_layout) for x in attention))


def backward(
    call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str]
) -> Gradients:
    """Compute the gradients of this rank's arrays, and those of what all ranks share."""
    exchange, given = Exchange(call), call.options
    options = exchange.options()
    if "aux" in options:
        options["aux"] = tuple(map(call.wider, options["aux"]))
    rows = (dout, *attention) if dlse is None else (dout, *attention, dlse)
    dout, out, lse, *more = (exchange.to_heads(x, call.q_layout) for x in rows)
    options |= {"dlse": more[0] if more else None, "wrt": tuple(sorted(wrt))}
    grads = tileattn.backward(dout, *exchange.operands(), out, lse, **options)
    layouts = call.q_layout, call.k_layout, call.k_layout
    dq, dk, dv = (
        None if g is None else exchange.to_tokens(g, layout)
        for g, layout in zip(grads[:3], layouts, strict=True)
    )
    dbias, dsinks, daux = grads.dbias, grads.dsinks, grads.daux
    if dbias is not None:
        bias = given["bias"]
        dbias = exchange.of_bias(dbias).reshape(bias.shape).astype(bias.dtype, copy=False)
    if dsinks is not None:
        dsinks = np.concatenate(call.comm.gather(dsinks))
    if daux is not None:
        daux = tuple(
            None if g is None else sum_in_order(call.comm, g).astype(x.dtype, copy=False)
            for g, x in zip(daux, given["aux"], strict=True)
        )
    return Gradients(dq, dk, dv, dbias, dsinks, daux)


class Exchange:
    """Sends tokens for heads, and heads for tokens.

    Parameters
    ----------
    call : Call
        The part of this rank.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._comm = call, call.comm
        heads = call.problem.Hq // self._comm.size
        self._heads = slice(self._comm.rank * heads, (self._comm.rank + 1) * heads)

    def operands(self) -> tuple[Array, Array, Array]:
        """Give q, k and v of some heads, all tokens."""
        x, keys = self._call.operands, self._call.k_layout
        q = self.to_heads(x.q, self._call.q_layout)
        return q, self.to_heads(x.k, keys), self.to_heads(x.v, keys)

    def options(self) -> dict[str, Any]:
        """Give the options of the call of some heads."""
        call, x = self._call, self._call.operands
        given = call.common()
        given |= {"kv_lengths": x.kv_lengths, "q_offset": x.q_offset}
        if call.has_indices:
            start = np.array([0, self._heads.start, 0, 0])
            given["origin"] = start if x.origin is None else x.origin + start
        if x.alibi_slopes is not None:
            given["alibi_slopes"] = x.alibi_slopes[:, self._heads]
            if len(x.alibi_slopes) == 1:
                given["alibi_slopes"] = given["alibi_slopes"][0]
        if x.sinks is not None:
            given["sinks"] = x.sinks[self._heads]
        for name, rows in (("bias", call.bias_rows), ("mask", call.mask_rows)):
            array = getattr(x, name)
            if array is not None:
                given[name] = self._with_all_rows(call.wider(array), rows)
        return given

    def to_heads(self, x: Array, layout: Layout) -> Array:
        """Give some heads of all tokens, of this rank's tokens of all heads."""
        heads = x.shape[1] // self._comm.size
        outgoing = [x[:, n * heads : (n + 1) * heads] for n in range(self._comm.size)]
        return self._joined(outgoing, layout)

    def to_tokens(self, x: Array, layout: Layout) -> Array:
        """Give this rank's tokens of all heads, of all tokens of some heads."""
        outgoing = [layout.take(x, rank, axis=2) for rank in range(self._comm.size)]
        shape = *x.shape[:2], layout.length_of(self._comm.rank), *x.shape[3:]
        return np.concatenate(self._exchanged(outgoing, [shape] * self._comm.size), axis=1)

    def of_bias(self, dbias: Array) -> Array:
        """Give the gradient of this rank's bias, of that of some heads."""
        call, bias = self._call, self._call.operands.bias
        if call.bias_rows:
            # Of a bias that heads share, each rank has a part of the sum.
            parts = self.to_tokens(dbias, call.q_layout)
            if bias.shape[1] == 1:
                parts = parts.sum(axis=1, keepdims=True)
            return parts.sum(axis=2, keepdims=True) if bias.shape[2] == 1 else parts
        if bias.shape[1] == 1:
            return sum_in_order(self._comm, dbias)
        return np.concatenate(self._comm.gather(dbias), axis=1)

    def _with_all_rows(self, x: Array, rows: bool) -> Array:
        """Give some heads, or the one for all, of a bias or mask for all queries."""
        call, shared = self._call, x.shape[1] == 1
        if not rows:
            return x if shared else x[:, self._heads]
        own = call.q_layout.length_of(self._comm.rank)
        x = np.broadcast_to(x, (*x.shape[:2], own, x.shape[3]))
        return (
            self._joined([x] * self._comm.size, call.q_layout)
            if shared
            else self.to_heads(x, call.q_layout)
        )

    def _joined(self, outgoing: list[Array], layout: Layout) -> Array:
        shape = outgoing[0].shape
        sizes = [(*shape[:2], layout.length_of(n), *shape[3:]) for n in range(self._comm.size)]
        joined: Array = layout.join(self._exchanged(outgoing, sizes), axis=2)
        return joined

    def _exchanged(self, outgoing: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
        """Send an array to each rank; return those of all ranks, in their order."""
        rank, comm = self._comm.rank, self._comm
        incoming = [np.empty(shape, outgoing[0].dtype) for shape in shapes]
        others = [n for n in range(comm.size) if n != rank]
        under_way = [comm.receive(incoming[n], n, 0) for n in others]
        under_way += [comm.send(np.ascontiguousarray(outgoing[n]), n, 0) for n in others]
        incoming[rank] = np.ascontiguousarray(outgoing[rank])
        wait(under_way)
        return incoming
