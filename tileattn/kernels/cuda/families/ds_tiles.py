"""The kernels that sum dS over pairs: the gradients of a bias and of what a ``score_mod`` reads."""

from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import generic, hopper
from tileattn.kernels.cuda.families.context import (
    ROW_WARPS,
    WARP,
    KernelLaunch,
    LaunchContext,
    row_grid,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import DAUX_WINDOW_BYTES

DBIAS, DAUX = "backward_dbias", "backward_daux"

_DAUX_WINDOW_LEAST = 32 * 1024  # bytes that tiles leave to sums


def dbias_launch(problem: Problem, context: LaunchContext) -> KernelLaunch:
    """Launch the kernel that sums dbias over the axes along which the bias is broadcast."""
    P, launch = problem, _launch(DBIAS, problem, context)
    b, h, rows, columns = context.bias_shape
    if launch.traits.pair_by_pair:
        return launch._replace(grid=row_grid(b * h * rows * columns))
    tiles = 1 if rows == 1 else -(-P.Nq // launch.key.block_q)
    tiles *= 1 if columns == 1 else -(-P.Nk // launch.key.block_k)
    count = b * h * tiles
    # The kernel for Hopper is persistent.
    grid = min(context.sm_count, count) if launch.tensor_maps else count
    return launch._replace(grid=grid)


def daux_launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch what sums the gradients of elements that a ``score_mod`` reads, then the copies."""
    sums, totals = [], dict[int, KernelLaunch]()
    for x in context.learned:
        limit = context.shared_limit - _DAUX_WINDOW_LEAST
        launch = _launch(DAUX, problem, context._replace(functions=x.functions, shared_limit=limit))
        key, nbytes = launch.key, launch.shared_bytes
        each = WARP * key.warps_m * key.warps_n * problem.accum_dtype.itemsize
        nbytes += min(DAUX_WINDOW_BYTES, context.shared_limit - nbytes) // each * each
        grid = x.heads * x.copies * (-(-problem.Nq // key.block_q) if x.own_rows else 1)
        key = replace(key, smem_bytes=nbytes)
        sums.append(launch._replace(key=key, grid=grid, shared_bytes=nbytes))
        total = KernelKey("backward_daux_sum", key.dtype, warps_m=ROW_WARPS, functions=x.functions)
        grid = -(-x.elements // total.threads)
        totals[x.array] = KernelLaunch(total, grid, why="one thread for each element")
    return *sums, *totals.values()


def _launch(kernel: str, problem: Problem, context: LaunchContext) -> KernelLaunch:
    """Launch the Hopper kernel if it supports the problem, else the generic one; without a grid."""
    return hopper.ds_launch(kernel, problem, context) or generic.configure(kernel, problem, context)
