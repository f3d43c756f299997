"""Split-KV with the Hopper forward kernel, if many rows share keys.

A tile holds all rows of a key head. Up to 32 rows have a kernel of their own: `decode`.
"""

from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import hopper, split
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext, refused
from tileattn.kernels.cuda.families.family import Family
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.size_class import packs_heads, shared_rows, split_keys
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, bucket
from tileattn.kernels.cuda.tile_sizes import TileSize
from tileattn.kernels.cuda.tuning import Tuning

_WHY = "each SM takes an equal share of the keys that many rows share"

# Two small thread blocks share an SM: while one begins or ends a split, the other loads.
_SMALL_DIMS, _SMALL_TILE = range(97, 129), TileSize(64, 64, 4, 1, 3, 2)
# By the larger head-dimension bucket. The keys of a tile divide the keys of a split.
_TILES = {
    64: TileSize(128, 128, 8, 1, 4),
    128: TileSize(128, 128, 8, 1, 2),
    192: TileSize(128, 64, 8, 1, 3),
    256: TileSize(128, 64, 8, 1, 2),
}


# With ``invariant``, by the larger head-dimension bucket: for up to 64 rows, and for more. Their
# keys are `invariant_keys`. Measured on an H200 at 64 and 128: docs/tuning-log.md, invariant calls.
_INVARIANT_TILES = {
    64: (TileSize(64, 128, 4, 1, 3, 2), TileSize(128, 128, 8, 1, 4)),
    128: (_SMALL_TILE, TileSize(128, 64, 8, 1, 4)),
    192: (TileSize(128, 64, 8, 1, 3),) * 2,
    256: (TileSize(128, 64, 8, 1, 2),) * 2,
}


def tile_of(problem: Problem, tuning: Tuning) -> TileSize:
    """Return the tile; like the splits, it depends only on head dimensions and rows."""
    dim = bucket(max(problem.D, problem.Dv))
    if problem.is_invariant:
        few, many = next(tiles for limit, tiles in _INVARIANT_TILES.items() if dim <= limit)
        return few if shared_rows(problem) <= few.block_q else many
    if _is_small(problem, tuning):
        return _SMALL_TILE
    return next(tile for limit, tile in _TILES.items() if dim <= limit)


def _is_small(problem: Problem, tuning: Tuning) -> bool:
    """Return True if a small tile suits the head dimensions, and has room for all rows."""
    P, most = problem, tuning.split_small_rows
    return max(P.D, P.Dv) in _SMALL_DIMS and shared_rows(P) <= most


def _concerns(problem: Problem, context: LaunchContext) -> bool:
    """Return True for many rows of split-KV, or of heads that share keys.

    The plan of a packed call knows only the sum of the lengths. The bits of a row must not depend
    on the sum, so the generic kernel takes packed calls.
    """
    P, tuning = problem, context.tuning
    many = shared_rows(P) > tuning.split_wgmma_rows or P.is_invariant
    if not many or max(P.D, P.Dv) > MAX_HEAD_DIM or P.is_packed:
        return False
    return packs_heads(P, tuning) or split.concerns(P, context)


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    option = refused(problem, "has_alibi", "has_bias", "has_mask", "mask_mod", "score_mod")
    if option is not None:
        return f"{option} is in use"
    return split.why_not(problem, context) or hopper.why_not_forward(problem, context)


def _launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    P, keys = problem, split_keys(problem, context.tuning)
    tile = tile_of(P, context.tuning)
    launch = hopper.forward_launch(P, context, (tile,))
    workers = context.sm_count * tile.min_blocks_per_sm
    launch = launch._replace(
        key=replace(launch.key, split_kv=True),
        blocks=Grid("splits", launch.key.block_q, split_keys=keys, most=workers),
        why=_WHY,
        traits=replace(launch.traits, split_keys=keys),
    )
    return split.joined(P, context, launch)


SPLIT_HOPPER_FAMILY = Family(
    "the Hopper kernel over splits", _launches, _why_not, _concerns, invariant=True
)
