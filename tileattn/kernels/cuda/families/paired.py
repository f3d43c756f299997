"""The Hopper backward kernels for head dimensions above 256: pairs of thread blocks.

The two thread blocks of a cluster have half of the columns each, and add their parts of the scores.
"""

from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import generic, hopper
from tileattn.kernels.cuda.families.context import (
    FAILED,
    LARGE_SCORES,
    NON_FINITE,
    KernelLaunch,
    LaunchContext,
)
from tileattn.kernels.cuda.families.family import Clause, Family, first_reason
from tileattn.kernels.cuda.families.grid import OPEN, Grid
from tileattn.kernels.cuda.families.shared_memory import (
    HOPPER_GROUP_ROWS,
    HOPPER_LIMIT,
    HOPPER_STATIC,
    hopper_backward_bytes,
    hopper_wide_dq_bytes,
)
from tileattn.kernels.cuda.families.size_class import is_head_major
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, tuned_tiles
from tileattn.kernels.cuda.tile_sizes import TileSize

BUCKETS = (256, 320, 384, 512)  # of the columns of both thread blocks
_MOST = BUCKETS[-1]

_UNSUPPORTED: tuple[Clause, ...] = (
    *hopper.UNSUPPORTED_ANY_DIM,
    (f"a head dimension is above {_MOST}", lambda P, _: max(P.D, P.Dv) > _MOST),
    ("the head dimension of q and k is not a multiple of 8", lambda P, _: P.D % 8 > 0),
    ("bias is in use", lambda P, _: P.has_bias),
)


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    return first_reason(_UNSUPPORTED, problem, context)


def _backward(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the kernels for dk and dv and for dq, and what recomputes flagged heads."""
    P = problem
    others = generic.dkdv_launch(P, context, add_dq=False), generic.dq_launch(P, context)
    flags = NON_FINITE | LARGE_SCORES | FAILED
    repairs = (generic.repairing(launch, context, flags) for launch in others)
    return _dkdv_launch(P, context), _dq_launch(P, context), *repairs


def _dkdv_launch(P: Problem, context: LaunchContext) -> KernelLaunch:
    launch = _launch(hopper.HOPPER_WIDE, P, context)
    key = replace(launch.key, head_major=is_head_major(P, context.tuning))
    half = key.block_q // 2  # queries of a box
    maps = ("q", half), ("k", key.block_k), ("v", key.block_k), ("dout", half)
    grid = Grid("keys", key.block_k, each=2, most=_most(context))
    traits = hopper.BACKWARD_TRAITS[key.kernel]
    return launch._replace(key=key, blocks=grid, tensor_maps=maps, traits=traits)


def _dq_launch(P: Problem, context: LaunchContext) -> KernelLaunch:
    launch = _launch(hopper.HOPPER_WIDE_DQ, P, context)
    key, rows, half = launch.key, HOPPER_GROUP_ROWS, launch.key.block_k // 2
    maps = ("q", rows), ("k", half), ("v", half), ("dout", rows)
    grid = Grid("queries", key.block_q, each=2, most=_most(context))
    return launch._replace(blocks=grid, tensor_maps=maps, traits=hopper.WIDE_DQ_TRAITS)


def _launch(kernel: str, P: Problem, context: LaunchContext) -> KernelLaunch:
    """Launch a kernel with the first tile that fits; leave its grid open."""
    dim, value = _bucket(P.D), _bucket(P.Dv)

    def shared_bytes(tile: TileSize) -> int:
        if kernel == hopper.HOPPER_WIDE:
            return hopper_backward_bytes(tile, dim // 2, value // 2, pair=True)
        return hopper_wide_dq_bytes(tile, dim // 2, value // 2, pair=True)

    tile = next(
        tile
        for tile in tuned_tiles(kernel, P.dtype.itemsize, max(dim, value))
        if shared_bytes(tile) <= HOPPER_LIMIT - HOPPER_STATIC
    )
    key = hopper.key_of(kernel, P, context, dim, value, tile, shared_bytes(tile))
    key = replace(key, pair=True)
    why = f"{hopper.SUPPORTED}, {tile.why}, half of the columns each"
    return KernelLaunch(key, OPEN, key.smem_bytes, why)


def _bucket(dim: int) -> int:
    return next(n for n in BUCKETS if n >= dim)


def _most(context: LaunchContext) -> int:
    """Return the thread blocks that run at a time: whole pairs."""
    return max(2, context.sm_count // 2 * 2)


PAIRED_BACKWARD_FAMILY = Family(
    "the Hopper kernel for pairs of thread blocks",
    _backward,
    _why_not,
    lambda P, _: max(P.D, P.Dv) > MAX_HEAD_DIM,
)
