"""The kernels that sum dS: gradients of a bias, and of arrays that a ``score_mod`` reads."""

import math
from collections.abc import Iterable
from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import generic, hopper
from tileattn.kernels.cuda.families.context import (
    ROW_WARPS,
    WARP,
    KernelLaunch,
    LaunchContext,
)
from tileattn.kernels.cuda.families.grid import Grid, GridSizes
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import DAUX_WINDOW_BYTES

DBIAS, DBIAS_SUM, DAUX = "backward_dbias", "backward_dbias_sum", "backward_daux"

_SUM_WARPS = 8
# Least thread blocks of an SM. The compiler then gives a thread 40 registers instead of 64
# (float32, NVRTC 13.5); no gain of time was measured (H200).
_SUM_BLOCKS = 4
_WHY_SUM = "several thread blocks have summed or written each element"
_DAUX_WINDOW_LEAST = 32 * 1024  # bytes of shared memory that tiles leave for private sums


def dbias_launches(
    problem: Problem, context: LaunchContext, *, written: bool
) -> tuple[KernelLaunch, ...]:
    """Launch the kernel that sums dbias over the axes along which the bias is broadcast.

    If thread blocks share tiles of dbias, another kernel adds up their sums. If the kernel over
    keys has ``written`` dbias, or a copy for each batch entry, there are only copies to add up.
    """
    total = KernelKey(
        *(DBIAS_SUM, problem.dtype.name),
        warps_m=_SUM_WARPS,
        min_blocks_per_sm=_SUM_BLOCKS,
        bias=context.bias,
    )
    if written:
        copies = Grid("copies of dbias", tasks=0, together=total.threads)
        return (KernelLaunch(total, copies, why=_WHY_SUM),) if context.entry_copies else ()
    launch = _launch(DBIAS, problem, context)
    if launch.traits.pair_by_pair:
        return (launch._replace(blocks=Grid("bias", together=ROW_WARPS)),)
    key = launch.key
    grid = Grid("bias", key.block_q, key.block_k, tasks=context.tuning.dbias_tasks)
    copies = grid._replace(over="copies of dbias", together=total.threads)
    if launch.tensor_maps:  # the kernel for Hopper is persistent
        grid = grid._replace(most=context.sm_count * key.min_blocks_per_sm)
    return launch._replace(blocks=grid), KernelLaunch(total, copies, why=_WHY_SUM)


def dbias_copies(launches: Iterable[KernelLaunch], sizes: GridSizes) -> tuple[int, dict[str, int]]:
    """Return the copies of dbias that thread blocks sum into, and their bytes in the workspace.

    The only copy is dbias itself. Zero copies: no kernel sums over tiles.
    """
    rules = (launch.blocks for launch in launches if launch.key.kernel == DBIAS_SUM)
    copies = next((rule.copies(sizes) for rule in rules), 0)
    size = math.prod(sizes.bias_shape) * sizes.problem.accum_dtype.itemsize
    return copies, {"dbias_sums": copies * size} if copies > 1 else {}


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
