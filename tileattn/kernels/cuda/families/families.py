"""The kernel families, the preferred ones first. A new family is a file, and a line here."""

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.block_order import with_orders
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext
from tileattn.kernels.cuda.families.family import Family, launches_of
from tileattn.kernels.cuda.families.float32 import FLOAT32_BACKWARD_FAMILY, FLOAT32_FORWARD_FAMILY
from tileattn.kernels.cuda.families.float32_generic import (
    SPLIT_GENERIC_BACKWARD,
    SPLIT_GENERIC_FORWARD,
)
from tileattn.kernels.cuda.families.generic import GENERIC_BACKWARD, GENERIC_FORWARD
from tileattn.kernels.cuda.families.hopper import HOPPER_BACKWARD_FAMILY, HOPPER_FORWARD_FAMILY
from tileattn.kernels.cuda.families.latent import LATENT_FAMILY
from tileattn.kernels.cuda.families.pages import PAGES_FAMILY
from tileattn.kernels.cuda.families.paired import PAIRED_BACKWARD_FAMILY
from tileattn.kernels.cuda.families.size_class import has_queries
from tileattn.kernels.cuda.families.split import SPLIT_FAMILY
from tileattn.kernels.cuda.families.split_sm90 import SPLIT_HOPPER_FAMILY
from tileattn.kernels.cuda.families.wide import WIDE_FAMILY

FORWARD: tuple[Family, ...] = (
    LATENT_FAMILY,
    WIDE_FAMILY,
    SPLIT_HOPPER_FAMILY,
    SPLIT_FAMILY,
    PAGES_FAMILY,
    FLOAT32_FORWARD_FAMILY,
    SPLIT_GENERIC_FORWARD,
    HOPPER_FORWARD_FAMILY,
    GENERIC_FORWARD,
)
BACKWARD: tuple[Family, ...] = (
    PAIRED_BACKWARD_FAMILY,
    FLOAT32_BACKWARD_FAMILY,
    SPLIT_GENERIC_BACKWARD,
    HOPPER_BACKWARD_FAMILY,
    GENERIC_BACKWARD,
)


def forward_launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Return what the forward pass launches: nothing if there is no query."""
    if not has_queries(problem):
        return ()
    able = [family for family in FORWARD if family.invariant or not problem.is_invariant]
    return with_orders(problem, launches_of(able, problem, context))


def gradient_launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Return the launches that compute dq, dk and dv."""
    return with_orders(problem, launches_of(BACKWARD, problem, context))
