"""The forward pass on a GPU with one kernel and one size of its tiles."""

from typing import Any

from benchmarks.configurations import Call, Inputs
from benchmarks.planned import planned
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import generic, hopper
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.kind_plan import launch_context
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plan_forward
from tileattn.kernels.cuda.tile_sizes import TileSize

# A warp for 32 queries, or for 16 where there are no more; the Hopper kernel has four for 64.
# Stages are those of the fastest row of the table.
TILES = {
    "forward": tuple(
        TileSize(rows, keys, max(1, rows // 32), stages=2)
        for rows in (16, 32, 64, 128)
        for keys in (32, 64, 128)
    ),
    HOPPER: tuple(
        TileSize(rows, keys, rows // 16, stages=4) for rows in (128, 192) for keys in (64, 96, 128)
    ),
}


def launch_with(
    kernel: str, tile: TileSize, problem: Problem, context: LaunchContext
) -> KernelLaunch:
    """Launch the forward pass with a kernel and tiles that are given.

    Raises
    ------
    ValueError
        Where the tiles do not fit.
    """
    family = hopper if kernel == HOPPER else generic
    launch: KernelLaunch = family.forward_launch(problem, context, (tile,))
    if (launch.key.kernel, launch.key.tile) != (kernel, tile[:2]):
        raise ValueError(f"{tile} does not fit {kernel}: {launch.why}")
    return launch


def prepared(kernel: str, tile: TileSize, x: Inputs) -> Call:
    """Return a call that computes the output and the logsumexp; both are made once."""
    import cupy

    from tileattn.backends.cupy.describe import inputs_of

    problem, operands = parse(x.q, x.k, x.v, {})
    out = cupy.ndarray(x.dout.shape, x.dout.dtype)
    lse = cupy.ndarray(out.shape[:3], problem.accum_dtype)

    def plan_of(layout: CallLayout, device: Device) -> LaunchPlan:
        launch = launch_with(kernel, tile, problem, launch_context(problem, layout, device))
        return plan_forward(problem, layout, device, (launch,))

    arrays = inputs_of(operands) | {"out": out, "lse": lse}
    run = planned(arrays, operands, plan_of)

    def call() -> Any:
        run()
        return out, lse

    return call
