"""A rank's queries over keys that come in parts, block by block: results and gradients."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn.algorithm.residuals import has_large_lse
from tileattn.distributed.arrays import add, add_narrow, library
from tileattn.distributed.call import Call
from tileattn.distributed.comm import sum_in_order
from tileattn.distributed.rows import rows_of
from tileattn.results import Attention, Gradients

Array = NDArray[Any]
Pair = tuple[Array, Array]


def attend(call: Call, arriving: Iterable[tuple[int, Pair]]) -> Attention:
    """Compute the rows of this rank's queries, over the keys and values of ranks as they come."""
    x, segments, rows = call.operands, call.q_layout.segments(call.comm.rank), rows_of(call)
    with np.errstate(all="ignore"):
        for source, (k, v) in arriving:
            for a in segments:
                for c in call.k_layout.segments(source):
                    if call.visibility.block(a, c):
                        q = call.wide(x.q[..., a.rows, :])
                        keys = call.wide(k[..., c.rows, :]), call.wide(v[..., c.rows, :])
                        rows.join(a, tileattn.forward(q, *keys, **call.block(a, c)))
        return rows.finish()


def precise(
    call: Call, attention: Attention, forward: Callable[[Call], Attention]
) -> tuple[Call, Attention]:
    """Have sums of float64 where the rounding of lse would show in gradients: blocks lack keys.

    On a GPU they keep their dtype: to look at lse there, the host would have to wait for it.
    """
    if call.on_gpu:
        return call, attention
    if any(call.comm.gather(has_large_lse(attention.lse, call.problem.dtype).any())):
        call = replace(call, sums=np.dtype(np.float64))
        attention = Attention(attention.out, forward(call).lse)
    return call, attention


class Sums:
    """Gradients of this rank's queries and of parameters, summed block by block."""

    def __init__(
        self, call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str]
    ) -> None:
        x, aux = call.operands, call.options.get("aux") or ()
        self._call, self._wrt = call, wrt
        self._dlse = None if dlse is None else call.wide(dlse)
        self._dout, self._out, self._lse = map(call.wide, (dout, *attention))
        self._xp = xp = library(x.q)
        self.dq = xp.zeros(x.q.shape, call.sums)
        self.dbias = None if "bias" not in wrt else xp.zeros(x.bias.shape, call.sums)
        self.daux = [None if a.dtype.kind in "biu" else xp.zeros(a.shape, np.float64) for a in aux]

    def of_keys(self, source: int, k: Array, v: Array) -> Pair:
        """Add the blocks of the keys of a rank; return the gradients of k and v."""
        call = self._call
        dk, dv = (self._xp.zeros(a.shape, call.sums) for a in (k, v))
        for a in call.q_layout.segments(call.comm.rank):
            for c in call.k_layout.segments(source):
                if not call.visibility.block(a, c):
                    continue
                keys = call.wide(k[..., c.rows, :]), call.wide(v[..., c.rows, :])
                grads = self._of_block(a.rows, *keys, call.block(a, c), self._wrt - {"sinks"})
                for total, part, rows in (
                    (self.dq, grads.dq, a.rows),
                    (dk, grads.dk, c.rows),
                    (dv, grads.dv, c.rows),
                ):
                    if part is not None:
                        add(total, part, rows)
                if self.dbias is not None:
                    add_narrow(self.dbias[(..., *call.cut(self.dbias, a, c))], grads.dbias)
                for total, part in zip(self.daux, grads.daux or (), strict=False):
                    if total is not None and part is not None:
                        add_narrow(total, part)
        return dk, dv

    def gradients(self, dk: Array, dv: Array) -> Gradients:
        """Give all gradients, given those of this rank's keys and values."""
        call, wrt = self._call, self._wrt
        with np.errstate(all="ignore"):
            dq, own_dk, own_dv = (
                g.astype(call.problem.dtype, copy=False) if name in wrt else None
                for name, g in zip("qkv", (self.dq, dk, dv), strict=True)
            )
            daux = None
            if "aux" in wrt:
                daux = tuple(
                    None if g is None else sum_in_order(call.comm, g).astype(a.dtype, copy=False)
                    for g, a in zip(self.daux, call.options["aux"], strict=True)
                )
            return Gradients(dq, own_dk, own_dv, self.of_bias(), self.of_sinks(), daux)

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
        sinks = x.sinks.astype(np.float64)  # the sum over the queries is rounded once
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
            *(dout, q, k, v, *saved),
            dlse=dlse,
            wrt=tuple(sorted(wrt)),
            deterministic=self._call.deterministic,
            **options,
        )
