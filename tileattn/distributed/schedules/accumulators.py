"""Accumulators: results of queries over key parts, merged in the caller's arrays.

A CPU sums in a wider array and rounds at the end. A GPU splits float32 sums of 16-bit results: the
upper half is kept in the result array, the lower half in an array of its own. The first part is
written to the result array directly, and the merge with the last part rounds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn.algorithm.residuals import has_large_lse
from tileattn.algorithm.softmax import RowState
from tileattn.distributed.arrays import library
from tileattn.distributed.call import Call
from tileattn.distributed.layout import Segment
from tileattn.results import Attention

Array = NDArray[Any]


class RowsOnCpu:
    """NumPy arrays: an online softmax state whose row maxima use the array of lse."""

    def __init__(self, call: Call, to: Attention) -> None:
        self._call, self._to = call, to
        is_wide = to.out.dtype == call.sums
        acc = to.out if is_wide else np.empty(to.out.shape, call.sums)
        acc[...], to.lse[...] = 0, -np.inf
        self._state = RowState(to.lse, np.zeros(to.lse.shape, call.sums), acc)

    def attend(self, queries: Segment, k: Array, v: Array, options: dict[str, Any]) -> None:
        """Attend to one key part with some queries."""
        call = self._call
        q = call.wide(call.operands.q[..., queries.rows, :])
        self._state.rows(queries.rows).merge(self._state_of(queries.rows, (q, k, v), options))

    def _state_of(self, rows: slice, given: Sequence[Array], options: dict[str, Any]) -> RowState:
        """Compute the state of one key part, and free its operands before the merge."""
        found = tileattn.forward(*given, **options)
        if self._is_inexact(rows, found.lse):
            found = tileattn.forward(*(x.astype(np.float64) for x in given), **options)
        return RowState.of_result(*found, self._call.sums)

    def _is_inexact(self, rows: slice, lse: Array) -> bool:
        """Return True if the rounding of lse would show in the merge of several parts."""
        call, blocks = self._call, self._call.blocks
        if call.sums == np.float64 or not has_large_lse(lse, call.problem.dtype).any():
            return False
        return any(blocks.number[row_range.start] > 1 for row_range in blocks.within(rows))

    def finish(self) -> None:
        """Divide by the denominators."""
        state, sinks, to = self._state, self._call.operands.sinks, self._to
        if sinks is not None:
            state.sink(sinks[:, np.newaxis])
        out, to.lse[...] = state.finalize(out=state.acc)
        if out is not to.out:
            to.out[...] = out


class SumsOnCpu:
    """NumPy arrays: a wide sum, if the result is narrower."""

    def __init__(self, call: Call, to: Array) -> None:
        self._to = to
        self._total = to if to.dtype == call.sums else np.empty(to.shape, call.sums)
        self._total[...] = 0

    def add(self, queries: Segment, part: Array) -> None:
        """Add in place."""
        self._total[..., queries.rows, :] += part

    def finish(self) -> None:
        """Round a wider sum to the result."""
        if self._total is not self._to:
            self._to[...] = self._total


class _OnGpu:
    """Sums in two halves, and the number of key parts still to come for each range of rows."""

    def __init__(self, call: Call, to: Any) -> None:
        self._blocks, self._left = call.blocks, dict(call.blocks.number)
        self._split = set[int]()  # row ranges whose sums are in two halves
        self._to, self._low = to, None

    def _is_first(self, row_range: slice) -> bool:
        return self._left[row_range.start] == self._blocks.number[row_range.start]

    def _next(self, row_range: slice) -> bool:
        """Count a part; return True for the last one."""
        self._left[row_range.start] -= 1
        return not self._left[row_range.start]

    def _halves(self, row_range: slice, *, is_last: bool) -> tuple[Any, dict[str, bool]]:
        """Return the lower halves, and whether the sum is in two halves before and after a part.

        There are no lower halves if sums are as wide as results, or if there are only two parts.
        """
        is_split = row_range.start in self._split
        if not is_last:
            self._split.add(row_range.start)
            if self._to.dtype.itemsize == 2 and self._low is None:
                self._low = library(self._to).empty(self._to.shape, np.uint16)
        low = self._low if is_split or not is_last else None
        return low, {"is_split": is_split, "splits": not is_last}


class RowsOnGpu(_OnGpu):
    """CuPy arrays: normalised results, merged by a kernel for each part after the first."""

    def __init__(self, call: Call, to: Attention) -> None:
        super().__init__(call, to.out)
        self._call, self._lse = call, to.lse
        sinks = call.operands.sinks
        self._sinks = None if sinks is None else sinks.astype(call.sums, order="C")

    def attend(self, queries: Segment, k: Any, v: Any, options: dict[str, Any]) -> None:
        """Compute the first part in place; merge the others."""
        rows, row_ranges = queries.rows, self._blocks.within(queries.rows)
        q, to, part = self._call.operands.q[..., rows, :], self._to[..., rows, :], None
        if all(map(self._is_first, row_ranges)):
            self._lse[..., rows] = tileattn.forward(q, k, v, out=to, **options).lse
        else:
            part = tileattn.forward(q, k, v, **options)
        for row_range in row_ranges:
            own = _within(row_range, rows)
            self._add(row_range, part and Attention(part.out[..., own, :], part.lse[..., own]))

    def _add(self, row_range: slice, part: Attention | None) -> None:
        """Add a part of a row range; None is a first part that was computed in place."""
        is_first, is_last = self._is_first(row_range), self._next(row_range)
        if is_first and part is not None:
            self._to[..., row_range, :], self._lse[..., row_range] = part
            part = None
        if part is not None or (is_last and self._sinks is not None):
            self._join(row_range, part, is_last=is_last)

    def _join(self, row_range: slice, part: Attention | None, *, is_last: bool) -> None:
        from tileattn.backends.cupy.partial_rows import join_rows

        low, halves = self._halves(row_range, is_last=is_last)
        sinks = self._sinks if is_last else None
        join_rows(Attention(self._to, self._lse), low, part, sinks, row_range, **halves)

    def finish(self) -> None:
        """Fill the rows without keys: zeros, and the sink as lse."""
        for rows in self._blocks.row_ranges:
            if not self._blocks.number[rows.start]:
                sinks = -np.inf if self._sinks is None else self._sinks[:, np.newaxis]
                self._to[..., rows, :], self._lse[..., rows] = 0, sinks
        self._low = None


class SumsOnGpu(_OnGpu):
    """CuPy arrays: the first part is copied, and a kernel adds the others."""

    def add(self, queries: Segment, part: Any) -> None:
        """Add a part; the last one rounds."""
        from tileattn.backends.cupy.partial_rows import add_halves

        rows, row_ranges = queries.rows, self._blocks.within(queries.rows)
        in_place = all(map(self._is_first, row_ranges))
        if in_place:
            self._to[..., rows, :] = part
        for row_range in row_ranges:
            own = part[..., _within(row_range, rows), :]
            is_first, is_last = self._is_first(row_range), self._next(row_range)
            if not is_first:
                low, halves = self._halves(row_range, is_last=is_last)
                add_halves(self._to, low, own, row_range, **halves)
            elif not in_place:
                self._to[..., row_range, :] = own

    def finish(self) -> None:
        """Fill the rows without keys with zeros."""
        for rows in self._blocks.row_ranges:
            if not self._blocks.number[rows.start]:
                self._to[..., rows, :] = 0
        self._low = None


Rows = RowsOnCpu | RowsOnGpu
RowSums = SumsOnCpu | SumsOnGpu


def rows_of(call: Call, to: Attention) -> Rows:
    """Return an accumulator of results in ``to``."""
    return RowsOnGpu(call, to) if call.on_gpu else RowsOnCpu(call, to)


def sums_of(call: Call, to: Array) -> RowSums:
    """Return an accumulator of gradients in ``to``."""
    return SumsOnGpu(call, to) if call.on_gpu else SumsOnCpu(call, to)


def _within(row_range: slice, rows: slice) -> slice:
    """Return a row range relative to the rows of a block."""
    return slice(row_range.start - rows.start, row_range.stop - rows.start)
