"""Results of a rank's queries, joined from those over parts of the keys: in the caller's arrays.

On the CPU a sum of a wider dtype has memory of its own, and is rounded at the end. On a GPU the
upper half of a float32 is where the result will be, and the lower half in an array of its own; the
first part is written where the result will be, and the last one is rounded as it is joined.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn.algorithm.softmax import RowState
from tileattn.distributed.arrays import library
from tileattn.distributed.call import Call
from tileattn.distributed.layout import Segment
from tileattn.results import Attention

Array = NDArray[Any]


class Rows(Protocol):
    """What the results over parts of the keys are joined in."""

    def attend(self, queries: Segment, k: Array, v: Array, options: dict[str, Any]) -> None:
        """Let some queries attend to more keys."""

    def finish(self) -> None:
        """Let sinks join the denominator, and round to the dtype of the call."""


class RowSums(Protocol):
    """What gradients of queries over parts of the keys are summed in."""

    def add(self, queries: Segment, part: Array) -> None:
        """Add those of some queries over more keys."""

    def finish(self) -> None:
        """Round to the dtype of the call."""


def rows_of(call: Call, to: Attention) -> Rows:
    """Join results in ``to``."""
    return RowsOnGpu(call, to) if call.on_gpu else RowsOnCpu(call, to)


def sums_of(call: Call, to: Array) -> RowSums:
    """Sum gradients in ``to``."""
    return SumsOnGpu(call, to) if call.on_gpu else SumsOnCpu(call, to)


class RowsOnCpu:
    """NumPy arrays: a state of online softmax, whose maxima are in the place of lse."""

    def __init__(self, call: Call, to: Attention) -> None:
        self._call, self._to = call, to
        is_wide = to.out.dtype == call.sums
        acc = to.out if is_wide else np.empty(to.out.shape, call.sums)
        acc[...], to.lse[...] = 0, -np.inf
        self._state = RowState(to.lse, np.zeros(to.lse.shape, call.sums), acc)

    def attend(self, queries: Segment, k: Array, v: Array, options: dict[str, Any]) -> None:
        """Merge a state."""
        call = self._call
        q = call.wide(call.operands.q[..., queries.rows, :])
        part = RowState.of_result(*tileattn.forward(q, k, v, **options), call.sums)
        self._state.rows(queries.rows).merge(part)

    def finish(self) -> None:
        """Divide by the denominators."""
        state, sinks, to = self._state, self._call.operands.sinks, self._to
        if sinks is not None:
            state.sink(sinks[:, np.newaxis])
        out, to.lse[...] = state.finalize(out=state.acc)
        if out is not to.out:
            to.out[...] = out


class SumsOnCpu:
    """NumPy arrays."""

    def __init__(self, call: Call, to: Array) -> None:
        self._to = to
        self._total = to if to.dtype == call.sums else np.empty(to.shape, call.sums)
        self._total[...] = 0

    def add(self, queries: Segment, part: Array) -> None:
        """Add in place."""
        self._total[..., queries.rows, :] += part

    def finish(self) -> None:
        """Round where the sum is wider."""
        if self._total is not self._to:
            self._to[...] = self._total


class _OnGpu:
    """Sums of which the results have the upper halves, and how many parts of each piece come."""

    def __init__(self, call: Call, to: Any) -> None:
        self._left = dict(call.blocks.number)
        self._split = set[int]()  # pieces whose sums are in two halves
        self._to, self._low = to, None

    def _next(self, queries: Segment) -> bool:
        """Count a part; return whether it is the last."""
        self._left[queries.start] -= 1
        return not self._left[queries.start]

    def _lower(self) -> Any:
        """Give the lower halves: nothing where sums are no wider than results."""
        if self._to.dtype.itemsize == 2 and self._low is None:
            self._low = library(self._to).empty(self._to.shape, np.uint16)
        return self._low


class RowsOnGpu(_OnGpu):
    """CuPy arrays: divided results, joined by a kernel for each part behind the first."""

    def __init__(self, call: Call, to: Attention) -> None:
        super().__init__(call, to.out)
        self._call, self._lse, self._begun = call, to.lse, set[int]()
        sinks = call.operands.sinks
        self._sinks = None if sinks is None else sinks.astype(call.sums, order="C")

    def attend(self, queries: Segment, k: Any, v: Any, options: dict[str, Any]) -> None:
        """Compute the first part in its place; weigh and add others."""
        rows, number = queries.rows, queries.start
        q, is_last = self._call.operands.q[..., rows, :], self._next(queries)
        if number not in self._begun:
            self._begun.add(number)
            to = self._to[..., rows, :]
            self._lse[..., rows] = tileattn.forward(q, k, v, out=to, **options).lse
            if is_last and self._sinks is not None:
                self._join(queries, None, is_last=True)
        else:
            self._join(queries, tileattn.forward(q, k, v, **options), is_last=is_last)

    def _join(self, queries: Segment, part: Attention | None, *, is_last: bool) -> None:
        from tileattn.backends.cupy.partial_rows import join_rows

        is_split = queries.start in self._split
        low = None if is_last and not is_split else self._lower()
        sinks = self._sinks if is_last else None
        halves = {"is_split": is_split, "splits": not is_last}
        join_rows(Attention(self._to, self._lse), low, part, sinks, queries.rows, **halves)
        self._split.add(queries.start)

    def finish(self) -> None:
        """Fill rows without keys, which have a sink at most."""
        for a in self._call.blocks.pieces:
            if a.start not in self._begun:
                sinks = -np.inf if self._sinks is None else self._sinks[:, np.newaxis]
                self._to[..., a.rows, :], self._lse[..., a.rows] = 0, sinks
        self._low = None


class SumsOnGpu(_OnGpu):
    """CuPy arrays: the first part is copied, and others are added by a kernel."""

    def __init__(self, call: Call, to: Any) -> None:
        super().__init__(call, to)
        self._pieces, self._number = call.blocks.pieces, call.blocks.number

    def add(self, queries: Segment, part: Any) -> None:
        """Add, and round with the last part."""
        from tileattn.backends.cupy.partial_rows import add_halves

        number = queries.start
        is_first, is_last = self._left[number] == self._number[number], self._next(queries)
        if is_first:
            self._to[..., queries.rows, :] = part
            return
        is_split = number in self._split
        low = None if is_last and not is_split else self._lower()
        add_halves(self._to, low, part, queries.rows, is_split=is_split, splits=not is_last)
        self._split.add(number)

    def finish(self) -> None:
        """Fill rows without keys: with 0."""
        for a in self._pieces:
            if not self._number[a.start]:
                self._to[..., a.rows, :] = 0
        self._low = None
