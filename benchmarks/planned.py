"""Passes on a GPU whose plan the benchmark chooses: other tiles, other tuned numbers."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.configurations import Call
from tileattn.call.problem import Operands
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.plan import LaunchPlan


def planned(
    arrays: Mapping[str, Any],
    operands: Operands,
    plan_of: Callable[[CallLayout, Device], LaunchPlan],
) -> Call:
    """Return a call that runs a plan on arrays, results included, by their names in the plan."""
    import cupy

    from tileattn.backends.cupy import describe
    from tileattn.backends.cupy.cached_passes import Pass
    from tileattn.backends.cupy.executable import Executable

    ordinal = cupy.cuda.runtime.getDevice()
    addresses = describe.addresses_of(arrays, ordinal)
    plan = plan_of(describe.layout_of(arrays, operands), describe.device_of(ordinal))
    executable, runs = Executable(plan, tuple(addresses)), Pass([*arrays], [])
    return lambda: runs.run(executable, addresses, arrays, ordinal)
