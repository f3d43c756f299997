"""A rank's queries over keys that come in parts, block by block: results and gradients."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn.distributed.arrays import add, add_narrow, library
from tileattn.distributed.call import Call
from tileattn.distributed.layout import Segment
from tileattn.distributed.rows import rows_of, sums_of
from tileattn.results import Attention, Gradients

Array = NDArray[Any]
Pair = tuple[Array, Array]


def attend(call: Call, arriving: Iterable[tuple[int, Pair]], to: Attention) -> None:
    """Compute the rows of this rank's queries, over the keys and values of ranks as they come."""
    rows = rows_of(call, to)
    with np.errstate(all="ignore"):
        for source, (k, v) in arriving:
            for c, pieces in call.blocks.of(source):
                keys = call.wide(k[..., c.rows, :]), call.wide(v[..., c.rows, :])
                for a in pieces:
                    rows.attend(a, *keys, call.block(a, c))
                del keys
            del k, v  # before the next ones arrive
        rows.finish()


class Upstream(NamedTuple):
    """What the backward pass is given for some heads of this rank's queries."""

    dout: Array
    out: Array
    lse: Array
    dlse: Array | None


class Parameters(NamedTuple):
    """Sums of the gradients of what heads share, over blocks of this rank; wide.

    None stands for what is not asked for, or has none.
    """

    dbias: Array | None
    dsinks: Array | None
    daux: list[Array | None]


class Sums:
    """Gradients of some heads of this rank's queries, and of parameters, summed block by block.

    Parameters
    ----------
    call : Call
        Of these heads.
    upstream : Upstream
        What is given for them.
    wrt : frozenset of str
        Which gradients are asked for.
    dq : array or None
        Where those of the queries go.
    parameters : Parameters
        What those of parameters are added to.
    """

    def __init__(
        self,
        call: Call,
        upstream: Upstream,
        wrt: frozenset[str],
        dq: Array | None,
        parameters: Parameters,
    ) -> None:
        self._call, self._upstream, self._wrt = call, upstream, wrt
        self._dq = None if dq is None else sums_of(call, dq)
        self._parameters = parameters

    def of_keys(self, source: int, k: Array, v: Array, sums: Callable[[], Pair]) -> Pair:
        """Add the blocks of the keys of a rank, whose gradients are added to ``sums()``.

        These are asked for when the first block is under way: they may be still to arrive.
        """
        call, found = self._call, None
        with np.errstate(all="ignore"):
            for c, pieces in call.blocks.of(source):
                keys = call.wide(k[..., c.rows, :]), call.wide(v[..., c.rows, :])
                for a in pieces:
                    grads = self._of_block(a.rows, *keys, call.block(a, c), self._wrt - {"sinks"})
                    found = sums() if found is None else found
                    self._add(a, c, grads, found)
                    del grads  # before the next block is computed
                del keys
        return sums() if found is None else found

    def finish(self) -> None:
        """Round the gradients of queries, and add those of sinks."""
        with np.errstate(all="ignore"):
            if self._dq is not None:
                self._dq.finish()
            if self._parameters.dsinks is not None:
                add_narrow(self._parameters.dsinks, self._of_sinks())

    def _add(self, a: Segment, c: Segment, grads: Gradients, sums: Pair) -> None:
        if self._dq is not None:
            self._dq.add(a, grads.dq)
        for total, part in zip(sums, (grads.dk, grads.dv), strict=True):
            if part is not None:
                add(total, part, c.rows)
        dbias = self._parameters.dbias
        if dbias is not None:
            add_narrow(dbias[(..., *self._call.cut(dbias, a, c))], grads.dbias)
        for whole, part in zip(self._parameters.daux, grads.daux or (), strict=False):
            if whole is not None and part is not None:
                add_narrow(whole, part)

    def _of_sinks(self) -> Array:
        """Give the gradients of the sinks: those of queries without keys."""
        call, x = self._call, self._call.operands
        k, v = (call.wide(a[..., :0, :]) for a in (x.k, x.v))
        sinks = x.sinks.astype(np.float64)  # the sum over the queries is rounded once
        options = {"sinks": sinks, "backend": call.backend}
        total: Array = library(x.q).zeros(sinks.shape, np.float64)
        for a in call.blocks.pieces:
            total += self._of_block(a.rows, k, v, options, frozenset({"sinks"})).dsinks
        return total

    def _of_block(
        self, rows: slice, k: Array, v: Array, options: dict[str, Any], wrt: frozenset[str]
    ) -> Gradients:
        call, given = self._call, self._upstream
        q, dout, out = (
            call.wide(x[..., rows, :]) for x in (call.operands.q, given.dout, given.out)
        )
        lse, dlse = (
            None if x is None else call.wide(x[..., rows]) for x in (given.lse, given.dlse)
        )
        return tileattn.backward(
            *(dout, q, k, v, out, lse),
            dlse=dlse,
            wrt=tuple(sorted(wrt)),
            deterministic=call.deterministic,
            **options,
        )
