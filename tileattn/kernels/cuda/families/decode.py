"""Split-KV for few rows on Hopper, with transposed GEMMs.

The 64 rows of a ``wgmma`` are keys, and its columns are the rows that share them.
"""

from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    refused,
)
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.hopper import forward_launch, is_gathered, why_not_forward
from tileattn.kernels.cuda.families.size_class import fills_groups, group_keys, piece_keys
from tileattn.kernels.cuda.families.tiles import bucket
from tileattn.kernels.cuda.tile_sizes import TileSize

DECODE = "forward_decode_sm90"
_ROWS = (16, 32)
_TILE_BYTES = 128  # bytes of a column of a key tile: 64 keys of 16 bits, or 128 of 8 bits
_COLUMNS = 64  # of v in a GEMM
_8_BIT_UNIT = 16  # columns of 8 bits: TMA needs rows of whole 16-byte chunks
_8_BIT_WIDTH = 128  # columns of 8 bits in a slice of a tile
# Stages that fit on an SM, by the larger head-dimension bucket.
_STAGES = {64: 12, 128: 6, 192: 4, 256: 3}
# Two thread blocks share an SM up to this dimension, and up to so many rows if warps gather keys:
# above, registers would spill.
_SHARED_DIM, _SHARED_GATHER_ROWS = 128, 16
# Producer warps: one alone; one, and three that gather rows of pages; one, and the factor warp.
_LONE_PRODUCER, _GATHERING, _DESCALING = 1, 4, 2


def supports(problem: Problem, context: LaunchContext, rows: int) -> bool:
    """Return True if the kernel supports a call in which ``rows`` rows share a key head."""
    P = problem
    if rows > _ROWS[-1]:
        return False
    if P.is_quantised:
        fits = P.D % _8_BIT_UNIT == 0 == P.Dv % _8_BIT_UNIT
        # Packed lengths are on the device: partial sums would need room for all keys in each
        # sequence.
        is_bounded = P.is_paged or not P.is_packed
        if rows > _ROWS[0] or is_gathered(P) or not (fits and is_bounded):
            return False
    option = refused(P, "has_alibi", "has_bias", "has_mask", "mask_mod", "score_mod")
    return option is None and why_not_forward(P, context) is None


def launch(problem: Problem, context: LaunchContext, rows: int, grid: Grid) -> KernelLaunch:
    """Launch the kernel over splits of the keys, with a tile for ``rows`` rows.

    If splits are too few for all SMs, a work tile is a piece of a split.
    """
    P, dim, tuning = problem, bucket(max(problem.D, problem.Dv)), context.tuning
    rows = next(n for n in _ROWS if rows <= n)
    together = 1 if dim > _SHARED_DIM or (is_gathered(P) and rows > _SHARED_GATHER_ROWS) else 2
    columns = -(-dim // _8_BIT_WIDTH) * _8_BIT_WIDTH if P.is_quantised else dim
    stages = next(n for limit, n in _STAGES.items() if columns <= limit) // together
    tile = TileSize(rows, _TILE_BYTES // P.kv_itemsize, 4, 1, stages, together)
    found = forward_launch(P, context, (tile,), value_unit=_COLUMNS)
    warps = _GATHERING if found.key.gathered else _DESCALING if P.is_quantised else _LONE_PRODUCER
    key = replace(found.key, kernel=DECODE, split_kv=True, producer_warps=warps)
    group, piece = group_keys(P, tuning), piece_keys(P, tuning)
    keys = group if fills_groups(P, tuning, context.sm_count) else piece
    # The kernel is persistent: a thread block takes an equal share of the work tiles.
    most = context.sm_count * together
    grid = grid._replace(block=key.block_q, split_keys=keys, most=most)
    traits = KernelTraits(main=True, split_keys=keys, piece_keys=piece, group_keys=group)
    return found._replace(key=key, blocks=grid, traits=traits)
