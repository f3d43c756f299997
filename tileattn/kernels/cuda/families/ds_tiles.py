"""The kernels that sum dS: gradients of a bias, and of arrays that a ``score_mod`` reads."""

from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import generic, hopper
from tileattn.kernels.cuda.families.context import (
    ROW_WARPS,
    WARP,
    KernelLaunch,
    LaunchContext,
)
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import DAUX_WINDOW_BYTES

DBIAS, DAUX = "backward_dbias", "backward_daux"

_DAUX_WINDOW_LEAST = 32 * 1024  # bytes of shared memory that tiles leave for private sums


def dbias_launch(problem: Problem, context: LaunchContext) -> KernelLaunch:
    """Launch the kernel that sums dbias over the axes along which the bias is broadcast."""
    launch = _launch(DBIAS, problem, context)
    if launch.traits.pair_by_pair:
        return launch._replace(blocks=Grid("bias", together=ROW_WARPS))
    grid = Grid("bias", launch.key.block_q, launch.key.block_k)
    if launch.tensor_maps:  # the kernel for Hopper is persistent
        grid = grid._replace(most=context.sm_count)
    return launch._replace(blocks=grid)


def daux_launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the kernels that sum gradients of array elements, then those that add the copies."""
    sums, totals = [], dict[int, KernelLaunch]()
    for n, x in enumerate(context.learned):
        limit = context.shared_limit - _DAUX_WINDOW_LEAST
        launch = _launch(DAUX, problem, context._replace(functions=x.functions, shared_limit=limit))
        key, nbytes = launch.key, launch.shared_bytes
        each = WARP * key.warps_m * key.warps_n * problem.accum_dtype.itemsize
        nbytes += min(DAUX_WINDOW_BYTES, context.shared_limit - nbytes) // each * each
        grid = Grid("learned", key.block_q if x.own_rows else 0, number=n)
        key = replace(key, smem_bytes=nbytes)
        sums.append(launch._replace(key=key, blocks=grid, shared_bytes=nbytes))
        total = KernelKey("backward_daux_sum", key.dtype, warps_m=ROW_WARPS, functions=x.functions)
        grid = Grid("elements", number=x.array, together=total.threads)
        totals[x.array] = KernelLaunch(total, grid, why="one thread for each element")
    return *sums, *totals.values()


def _launch(kernel: str, problem: Problem, context: LaunchContext) -> KernelLaunch:
    """Launch the Hopper kernel if it supports the call, else the generic one; grid open."""
    return hopper.ds_launch(kernel, problem, context) or generic.configure(kernel, problem, context)
