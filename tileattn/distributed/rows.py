"""Results of this rank's queries, joined from those over parts of the keys."""

from typing import Protocol

import numpy as np

from tileattn.algorithm.softmax import RowState
from tileattn.distributed.call import Call
from tileattn.distributed.layout import Segment
from tileattn.results import Attention


class Rows(Protocol):
    """What the results over parts of the keys are joined in."""

    def join(self, queries: Segment, part: Attention) -> None:
        """Take in the results of some queries over more keys."""

    def finish(self) -> Attention:
        """Let sinks join the denominator, and round to the dtype of the call."""


def rows_of(call: Call) -> Rows:
    """Make room for the results of a rank."""
    return RowsOnGpu(call) if call.on_gpu else RowsOnCpu(call)


class RowsOnCpu:
    """NumPy arrays: the state of online softmax of each segment."""

    def __init__(self, call: Call) -> None:
        P, self._call = call.problem, call
        self._segments = call.q_layout.segments(call.comm.rank)
        self._states = {
            a[:2]: RowState.empty((P.B, P.Hq, a.stop - a.start), P.Dv, call.sums)
            for a in self._segments
        }

    def join(self, queries: Segment, part: Attention) -> None:
        """Merge a state."""
        self._states[queries[:2]].merge(RowState.of_result(*part, self._call.sums))

    def finish(self) -> Attention:
        """Divide by the denominators."""
        P, sinks, sums = self._call.problem, self._call.operands.sinks, self._call.sums
        out, lse = np.empty((P.B, P.Hq, P.Nq, P.Dv), P.dtype), np.empty((P.B, P.Hq, P.Nq), sums)
        for a in self._segments:
            state = self._states[a[:2]]
            if sinks is not None:
                state.sink(sinks[:, np.newaxis])
            out[..., a.rows, :], lse[..., a.rows] = state.finalize()
        return Attention(out, lse)


class RowsOnGpu:
    """CuPy arrays: divided results in the accumulation dtype, joined by a kernel for each part."""

    def __init__(self, call: Call) -> None:
        import cupy

        P, self._call, self._seen = call.problem, call, set[int]()
        self._sums = cupy.empty((P.B, P.Hq, P.Nq, P.Dv), call.sums)
        self._lse = cupy.empty((P.B, P.Hq, P.Nq), call.sums)

    def join(self, queries: Segment, part: Attention) -> None:
        """Weigh and add a part; the first is copied."""
        from tileattn.backends.cupy.partial_rows import join_rows

        first = queries.start not in self._seen
        join_rows(self._sums, self._lse, *part, queries.rows, is_first=first)
        self._seen.add(queries.start)

    def finish(self) -> Attention:
        """Round, with the sinks."""
        import cupy

        from tileattn.backends.cupy.partial_rows import finish_rows

        P, sinks = self._call.problem, self._call.operands.sinks
        for a in self._call.q_layout.segments(self._call.comm.rank):
            if a.start not in self._seen:
                self._sums[..., a.rows, :], self._lse[..., a.rows] = 0, -np.inf
        out = cupy.empty(self._sums.shape, P.dtype)
        wide = None if sinks is None else cupy.ascontiguousarray(sinks, dtype=self._call.sums)
        finish_rows(out, self._lse, self._sums, wide)
        return Attention(out, self._lse)
