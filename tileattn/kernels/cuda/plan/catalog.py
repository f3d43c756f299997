"""Which kernels are worth compiling ahead of time."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from tileattn.call.problem import problem_of
from tileattn.kernels.cuda.families.context import LaunchContext
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.device import device_of_arch
from tileattn.kernels.cuda.plan.layout import MAX_ALIGNMENT, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import plans_of

WINDOWS: tuple[tuple[None, int | None], ...] = ((None, None), (None, 0))
"""Without and with a right limit, which decides about the tiles of the Hopper kernels."""

LENGTHS = ((1, 2), (1024, 1024), (8192, 8192))
"""Queries and keys, which decide about them, too."""


def common_keys(arch: str, dtypes: Iterable[str], head_dims: Iterable[int]) -> list[KernelKey]:
    """List the kernels that calls without options need, for both passes of contiguous arrays."""
    device = device_of_arch(arch)
    found: dict[KernelKey, None] = {}
    for dtype, dim, window, (Nq, Nk) in product(dtypes, list(head_dims), WINDOWS, LENGTHS):
        problem = replace(problem_of(dtype, dim), window=window, Nq=Nq, Nk=Nk)
        plans = plans_of(problem, contiguous_inputs(problem), device)
        found |= {launch.key: None for plan in plans for launch in plan.launches}
    return list(found)


def context_of(arch: str, alignment_bytes: int = MAX_ALIGNMENT) -> LaunchContext:
    """Return the context of contiguous arrays on one SM of a GPU of an architecture."""
    return LaunchContext(alignment_bytes, device_of_arch(arch).shared_limit, arch=arch)
