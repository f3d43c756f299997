"""The part of a call that the cost model looks at: sizes, layouts and windows, but no arrays."""

from collections.abc import Sequence
from typing import NamedTuple

from tileattn.call.options import OPTIONS
from tileattn.call.problem import Operands, Problem
from tileattn.distributed.call import Call
from tileattn.distributed.layout import Layout
from tileattn.distributed.visibility import Visibility


class Rows(NamedTuple):
    """A bias or mask of which each rank has the rows of its own queries."""

    batch: int  # lengths of its other axes; 1 where it is broadcast
    heads: int
    keys: int
    itemsize: int  # bytes of an element in a message
    gradient: bool  # True if its gradient is sent back


class Workload(NamedTuple):
    """A call without its arrays."""

    problem: Problem  # its number of queries is ignored
    visibility: Visibility  # by position: dense masks and mask functions are ignored
    q_layout: Layout
    k_layout: Layout
    rows: tuple[Rows, ...] = ()  # of bias and mask

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.q_layout.ranks

    @property
    def only_order(self) -> bool:
        """True if only the order of tokens matters, not their positions, in all batch entries."""
        P, (_, lengths, offsets) = self.problem, self.visibility
        by_pair = P.has_alibi or P.has_bias or P.has_pair_mask or P.has_dropout
        if P.window[0] is not None or by_pair or P.score_mod is not None:
            return False
        return len({*offsets.tolist()}) == 1 and {*lengths.tolist()} == {self.k_layout.length}


def workload(
    problem: Problem, x: Operands, q_layout: Layout, k_layout: Layout, with_rows: Sequence[str]
) -> Workload:
    """Describe a call; each rank has its own rows of the arrays named in ``with_rows``."""
    rows = []
    for name in with_rows:
        array, gradient = getattr(x, name), OPTIONS[name].gradient
        B, heads, _, keys = array.shape
        itemsize = array.dtype.itemsize
        if gradient:  # it is sent in the accumulation dtype
            itemsize = max(itemsize, problem.accum_dtype.itemsize)
        rows.append(Rows(B, heads, keys, itemsize, gradient=gradient))
    visibility = Visibility(problem.window, x.kv_lengths, x.q_offset)
    return Workload(problem, visibility, q_layout, k_layout, tuple(rows))


def workload_of(call: Call) -> Workload:
    """Describe the call of a rank."""
    layouts = call.blocks.q_layout, call.blocks.k_layout
    return workload(call.problem, call.operands, *layouts, call.with_rows)


def flops_per_pair(P: Problem, *, backward: bool) -> int:
    """Return the FLOPs of one visible pair of query and key."""
    return 2 * (3 * P.D + 2 * P.Dv if backward else P.D + P.Dv)
