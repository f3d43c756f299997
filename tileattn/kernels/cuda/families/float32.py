"""Hopper kernels for float32: each number is two float16 numbers (``src/splitting.cuh``).

A kernel splits keys and values. The heads that it cannot split, and heads with large scores, are
left to the generic kernel.
"""

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import generic
from tileattn.kernels.cuda.families.context import (
    COUNT,
    FAILED,
    PLAIN,
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    Parts,
)
from tileattn.kernels.cuda.families.family import (
    NO_TENSOR_MAPS,
    NOT_ALIGNED,
    NOT_HOPPER,
    Clause,
    Family,
    first_reason,
)
from tileattn.kernels.cuda.families.grid import Grid, block_count
from tileattn.kernels.cuda.families.hopper import SUPPORTED, forward_workspace, key_of
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import (
    HOPPER_LIMIT,
    HOPPER_STATIC,
    float32_forward_bytes,
)
from tileattn.kernels.cuda.families.size_class import empty_axes, fits_positions, suits_planes
from tileattn.kernels.cuda.families.tiles import tuned_tiles
from tileattn.kernels.cuda.tile_sizes import TileSize

FLOAT32_FORWARD, SPLIT_ROWS = "forward_float32_sm90", "split_rows"
MAX_DIM = 128
TILE_ROWS = 64  # rows that share a factor
_UNIT = 16  # columns: the K extent of wgmma
_WARPS = 8
_SPLITS = "float32 as two float16 numbers, before the main kernel"

_UNSUPPORTED: tuple[Clause, ...] = (
    ("dtype is not float32", lambda P, _: P.dtype.name != "float32"),
    NOT_HOPPER,
    ("an array is empty", lambda P, _: bool(empty_axes(P)) or 0 in (P.D, P.Dv)),
    ("an array has nearly 2**31 rows or more", lambda P, _: not fits_positions(P)),
    (f"a head dimension is above {MAX_DIM}", lambda P, _: max(P.D, P.Dv) > MAX_DIM),
    NOT_ALIGNED,
    NO_TENSOR_MAPS,
    ("queries or keys are few", lambda P, context: not suits_planes(P, context.tuning)),
)


def plane_columns(dim: int) -> int:
    """Return the columns of a row of planes: as in ``src/splitting.cuh``."""
    return -(-dim // 64) * 128


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    return first_reason(_UNSUPPORTED, problem, context)


def _concerns(problem: Problem, _: LaunchContext) -> bool:
    return problem.dtype.name == "float32" and not problem.is_paged


def _launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    P = problem
    dim, value = (-(-n // _UNIT) * _UNIT for n in (P.D, P.Dv))
    bias_size = P.dtype.itemsize if context.bias_alignment_bytes else 0
    tile = _tile(P, dim, value, bias_size)
    shared = float32_forward_bytes(tile, dim, value, bias_size)
    key = key_of(FLOAT32_FORWARD, P, context, dim, value, tile, shared)
    grid = Grid("queries", key.block_q, most=context.sm_count)
    maps = ("k_planes", key.block_k), ("v_planes", key.block_k)
    main = KernelLaunch(key, grid, shared, f"{SUPPORTED}, {tile.why}", maps, traits=_MAIN)
    others = generic.repairing(generic.forward_launch(P, context), context, FAILED)
    return _split_rows(P, key, context), main, others._replace(traits=PLAIN)


def _tile(P: Problem, dim: int, value: int, bias_size: int) -> TileSize:
    """Return the first tile that fits. With a mask a tile has 128 queries, as blocks of masks."""
    tiles = tuned_tiles(FLOAT32_FORWARD, P.dtype.itemsize, max(dim, value))
    plain = not (P.changes_scores or P.has_pair_mask or P.has_dropout)
    return next(
        tile
        for tile in tiles
        if (plain or not tile.is_tall)
        and float32_forward_bytes(tile, dim, value, bias_size) + HOPPER_STATIC <= HOPPER_LIMIT
    )


def _split_rows(P: Problem, main: KernelKey, context: LaunchContext) -> KernelLaunch:
    key = KernelKey(
        *(SPLIT_ROWS, P.dtype.name, main.head_dim, main.value_dim),
        warps_m=_WARPS,
        alignment_bytes=context.alignment_bytes,
        packed=P.is_packed,
    )
    return KernelLaunch(key, Grid("keys", TILE_ROWS, each=2), why=_SPLITS, traits=_SPLITTING)


def planes(P: Problem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the planes of keys and values: (B, Hkv, Nk, columns)."""
    return {
        name: (P.B, P.Hkv, P.Nk, plane_columns(dim))
        for name, dim in (("k_planes", P.D), ("v_planes", P.Dv))
    }


def _planes_workspace(P: Problem, _: KernelKey) -> Parts:
    tiles = P.B * P.Hkv * block_count(P, P.Nk, TILE_ROWS)
    rows = P.B * P.Hkv * P.Nk
    found = {name: 2 * rows * shape[-1] for name, shape in planes(P).items()}
    found |= dict.fromkeys(("k_factors", "v_factors"), 4 * tiles)
    return Parts({**found, "head_flags": (2 + P.entries * P.Hkv) * COUNT}, {})


_SPLITTING = KernelTraits(workspace=_planes_workspace)
_MAIN = KernelTraits(main=True, persistent="queries", tile_lists=True, workspace=forward_workspace)

FLOAT32_FORWARD_FAMILY = Family("the Hopper kernel for float32", _launches, _why_not, _concerns)
