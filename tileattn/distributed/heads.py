"""Attention by heads: ranks exchange tokens for heads, and each computes some heads.

Of q, k and v each rank of a group sends to every other its tokens of that rank's heads, and gets
the output of its tokens back. Between the exchanges each rank has a smaller call: some heads of all
tokens of its group. Where all ranks are one group, that is one call on all tokens, and results have
its bits. Where there are several groups, ranks with the same heads are a ring.

References
----------
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509;
Fang and Zhao, USP: A Unified Sequence Parallelism Approach, arXiv:2405.07719.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed import ring, single
from tileattn.distributed.arrays import library
from tileattn.distributed.call import Call
from tileattn.distributed.comm import gathered, sum_in_order, wait
from tileattn.distributed.groups import across, inside, layout_across, layout_inside
from tileattn.distributed.layout import Layout
from tileattn.results import Attention, Gradients

Array = NDArray[Any]


def forward(call: Call, n: int) -> Attention:
    """Compute the rows of this rank's queries, in groups of n ranks."""
    exchange = Exchange(call, n)
    smaller = exchange.call()
    attention = _schedule(smaller).forward(smaller)
    return Attention(*(exchange.to_tokens(x, exchange.queries) for x in attention))


def backward(
    call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str], n: int
) -> Gradients:
    """Compute the gradients of this rank's arrays, and those of what all ranks share."""
    exchange, given = Exchange(call, n), call.options
    smaller = exchange.call()
    rows = (dout, *attention) if dlse is None else (dout, *attention, dlse)
    dout, out, lse, *more = (exchange.to_heads(x, exchange.queries) for x in rows)
    upstream = more[0] if more else None
    grads = _schedule(smaller).backward(smaller, dout, Attention(out, lse), upstream, wrt)
    layouts = exchange.queries, exchange.keys, exchange.keys
    dq, dk, dv = (
        None if g is None else exchange.to_tokens(g, layout)
        for g, layout in zip(grads[:3], layouts, strict=True)
    )
    dbias, dsinks, daux = grads.dbias, grads.dsinks, grads.daux
    if dbias is not None:
        bias = given["bias"]
        dbias = exchange.of_bias(dbias).reshape(bias.shape).astype(bias.dtype, copy=False)
    if dsinks is not None:
        dsinks = _joined(gathered(exchange.group, dsinks), axis=0)
    if daux is not None:
        daux = tuple(
            None if g is None else sum_in_order(exchange.group, g).astype(x.dtype, copy=False)
            for g, x in zip(daux, given["aux"], strict=True)
        )
    return Gradients(dq, dk, dv, dbias, dsinks, daux)


def _schedule(smaller: Call) -> Any:
    return ring if smaller.comm.size > 1 else single


class Exchange:
    """Sends tokens for heads, and heads for tokens, inside a group.

    Parameters
    ----------
    call : Call
        The part of this rank.
    n : int
        Ranks of a group; it divides their number, and the heads of k.
    """

    def __init__(self, call: Call, n: int) -> None:
        self._call, self._n, group = call, n, call.comm.rank // n
        self.group = inside(call.comm, n)
        self.queries = layout_inside(call.q_layout, group, n)
        self.keys = layout_inside(call.k_layout, group, n)
        heads = call.problem.Hq // n
        self._heads = slice(self.group.rank * heads, (self.group.rank + 1) * heads)

    def call(self) -> Call:
        """Give the call of some heads of the tokens of the group, among ranks with these heads."""
        call, n, x, options = self._call, self._n, self._call.operands, dict(self._call.options)
        P = call.problem
        arrays: dict[str, Any] = {"q": self.to_heads(x.q, self.queries)}
        arrays |= {"k": self.to_heads(x.k, self.keys), "v": self.to_heads(x.v, self.keys)}
        if call.has_indices:
            start = np.array([0, self._heads.start, 0, 0])
            arrays["origin"] = start if x.origin is None else x.origin + start
        if x.alibi_slopes is not None:
            arrays["alibi_slopes"] = slopes = x.alibi_slopes[:, self._heads]
            options["alibi_slopes"] = slopes[0] if len(slopes) == 1 else slopes
        if x.sinks is not None:
            arrays["sinks"] = x.sinks[self._heads]
        for name, rows in (("bias", call.bias_rows), ("mask", call.mask_rows)):
            array = getattr(x, name)
            if array is not None:
                arrays[name] = options[name] = self._with_all_rows(call.wider(array), rows)
        # Gradients are wide, too: the sum over the group is rounded once.
        if "aux" in options:
            options["aux"] = tuple(map(call.wider, options["aux"]))
        return replace(
            call,
            comm=across(call.comm, n),
            q_layout=layout_across(call.q_layout, n),
            k_layout=layout_across(call.k_layout, n),
            problem=replace(P, Hq=P.Hq // n, Hkv=P.Hkv // n, Nq=self.queries.length),
            operands=x._replace(**arrays),
            options=options,
        )

    def to_heads(self, x: Array, layout: Layout) -> Array:
        """Give some heads of all tokens, of this rank's tokens of all heads."""
        heads = x.shape[1] // self.group.size
        outgoing = [x[:, n * heads : (n + 1) * heads] for n in range(self.group.size)]
        return self._joined(outgoing, layout)

    def to_tokens(self, x: Array, layout: Layout) -> Array:
        """Give this rank's tokens of all heads, of all tokens of some heads."""
        outgoing = [layout.take(x, rank, axis=2) for rank in range(self.group.size)]
        shape = *x.shape[:2], layout.length_of(self.group.rank), *x.shape[3:]
        return _joined(self._exchanged(outgoing, [shape] * self.group.size), axis=1)

    def of_bias(self, dbias: Array) -> Array:
        """Give the gradient of this rank's bias, of that of some heads."""
        call, bias = self._call, self._call.operands.bias
        if call.bias_rows:
            # Of a bias that heads share, each rank has a part of the sum.
            parts = self.to_tokens(dbias, self.queries)
            if bias.shape[1] == 1:
                parts = parts.sum(axis=1, keepdims=True)
            return parts.sum(axis=2, keepdims=True) if bias.shape[2] == 1 else parts
        if bias.shape[1] == 1:
            return sum_in_order(self.group, dbias)
        return _joined(gathered(self.group, dbias), axis=1)

    def _with_all_rows(self, x: Array, rows: bool) -> Array:
        """Give some heads, or the one for all, of a bias or mask for all queries."""
        shared = x.shape[1] == 1
        if not rows:
            return x if shared else x[:, self._heads]
        own = self.queries.length_of(self.group.rank)
        x = library(x).broadcast_to(x, (*x.shape[:2], own, x.shape[3]))
        return (
            self._joined([x] * self.group.size, self.queries)
            if shared
            else self.to_heads(x, self.queries)
        )

    def _joined(self, outgoing: list[Array], layout: Layout) -> Array:
        shape = outgoing[0].shape
        sizes = [(*shape[:2], layout.length_of(n), *shape[3:]) for n in range(self.group.size)]
        joined: Array = layout.join(self._exchanged(outgoing, sizes), axis=2)
        return joined

    def _exchanged(self, outgoing: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
        """Send an array to each rank; return those of all ranks, in their order."""
        rank, comm, xp = self.group.rank, self.group, library(outgoing[0])
        incoming = [xp.empty(shape, outgoing[0].dtype) for shape in shapes]
        outgoing = [xp.ascontiguousarray(x) for x in outgoing]
        others = [n for n in range(comm.size) if n != rank]
        with comm.together():
            under_way = [comm.receive(incoming[n], n, 0) for n in others]
            under_way += [comm.send(outgoing[n], n, 0) for n in others]
        incoming[rank] = outgoing[rank]
        wait(under_way)
        return incoming


def _joined(parts: list[Array], axis: int) -> Array:
    joined: Array = library(parts[0]).concatenate(parts, axis=axis)
    return joined
