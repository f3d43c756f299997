"""The memory that a call takes besides its results: one piece, and what lies where in it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tileattn.kernels.config.hopper import HOPPER_ADDERS, HOPPER_BACKWARDS
from tileattn.kernels.config.select import padded_rows
from tileattn.kernels.launch.steps import Step
from tileattn.problem import Problem

ALIGNED = 256  # bytes at whose multiples every part begins, and so the whole

_MARK = 4  # bytes of a u32


class Layout(NamedTuple):
    """Where the parts of a piece of memory begin.

    Parameters
    ----------
    starts : dict of str to int
        Bytes before each part, by its name in the parameter block.
    zeros : int
        Bytes before the parts that must be zero when the kernels start: they come last.
    nbytes : int
        Bytes of all.
    """

    starts: dict[str, int]
    zeros: int
    nbytes: int


def layout(problem: Problem, steps: Iterable[Step], copies: Mapping[str, int]) -> Layout:
    """Lay out what a pass takes besides its results.

    Parameters
    ----------
    problem : Problem
        What is asked.
    steps : iterable of Step
        What is started.
    copies : mapping of str to int
        Bytes of the arrays that kernels read or write in the place of the caller's.

    Returns
    -------
    Layout
        Beside the copies, nothing for the forward pass. For the backward pass three numbers of each
        query, a mark for each head of keys, and where dq is summed in memory, the sum; for Hopper's
        own kernels how many works each of the two has claimed, and how many have added to each tile
        of dq, told by each of the threads that share it.
    """
    P, keys = problem, [step.key for step in steps]
    number, heads = P.accum_dtype.itemsize, P.B * P.Hq
    parts = dict(copies)
    zeros: dict[str, int] = {}
    if any("forward" not in key.kernel for key in keys):
        rows = heads * padded_rows(P.Nq) * number
        parts |= dict.fromkeys(("delta", "shift", "row_max"), rows)
        zeros["special"] = P.B * P.Hkv * _MARK
    for key in keys:
        if not key.add_dq:
            continue
        sums = {"dq_sum": heads * P.Nq * key.head_dim * number}
        if key.kernel in HOPPER_BACKWARDS:
            parts |= sums
            tiles = heads * -(-P.Nq // key.block_q)
            counts = {"claimed": 2, "landed": tiles * HOPPER_ADDERS}
            zeros |= {name: count * _MARK for name, count in counts.items()}
        else:
            zeros |= sums
    starts, end = {}, 0
    for name, nbytes in (parts | zeros).items():
        starts[name] = -(-end // ALIGNED) * ALIGNED
        end = starts[name] + nbytes
    return Layout(starts, min((starts[name] for name in zeros), default=end), end)
