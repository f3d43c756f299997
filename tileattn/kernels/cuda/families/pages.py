"""Keys in pages: the Hopper kernel takes sequences of many queries, others are cut into splits."""

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import hopper, split, split_sm90
from tileattn.kernels.cuda.families.block_order import with_orders
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext, refused

_REFUSED = frozenset({"mask_mod"})
_FEW = "sequences of which {} rows or fewer share keys"


def launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the Hopper kernel, what cuts keys into splits, or both where sequences are packed.

    Which of them takes a sequence depends on its own queries alone, and so do its bits.
    """
    P = problem
    if P.group * P.Nq <= split.FEW_ROWS:
        return split_sm90.launches(P, context)
    (few,) = split.launches(P, context)
    refusal = why_not(P, context)
    if refusal is not None:
        return (few._replace(why=f"not the Hopper kernel, because {refusal}; {few.why}"),)
    many = (hopper.forward(P, context),)
    if P.sequences is None:
        return many
    return (*with_orders(P, many), few._replace(why=_FEW.format(split.FEW_ROWS)))


def why_not(problem: Problem, context: LaunchContext) -> str | None:
    """Why the Hopper kernel does not take the sequences of many queries."""
    option = refused(problem, _REFUSED)
    if option is not None:
        return f"{option} is in use"
    return hopper.why_not(problem, context, "forward")
