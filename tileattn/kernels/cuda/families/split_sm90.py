"""Split-KV with the Hopper forward kernel, if many rows share keys.

A tile holds all rows of a key head. With few rows ``forward_split`` is as fast: it waits for the
keys, not for the tensor cores.
"""

from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import hopper, split
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext, refused
from tileattn.kernels.cuda.families.family import Family
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.size_class import shared_rows, split_keys, splits
from tileattn.kernels.cuda.families.tiles import bucket
from tileattn.kernels.cuda.tuning import TileSize

_WHY = "each SM takes an equal share of the keys that many rows share"

# By the larger head-dimension bucket. The keys of a tile divide the keys of a split.
_TILES = {
    64: TileSize(128, 128, 8, 1, 4),
    128: TileSize(128, 128, 8, 1, 2),
    192: TileSize(128, 64, 8, 1, 3),
    256: TileSize(128, 64, 8, 1, 2),
}


def tile_of(problem: Problem) -> TileSize:
    """Return the tile; like the splits, it depends only on head dimensions."""
    dim = bucket(max(problem.D, problem.Dv))
    return next(tile for limit, tile in _TILES.items() if dim <= limit)


def _concerns(problem: Problem, context: LaunchContext) -> bool:
    many = shared_rows(problem) > context.tuning.split_wgmma_rows
    return many and split.concerns(problem, context)


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    P, tuning = problem, context.tuning
    option = refused(P, "has_alibi", "has_bias", "has_mask", "mask_mod", "score_mod")
    if option is not None:
        return f"{option} is in use"
    if splits(P, split_keys(P, tuning), tuning) == 1:
        return "there is one split"
    return split.why_not(P, context) or hopper.why_not_forward(P, context)


def _launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    P, keys = problem, split_keys(problem, context.tuning)
    launch = hopper.forward_launch(P, context, (tile_of(P),))
    launch = launch._replace(
        key=replace(launch.key, split_kv=True),
        blocks=Grid("splits", launch.key.block_q, split_keys=keys, most=context.sm_count),
        why=_WHY,
        traits=replace(launch.traits, split_keys=keys),
    )
    return split.joined(P, context, launch)


SPLIT_HOPPER_FAMILY = Family("the Hopper kernel over splits", _launches, _why_not, _concerns)
