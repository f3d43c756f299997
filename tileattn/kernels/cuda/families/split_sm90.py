"""Hopper's forward kernel over splits of the keys, of many rows that share them.

A tile has all rows of a key head. Few of them leave tensor cores idle in ``forward_split``, too:
reading the keys takes longer.
"""

from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import hopper, split
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext, refused
from tileattn.kernels.cuda.families.tiles import TileSize, bucket

_FEW_ROWS = 32  # for which mma.sync does
_WHY = "many rows that share keys: each SM takes an equal share of the splits of {:,} keys"

# By the larger head-dimension bucket; each tile divides a split.
_TILES = {
    64: TileSize(128, 128, 8, 1, 4),
    128: TileSize(128, 128, 8, 1, 2),
    192: TileSize(128, 64, 8, 1, 3),
    256: TileSize(128, 64, 8, 1, 2),
}
_PER_HEAD = frozenset({"alibi_slopes", "bias", "mask", "mask_mod", "score_mod"})


def launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch what cuts keys into splits: as `split.launches`, or with the Hopper kernel first."""
    first, *join = split.launches(problem, context)
    if problem.group * problem.Nq <= _FEW_ROWS:
        return (first, *join)
    refusal = why_not(problem, context)
    if refusal is None:
        first = _launch(problem, context)
    else:
        first = first._replace(why=f"the Hopper kernel, because {refusal}; {first.why}")
    return (first, *join)


def why_not(problem: Problem, context: LaunchContext) -> str | None:
    """Why the Hopper kernel does not take the rows of a problem that is cut into splits."""
    P = problem
    if P.group * P.Nq > tile_of(P).block_q:
        return f"more than {tile_of(P).block_q} rows share keys"
    option = refused(P, _PER_HEAD)
    if option is not None:
        return f"{option} is in use"
    if split.split_count(P) == 1:
        return "there is one split"
    return hopper.why_not(P, context, "forward")


def tile_of(problem: Problem) -> TileSize:
    """Give the tile: as the splits, it depends on head dimensions alone."""
    dim = bucket(max(problem.D, problem.Dv))
    return next(tile for limit, tile in _TILES.items() if dim <= limit)


def _launch(P: Problem, context: LaunchContext) -> KernelLaunch:
    launch = hopper.forward(P, context, (tile_of(P),))
    grid = min(context.sm_count, split.split_count(P) * P.B * P.Hkv)
    key = replace(launch.key, split_kv=True)
    return launch._replace(key=key, grid=grid, why=_WHY.format(split.keys_per_split(P)))
