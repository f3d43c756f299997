"""Head groups: the heads that a rank computes at a time, and where their results go."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.arrays import add_narrow, library
from tileattn.distributed.call import Call, Heads
from tileattn.distributed.comm.agreement import sum_in_order
from tileattn.distributed.schedules.all_to_all import Exchange
from tileattn.distributed.schedules.blockwise_attention import Pair, Parameters, Upstream
from tileattn.results import Attention, Gradients

Array = NDArray[Any]


class ForwardGroup:
    """A head group of the forward pass: the call of its heads, and where its results go."""

    def __init__(self, exchange: Exchange, call: Call, heads: Heads, result: Attention) -> None:
        self.call, self._exchange, self._own, self._result = call, exchange, heads.queries, result

    def room(self) -> Attention:
        """Return buffers for results: views of the final arrays if there is no all-to-all."""
        rows = self._exchange.queries
        return Attention(*(self._exchange.room(x, self._own, rows) for x in self._result))

    def finish(self, found: Attention) -> None:
        """Send results to the owners of the tokens; free the operands."""
        del self.call
        if self._exchange.is_alone:
            return
        pairs = zip(found, self._result, strict=True)
        self._exchange.to_tokens(pairs, self._own, self._exchange.queries)


class Totals:
    """The gradients of a call on this rank, filled by one head group after the other."""

    def __init__(self, call: Call, exchange: Exchange, wrt: frozenset[str]) -> None:
        x, xp, aux = call.operands, library(call.operands.q), call.options.get("aux") or ()
        self.call, self.exchange, self.wrt = call, exchange, wrt
        self.of = {
            name: xp.empty(a.shape, a.dtype) if name in wrt else None
            for name, a in (("q", x.q), ("k", x.k), ("v", x.v))
        }
        learned = [a if "aux" in wrt and a.dtype.kind not in "biu" else None for a in aux]
        self.parameters = Parameters(
            xp.zeros(x.bias.shape, self.bias_dtype) if "bias" in wrt else None,
            xp.zeros(x.sinks.shape, np.float64) if "sinks" in wrt else None,
            [None if a is None else xp.zeros(a.shape, np.float64) for a in learned],
        )
        self.of_keys: Pair | None = None  # sums of the groups so far that read the same keys
        self.exchanges_bias = "bias" in wrt and "bias" in call.with_rows and not exchange.is_alone
        self.shared_rows: Array | None = None  # dbias of all tokens, if heads share the bias
        if self.exchanges_bias and x.bias.shape[1] == 1:
            shape = x.bias.shape[0], 1, exchange.queries.length, x.bias.shape[3]
            self.shared_rows = xp.zeros(shape, self.bias_dtype)

    @property
    def bias_dtype(self) -> np.dtype[Any]:
        """Dtype in which dbias is summed and sent: no narrower than the bias."""
        own, sums = self.call.operands.bias.dtype, self.call.sums
        return sums if own.itemsize < sums.itemsize else own

    def gradients(self) -> Gradients:
        """Return all gradients; gradients of shared inputs are summed over the ranks."""
        call, (dbias, dsinks, daux) = self.call, self.parameters
        given = call.options
        if self.shared_rows is not None:  # each rank has a part of the sum over heads
            self.return_rows(self.shared_rows, slice(0, 1), self.exchange.group.size)
        with np.errstate(all="ignore"):
            if dbias is not None:
                bias = given["bias"]
                dbias = dbias if "bias" in call.with_rows else sum_in_order(call.comm, dbias)
                dbias = dbias.reshape(bias.shape).astype(bias.dtype, copy=False)
            if dsinks is not None:
                dtype = given["sinks"].dtype
                dsinks = sum_in_order(call.comm, dsinks).astype(dtype, copy=False)
            of_aux = None
            if "aux" in self.wrt:
                of_aux = tuple(
                    None if g is None else sum_in_order(call.comm, g).astype(a.dtype, copy=False)
                    for g, a in zip(daux, given["aux"], strict=True)
                )
        return Gradients(self.of["q"], self.of["k"], self.of["v"], dbias, dsinks, of_aux)

    def return_rows(self, dbias: Array, own: slice, heads: int) -> None:
        """Send the gradients of bias rows to the owners of the rows, which add them."""
        total, exchange = self.parameters.dbias, self.exchange
        if total is None:
            return
        tokens = exchange.queries.length_of(exchange.group.rank)
        shape = total.shape[0], heads, tokens, total.shape[3]
        found = library(dbias).zeros(shape, dbias.dtype)
        exchange.to_tokens([(dbias, found)], own, exchange.queries)
        for axis in (1, 2):
            found = found.sum(axis=axis, keepdims=True) if total.shape[axis] == 1 else found
        total += found


class BackwardGroup:
    """A head group of the backward pass: the call of its heads, and where its gradients go.

    ``is_last`` is True if no later group reads the same keys.
    """

    def __init__(
        self, totals: Totals, call: Call, heads: Heads, upstream: Upstream, *, is_last: bool
    ) -> None:
        self.call, self.upstream, self.wrt = call, upstream, totals.wrt
        self._totals, self._heads, self._is_last = totals, heads, is_last
        self.parameters = self._parameters()

    def room(self) -> Array | None:
        """Return a buffer for dq; None if it is not requested."""
        totals, dq = self._totals, self._totals.of["q"]
        exchange = totals.exchange
        return None if dq is None else exchange.room(dq, self._heads.queries, exchange.queries)

    def finish_rows(self, dq: Array | None) -> None:
        """Send dq to the owners of the tokens; free the operands."""
        del self.call, self.upstream
        totals, exchange, whole = self._totals, self._totals.exchange, self._totals.of["q"]
        if dq is not None and whole is not None and not exchange.is_alone:
            exchange.to_tokens([(dq, whole)], self._heads.queries, exchange.queries)
        dbias = self.parameters.dbias
        if totals.exchanges_bias and totals.shared_rows is None and dbias is not None:
            totals.return_rows(dbias, self._heads.queries, totals.call.problem.Hq)

    def finish_keys(self, dk: Array, dv: Array) -> None:
        """Send dk and dv, summed over the groups that read the same keys, to their owners."""
        totals, exchange = self._totals, self._totals.exchange
        found: Pair = (dk, dv)
        if totals.of_keys is not None:
            for total, part in zip(totals.of_keys, found, strict=True):
                add_narrow(total, part)
            found, totals.of_keys = totals.of_keys, None
        if not self._is_last:
            sums = totals.call.sums
            totals.of_keys = found[0].astype(sums, copy=False), found[1].astype(sums, copy=False)
            return
        wholes = totals.of["k"], totals.of["v"]
        pairs = [(x, y) for x, y in zip(found, wholes, strict=True) if y is not None]
        with np.errstate(all="ignore"):  # a cast to 16 bits may overflow
            exchange.to_tokens(pairs, self._heads.keys, exchange.keys)

    def _parameters(self) -> Parameters:
        """Return the sums for these heads: views, or buffers with other ranks' bias rows."""
        totals, x = self._totals, self.call.operands
        dbias, dsinks, daux = totals.parameters
        own = totals.exchange.heads(self._heads.queries, totals.call.problem.Hq)
        if totals.shared_rows is not None:
            dbias = totals.shared_rows
        elif totals.exchanges_bias:
            dbias = library(x.q).zeros(x.bias.shape, totals.bias_dtype)
        elif dbias is not None and dbias.shape[1] > 1:
            dbias = dbias[:, own]
        return Parameters(dbias, None if dsinks is None else dsinks[own], daux)
