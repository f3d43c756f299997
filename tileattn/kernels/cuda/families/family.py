"""What a kernel family is, and which one of several runs a pass."""

from collections.abc import Iterable

from tileattn.call.problem import Problem
from tileattn.errors import UnsupportedError
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext
from tileattn.kernels.cuda.families.size_class import empty_axes


class Family:
    """Kernels for one kind of call or one generation of GPUs.

    A family computes the forward pass, the backward pass, or both. A ``direction`` is
    ``"forward"`` or ``"backward"``.
    """

    name: str
    """What messages call its kernels."""

    def concerns(self, problem: Problem, context: LaunchContext, direction: str) -> bool:  # noqa: ARG002 - some families ask it
        """Return True if the family is meant for such calls: others pass it over without a word."""
        return not (direction == "forward" and reads_pages(problem))

    def why_not(self, problem: Problem, context: LaunchContext, direction: str) -> str | None:
        """Return why the family does not support a pass; None if it does."""
        raise NotImplementedError

    def forward(self, problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
        """Return what the forward pass launches; there is a query."""
        raise NotImplementedError

    def backward(
        self, problem: Problem, context: LaunchContext, *, deterministic: bool
    ) -> tuple[KernelLaunch, ...]:
        """Return what computes dq, dk and dv."""
        raise NotImplementedError


def reads_pages(problem: Problem) -> bool:
    """Return True if keys come from pages."""
    return problem.is_paged and "Nk" not in empty_axes(problem)


def first_that_runs(
    families: Iterable[Family], problem: Problem, context: LaunchContext, direction: str
) -> tuple[Family, str]:
    """Return the first family that supports a pass, and why the preferred ones do not.

    Raises
    ------
    UnsupportedError
        If none does: only pages lack a family for every call.
    """
    refusals: dict[str, None] = {}
    reasons = ""
    for family in families:
        if family.concerns(problem, context, direction):
            why = family.why_not(problem, context, direction)
            if why is None:
                return family, reasons
            refusals[why] = None
            reasons += f"not {family.name}, because {why}; "
    raise UnsupportedError(
        f"backend 'cupy' does not support block_table here: {'; '.join(refusals)}"
    )


def explained(reasons: str, launches: tuple[KernelLaunch, ...]) -> tuple[KernelLaunch, ...]:
    """Say at the first launch why it is not of a preferred family."""
    if not launches:
        return launches
    first, *others = launches
    return first._replace(why=f"{reasons}{first.why}"), *others
