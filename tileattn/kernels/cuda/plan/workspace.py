"""The workspace of a call: one allocation, and where its parts start."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import COUNT, KernelLaunch
from tileattn.kernels.cuda.families.grid import padded_rows

ALIGNED = 256  # bytes; alignment of every part, and of the workspace


class Workspace(NamedTuple):
    """Where the parts of the workspace start."""

    starts: dict[str, int]  # offset in bytes of each part, by its name in the parameter block
    zeros: int  # offset in bytes of the parts that start at zero: they come last
    nbytes: int


def workspace_of(
    problem: Problem,
    launches: Sequence[KernelLaunch],
    copies: Mapping[str, int],
    sums: Mapping[str, int],
    direction: str,
) -> Workspace:
    """Lay out the memory that a pass needs besides its results.

    It holds ``copies``, ``sums`` that start at zero, and what each kernel needs. The backward pass
    adds three numbers for each query, and flags of each key head.
    """
    P = problem
    scratch, zeros = dict(copies), dict(sums)
    if launches and direction == "backward":
        rows = P.B * P.Hq * padded_rows(P) * P.accum_dtype.itemsize
        scratch |= dict.fromkeys(("delta", "lse_log2", "row_max"), rows)
        zeros["head_flags"] = (2 + P.entries * P.Hkv) * COUNT
    for launch in launches:
        if launch.traits.workspace is not None:
            parts = launch.traits.workspace(P, launch.key)
            # Kernels that run one after the other share a part.
            scratch |= {name: max(n, scratch.get(name, 0)) for name, n in parts.scratch.items()}
            zeros |= parts.zeros
    starts, end = {}, 0
    for name, nbytes in (scratch | zeros).items():
        starts[name] = -(-end // ALIGNED) * ALIGNED
        end = starts[name] + nbytes
    return Workspace(starts, min((starts[name] for name in zeros), default=end), end)
