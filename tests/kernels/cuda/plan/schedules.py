"""Problems and the order of their work tiles, as tests of the scheduler ask for them; no GPU."""

from dataclasses import replace
from typing import Any

from tests.kernels.cuda.plan.planning import H200, ON_HOPPER
from tileattn.call.problem import Problem, problem_of
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.grid import GridSizes
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.kernels.cuda.plan.layout import CallLayout, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import with_grids
from tileattn.kernels.cuda.plan.scheduler import Schedule, schedule_of

CAUSAL = (None, 0)
ON_GPU = object()


def shaped(dtype: str, dim: int, **sizes: Any) -> Problem:
    return replace(problem_of(dtype, dim), **sizes)


def launch_of(problem: Problem, sm_count: int = 132) -> KernelLaunch:
    launches = forward_launches(problem, ON_HOPPER._replace(sm_count=sm_count))
    (launch,) = with_grids(launches, GridSizes(problem))
    assert launch.key.kernel == HOPPER
    return launch


def layout_of(problem: Problem, lengths: Any = None, offsets: Any = None) -> CallLayout:
    """Describe a call with lengths and offsets on the host, or `ON_GPU`."""
    layout = contiguous_inputs(problem)
    if lengths is not None:
        there = None if lengths is ON_GPU else tuple(lengths.tolist())
        aligned = None if there is None else tuple(n - problem.Nq for n in there)
        layout = layout._replace(kv_lengths=there, q_offset=aligned)
    if offsets is not None:
        layout = layout._replace(q_offset=None if offsets is ON_GPU else tuple(offsets.tolist()))
    return layout


def schedule(
    problem: Problem,
    lengths: Any = None,
    offsets: Any = None,
    *,
    launch: KernelLaunch | None = None,
    tables: bool = True,
) -> Schedule:
    layout = layout_of(problem, lengths, offsets)
    launches = (launch or launch_of(problem),)
    return schedule_of(problem, layout, launches, H200, tables=tables)
