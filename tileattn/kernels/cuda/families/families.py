"""The kernel families: the first one that supports a pass runs it."""

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.block_order import with_orders
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext
from tileattn.kernels.cuda.families.family import Family, explained, first_that_runs
from tileattn.kernels.cuda.families.generic import GENERIC
from tileattn.kernels.cuda.families.hopper import HOPPER_FAMILY
from tileattn.kernels.cuda.families.latent import LATENT_FAMILY
from tileattn.kernels.cuda.families.pages import PAGES
from tileattn.kernels.cuda.families.size_class import has_queries
from tileattn.kernels.cuda.families.split import SPLIT_FAMILY
from tileattn.kernels.cuda.families.split_sm90 import SPLIT_HOPPER

FAMILIES: tuple[Family, ...] = (
    LATENT_FAMILY,
    SPLIT_HOPPER,
    SPLIT_FAMILY,
    PAGES,
    HOPPER_FAMILY,
    GENERIC,
)
"""The preferred one first. A new family is a file, and a line here."""


def forward_launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Return what the forward pass launches: nothing if there is no query."""
    if not has_queries(problem):
        return ()
    family, reasons = first_that_runs(FAMILIES, problem, context, "forward")
    return with_orders(problem, explained(reasons, family.forward(problem, context)))


def attention_gradients(
    problem: Problem, context: LaunchContext, *, deterministic: bool
) -> tuple[KernelLaunch, ...]:
    """Return what computes dq, dk and dv; ``deterministic`` sums dq in a fixed order."""
    family, reasons = first_that_runs(FAMILIES, problem, context, "backward")
    launches = family.backward(problem, context, deterministic=deterministic)
    return with_orders(problem, explained(reasons, launches))
