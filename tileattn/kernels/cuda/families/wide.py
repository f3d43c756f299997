"""The Hopper kernel for head dimensions from 257 to 512: two thread blocks share 128 queries.

Each thread block computes half of the columns of the output, and the scores of half of the keys.
"""

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    option_fields,
    refused,
)
from tileattn.kernels.cuda.families.family import Clause, Family, first_reason, reads_pages
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.hopper import UNSUPPORTED_ANY_DIM
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import (
    HOPPER_GROUP_ROWS,
    HOPPER_LIMIT,
    HOPPER_STATIC,
    wide_bytes,
)
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM
from tileattn.kernels.cuda.tile_sizes import TileSize

WIDE = "forward_wide_sm90"
_BUCKETS = (256, 320, 384, 512)  # half of a bucket has as many columns as a wgmma may have
_MAX_DIM = _BUCKETS[-1]
_PRODUCER_WARPS = 4  # one warpgroup, because setmaxnreg moves registers between warpgroups
_VALUE_ROWS = 32  # keys of a part of the values
_MOST_STAGES = 8

_WIDE = "two thread blocks share 128 queries of wide heads"

_UNSUPPORTED: tuple[Clause, ...] = (
    *UNSUPPORTED_ANY_DIM,
    (f"a head dimension is above {_MAX_DIM}", lambda P, _: max(P.D, P.Dv) > _MAX_DIM),
    ("keys are in pages", lambda P, _: P.is_paged),
)


def _concerns(problem: Problem, _: LaunchContext) -> bool:
    return max(problem.D, problem.Dv) > MAX_HEAD_DIM and not reads_pages(problem)


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    option = refused(
        *(problem, "has_bias", "has_block_mask", "has_dropout", "has_mask", "mask_mod", "score_mod")
    )
    if option is not None:
        return f"{option} is in use"
    return first_reason(_UNSUPPORTED, problem, context)


def _launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    P = problem
    dim, value = (next(n for n in _BUCKETS if n >= x) for x in (P.D, P.Dv))
    tile, shared = next(
        (tile, shared)
        for stages in range(_MOST_STAGES, 0, -1)
        for tile in (TileSize(128, 128, 8, 1, stages, pair=True),)
        if (shared := wide_bytes(tile, dim)) <= HOPPER_LIMIT - HOPPER_STATIC
    )
    key = KernelKey(
        *(WIDE, P.dtype.name, dim, value, *tile[:6]),
        pair=True,
        producer_warps=_PRODUCER_WARPS,
        smem_bytes=shared,
        **option_fields(P, context),
    )
    grid = Grid("queries", key.block_q, each=2)
    maps = ("q", HOPPER_GROUP_ROWS), ("k", key.block_k // 2), ("v", _VALUE_ROWS)
    traits = KernelTraits(main=True)
    return (KernelLaunch(key, grid, shared, _WIDE, maps, traits=traits),)


WIDE_FAMILY = Family("the Hopper kernel for wide heads", _launches, _why_not, _concerns)
