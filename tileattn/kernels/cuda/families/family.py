"""What a kernel family is, and which of several families runs a pass."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tileattn.call.problem import Problem
from tileattn.errors import UnsupportedError
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext
from tileattn.kernels.cuda.families.size_class import empty_axes
from tileattn.kernels.cuda.tile_sizes import TILES

Clause = tuple[str, Callable[[Problem, LaunchContext], bool]]
"""A reason not to run a pass, and the condition under which it applies."""

NOT_HOPPER: Clause = (
    "the GPU does not have compute capability 9.0",
    lambda _, context: context.arch != "sm_90a",
)
NOT_16_BIT: Clause = (
    "dtype is neither float16 nor bfloat16",
    lambda P, _: P.dtype.itemsize != 2,
)
NO_GENERIC: Clause = (
    "no generic kernel has this dtype",
    lambda P, _: ("forward", P.dtype.itemsize) not in TILES,
)
NOT_ALIGNED: Clause = (
    "a row is not aligned to 16 bytes",
    lambda _, context: context.alignment_bytes < 16,
)
NO_TENSOR_MAPS: Clause = (
    "an array has a broadcast or reversed axis, or too large a stride",
    lambda _, context: not context.tensor_maps,
)


def first_reason(clauses: Iterable[Clause], problem: Problem, context: LaunchContext) -> str | None:
    """Return the first reason that applies; None if there is none."""
    return next((why for why, applies in clauses if applies(problem, context)), None)


def reads_pages(problem: Problem) -> bool:
    """Return True if keys come from pages."""
    return problem.is_paged and "Nk" not in empty_axes(problem)


def reads_quantised(problem: Problem) -> bool:
    """Return True if there are keys, and they are quantised."""
    return problem.is_quantised and "Nk" not in empty_axes(problem)


def _has_no_pages(problem: Problem, _: LaunchContext) -> bool:
    return not reads_pages(problem)


@dataclass(frozen=True)
class Family:
    """Kernels that run one pass, for one kind of call or one generation of GPUs.

    Parameters
    ----------
    name : str
        What messages call the kernels.
    launches : callable
        Returns the launches of the pass. A backward family computes dq, dk and dv.
    why_not : callable
        Returns why the family does not support a pass; None if it does.
    concerns : callable
        Returns True if the family is meant for such calls. Other calls pass it over, and their
        explanation does not mention it.
    reads_8_bits : bool
        True if it reads quantised keys and values. Other families are passed over for them.
    invariant : bool
        True if a row has the same bits in all forward calls that such families take. Others are
        passed over with ``invariant``.
    """

    name: str
    launches: Callable[[Problem, LaunchContext], tuple[KernelLaunch, ...]]
    why_not: Callable[[Problem, LaunchContext], str | None]
    concerns: Callable[[Problem, LaunchContext], bool] = _has_no_pages
    reads_8_bits: bool = False
    invariant: bool = False


def launches_of(
    families: Iterable[Family], problem: Problem, context: LaunchContext
) -> tuple[KernelLaunch, ...]:
    """Return the launches of the first family that supports a pass.

    The first launch says why the families before it do not.

    Raises
    ------
    UnsupportedError
        If no family supports the pass: some calls over pages, and k and v of 8 bits.
    """
    refusals: dict[str, None] = {}
    reasons = ""
    P, quantised = problem, reads_quantised(problem)
    for family in families:
        if family.reads_8_bits >= quantised and family.concerns(problem, context):
            why = family.why_not(problem, context)
            if why is None:
                launches = family.launches(problem, context)
                first = (x._replace(why=f"{reasons}{x.why}") for x in launches[:1])
                return *first, *launches[1:]
            refusals[why] = None
            reasons += f"not {family.name}, because {why}; "
    what = "block_table" if P.is_paged else P.dtype.name
    if P.is_quantised:
        what = "k_descale and v_descale"
    if P.is_invariant:
        what += " with invariant"
    why = "; ".join(refusals) or "no kernel does"
    raise UnsupportedError(f"backend 'cupy' does not support {what} here: {why}")
