"""Problems and their plans, as tests ask for them; nothing here needs a GPU or CuPy."""

from dataclasses import replace
from typing import Any

from tileattn.call.problem import Problem, problem_of
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.grid import GridSizes
from tileattn.kernels.cuda.plan.catalog import context_of
from tileattn.kernels.cuda.plan.device import Device, device_of_arch
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plan_backward, plan_forward, with_grids

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 37, 53, 24, 40
H200, A100, B200 = map(device_of_arch, ("sm_90a", "sm_80", "sm_100"))
ON_HOPPER = context_of("sm_90a")._replace(sm_count=132)


def asked(dtype: str = "float16", enabled_options: Any = (), **changed: Any) -> Problem:
    """Make a problem of sizes that all differ."""
    sizes = {"B": B, "Hq": HQ, "Hkv": HKV, "Nq": NQ, "Nk": NK, "D": D, "Dv": DV}
    return replace(problem_of(dtype, D, enabled_options), **sizes | changed)


def forward(
    problem: Problem,
    device: Device = B200,
    layout: CallLayout | None = None,
    *,
    tables: bool = True,
    **more: ArrayLayout,
) -> LaunchPlan:
    """Plan the forward pass; other arrays than ``more`` are contiguous."""
    inputs = (layout or contiguous_inputs(problem)).with_contiguous_results(problem, "forward")
    return plan_forward(problem, inputs.with_arrays(**more), device, tables=tables)


def backward(
    problem: Problem,
    device: Device = B200,
    layout: CallLayout | None = None,
    *,
    deterministic: bool = False,
    tables: bool = True,
    **more: ArrayLayout,
) -> LaunchPlan:
    """Plan the backward pass; other arrays than ``more`` are contiguous."""
    inputs = (layout or contiguous_inputs(problem)).with_arrays(**more)
    layout = inputs.with_contiguous_results(problem, "backward").with_arrays(**more)
    return plan_backward(problem, layout, device, deterministic=deterministic, tables=tables)


def hopper_launches(problem: Problem, **changed: Any) -> tuple[KernelLaunch, ...]:
    """List what the backward pass launches on Hopper, by default in any order."""
    options = {"deterministic": False, "sinks": False} | changed
    launches = backward_launches(problem, ON_HOPPER, **options)
    return with_grids(launches, GridSizes(problem))


def kernels(plan: LaunchPlan) -> list[str]:
    """Name what a plan launches."""
    return [launch.key.kernel for launch in plan.launches]
