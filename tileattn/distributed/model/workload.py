"""A call on ranks, without arrays."""

from typing import NamedTuple

from tileattn.call.problem import Problem
from tileattn.distributed.layout import Layout
from tileattn.distributed.visibility import Visibility

# Options that look at which query, or which key, it is.
_BY_POSITION = frozenset({"alibi_slopes", "bias", "mask", "dropout_p", "score_mod", "mask_mod"})


class Rows(NamedTuple):
    """A bias or a mask of which each rank has the rows of its queries.

    Parameters
    ----------
    batch, heads, keys : int
        Its other axes; 1 where it is broadcast.
    itemsize : int
        Bytes of an element on the way.
    gradient : bool
        Whether its gradient travels back.
    """

    batch: int
    heads: int
    keys: int
    itemsize: int
    gradient: bool


class Workload(NamedTuple):
    """A call on ranks, without arrays.

    Parameters
    ----------
    problem : Problem
        Of which the number of queries is not looked at.
    visibility : Visibility
        Where keys are visible; functions and masks hide others, which is not looked at.
    q_layout, k_layout : Layout
        Queries and keys of each rank.
    rows : tuple of Rows
        Bias and mask.
    """

    problem: Problem
    visibility: Visibility
    q_layout: Layout
    k_layout: Layout
    rows: tuple[Rows, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.q_layout.ranks

    @property
    def only_order(self) -> bool:
        """Whether of the positions of tokens nothing but their order counts, for all alike."""
        P, (_, lengths, offsets) = self.problem, self.visibility
        if P.window[0] is not None or not _BY_POSITION.isdisjoint(P.enabled_options):
            return False
        return len({*offsets.tolist()}) == 1 and {*lengths.tolist()} == {self.k_layout.length}


def flops_of(P: Problem, *, backward: bool) -> int:
    """Count the FLOPs of a pair."""
    return 2 * (3 * P.D + 2 * P.Dv if backward else P.D + P.Dv)
