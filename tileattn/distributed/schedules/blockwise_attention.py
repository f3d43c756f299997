"""Attention of a rank's queries over key parts, block by block: results and gradients."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn.distributed.arrays import add, add_narrow, library
from tileattn.distributed.call import Call, Heads, requested_gradients
from tileattn.distributed.layout import Segment
from tileattn.distributed.schedules.accumulators import RowSums, rows_of, sums_of
from tileattn.results import Attention, Gradients

Array = NDArray[Any]
Pair = tuple[Array, Array]


def attend(call: Call, arriving: Iterable[tuple[int, Pair]], to: Attention) -> None:
    """Compute the rows of this rank's queries over key parts, in the order in which they arrive."""
    Hkv = call.problem.Hkv
    parts = [
        (one, rows_of(one, Attention(*(queries_of(x, Hkv, some) for x in to))))
        for one, some in calls_of(call)
    ]
    with np.errstate(all="ignore"):
        for source, (k, v) in arriving:
            for c, queries in call.blocks.of(source):
                keys = _rows_of_keys(call, k, v, c)
                for a, (one, rows) in product(queries, parts):
                    rows.attend(a, *keys, one.block(a, c))
                del keys
            del k, v  # before the next ones arrive
        for _, rows in parts:
            rows.finish()


class Upstream(NamedTuple):
    """Residuals and upstream gradients of some heads of this rank's queries."""

    dout: Array
    out: Array
    lse: Array
    dlse: Array | None

    def some(self, Hkv: int, heads: slice) -> "Upstream":
        """Return the rows of some query heads of each key head."""
        dout, out, lse = (queries_of(x, Hkv, heads) for x in self[:3])
        dlse = None if self.dlse is None else queries_of(self.dlse, Hkv, heads)
        return Upstream(dout, out, lse, dlse)


class Parameters(NamedTuple):
    """Sums of dbias, dsinks and daux over the blocks of this rank, in the accumulation dtype.

    None for gradients that are not requested, or do not exist.
    """

    dbias: Array | None
    dsinks: Array | None
    daux: list[Array | None]


class Sums:
    """Gradients of some heads, summed block by block: of queries, keys, values and parameters.

    Without an array for dq, the gradients of queries are not computed.
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
        self._parameters, Hkv = parameters, call.problem.Hkv
        self._parts: list[tuple[Call, Upstream, RowSums | None]] = []
        for one, heads in calls_of(call):
            sums = None if dq is None else sums_of(one, queries_of(dq, Hkv, heads))
            self._parts.append((one, upstream.some(Hkv, heads), sums))

    def of_keys(self, source: int, k: Array, v: Array, sums: Callable[[], Pair]) -> Pair:
        """Compute the blocks of a rank's keys, and add their dk and dv to ``sums()``.

        ``sums`` is called after the first block has been launched: the sums may still be arriving.
        """
        call, found = self._call, None
        with np.errstate(all="ignore"):
            for c, queries in call.blocks.of(source):
                keys = _rows_of_keys(call, k, v, c)
                for a, (one, upstream, dq) in product(queries, self._parts):
                    options = one.block(a, c)
                    wrt = self._wrt - {"sinks"}
                    grads = _gradients(one, upstream, a.rows, *keys, options, wrt)
                    found = sums() if found is None else found
                    if dq is not None:
                        dq.add(a, grads.dq)
                    self._add(a, c, grads, found)
                    del grads  # before the next block is computed
                del keys
        return sums() if found is None else found

    def finish(self) -> None:
        """Round the gradients of queries, and add the gradients of sinks."""
        with np.errstate(all="ignore"):
            for *_, dq in self._parts:
                if dq is not None:
                    dq.finish()
            if self._parameters.dsinks is not None:
                add_narrow(self._parameters.dsinks, self._of_sinks())

    def _add(self, a: Segment, c: Segment, grads: Gradients, sums: Pair) -> None:
        for total, part in zip(sums, (grads.dk, grads.dv), strict=True):
            if part is not None:
                add(total, keys_of(part, self._call), c.rows)
        dbias = self._parameters.dbias
        if dbias is not None:
            add_narrow(dbias[(..., *self._call.cut(dbias, a, c))], grads.dbias)
        for whole, part in zip(self._parameters.daux, grads.daux or (), strict=False):
            if whole is not None and part is not None:
                add_narrow(whole, part)

    def _of_sinks(self) -> Array:
        """Compute the gradients of the sinks, by backward passes without keys."""
        call, x = self._call, self._call.operands
        k, v = (call.wide(a[..., :0, :]) for a in (x.k, x.v))
        sinks = x.sinks.astype(np.float64)  # the sum over the queries is rounded once
        options = {"sinks": sinks, "backend": call.backend}
        total: Array = library(x.q).zeros(sinks.shape, np.float64)
        for rows in call.blocks.row_ranges:
            wrt = frozenset({"sinks"})
            total += _gradients(call, self._upstream, rows, k, v, options, wrt).dsinks
        return total


def zero_sums(call: Call, keys: int) -> Pair:
    """Return sums of dk and dv for some number of keys."""
    P, xp = call.problem, library(call.operands.k)
    dk, dv = (xp.zeros((P.B, P.Hkv, keys, n), call.sums) for n in (P.D, P.Dv))
    return dk, dv


def _rows_of_keys(call: Call, k: Array, v: Array, c: Segment) -> Pair:
    """Return the keys and values of a block in the form of its calls."""
    some_k, some_v = (keys_of(call.wide(x[..., c.rows, :]), call) for x in (k, v))
    return some_k, some_v


def _gradients(
    call: Call,
    upstream: Upstream,
    rows: slice,
    k: Array,
    v: Array,
    options: dict[str, Any],
    wrt: frozenset[str],
) -> Gradients:
    """Compute the gradients of some queries with some keys."""
    q, dout, out = (
        call.wide(x[..., rows, :]) for x in (call.operands.q, upstream.dout, upstream.out)
    )
    lse, dlse = (None if x is None else call.wide(x[..., rows]) for x in upstream[2:])
    return tileattn.backward(
        *(dout, q, k, v, out, lse),
        dlse=dlse,
        wrt=requested_gradients(wrt, options),
        deterministic=call.deterministic,
        **options,
    )


def calls_of(call: Call) -> Iterator[tuple[Call, slice]]:
    """Yield the call of each split of the query heads; several key heads become a batch.

    Each call has all keys of the block, so they are sent once, and the backward pass keeps as many
    work tiles of keys.
    """
    if call.splits == 1:
        yield call, slice(None)
        return
    P, x = call.problem, call.operands
    if P.Hkv > 1:
        xp = library(x.kv_lengths)
        x = x._replace(
            q=queries_of(x.q, P.Hkv, slice(0, P.group)),
            k=keys_of(x.k, call),
            v=keys_of(x.v, call),
            kv_lengths=xp.repeat(x.kv_lengths, P.Hkv),
            q_offset=xp.repeat(x.q_offset, P.Hkv),
        )
        one = replace(call, problem=replace(P, B=P.Hkv, Hq=P.group, Hkv=1), operands=x)
    else:
        one = call
    size = P.group // call.splits
    for start in range(0, P.group, size):
        some = slice(start, start + size)
        yield one.of_heads(Heads(some, slice(0, 1))), some


def queries_of(x: Array, Hkv: int, some: slice) -> Array:
    """View some query heads of each key head."""
    if some != slice(None) and Hkv > 1:
        x = x[0].reshape(Hkv, x.shape[1] // Hkv, *x.shape[2:])
    return x[:, some]


def keys_of(x: Array, call: Call) -> Array:
    """View keys, or their gradients, as the calls have them, and back."""
    return x.swapaxes(0, 1) if call.splits > 1 and call.problem.Hkv > 1 else x
