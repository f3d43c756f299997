"""Hopper kernels for float32: each number is two float16 numbers (``src/splitting.cuh``).

Other kernels split the arrays before. The heads that cannot be split, and heads with large scores,
are left to the generic kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import generic
from tileattn.kernels.cuda.families.context import (
    COUNT,
    FAILED,
    LARGE_SCORES,
    NON_FINITE,
    PLAIN,
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    Parts,
)
from tileattn.kernels.cuda.families.family import (
    NOT_HOPPER,
    Clause,
    Family,
    first_reason,
)
from tileattn.kernels.cuda.families.grid import Grid, Over, block_count
from tileattn.kernels.cuda.families.hopper import (
    SUPPORTED,
    backward_workspace,
    bias_size,
    forward_workspace,
    key_of,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import (
    HOPPER_LIMIT,
    HOPPER_STATIC,
    float32_forward_bytes,
    hopper_backward_bytes,
    hopper_wide_dq_bytes,
)
from tileattn.kernels.cuda.families.size_class import (
    empty_axes,
    fits_positions,
    is_head_major,
    suits_planes,
)
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, tuned_tiles
from tileattn.kernels.cuda.tile_sizes import TileSize

FLOAT32_FORWARD = "forward_float32_sm90"
FLOAT32_BACKWARD, FLOAT32_DQ = "backward_float32_sm90", "backward_float32_dq_sm90"
SPLIT_KEYS, SPLIT_QUERIES = "split_keys", "split_queries"
TILE_ROWS = 64  # rows that share a factor, as in algorithm/splitting.py
_UNIT = 16  # columns: the K extent of wgmma
_NARROW_DIM = 32  # up to here generic kernels were faster with dbias (H200: docs/tuning-log.md)
_WARPS = 8  # of a thread block that splits a tile
PLANE_BYTES, _FACTOR_BYTES = 2, 4  # of an element of planes, and of a factor
_SPLITS = "float32 as two float16 numbers, before the main kernel"

_UNSUPPORTED: tuple[Clause, ...] = (
    ("dtype is not float32", lambda P, _: P.dtype.name != "float32"),
    NOT_HOPPER,
    ("an array is empty", lambda P, _: bool(empty_axes(P)) or 0 in (P.D, P.Dv)),
    ("an array has nearly 2**31 rows or more", lambda P, _: not fits_positions(P)),
    (f"a head dimension is above {MAX_HEAD_DIM}", lambda P, _: max(P.D, P.Dv) > MAX_HEAD_DIM),
    ("queries or keys are few", lambda P, context: not suits_planes(P, context.tuning)),
)
_UNSUPPORTED_FORWARD: tuple[Clause, ...] = (
    *_UNSUPPORTED,
    ("no tile has room for the bias", lambda P, context: not _tiles(P, context)),
)
NARROW_DBIAS: Clause = (
    "the gradient of a bias of narrow heads is wanted",
    lambda P, context: context.dbias and max(P.D, P.Dv) <= _NARROW_DIM,
)
_UNSUPPORTED_BACKWARD: tuple[Clause, ...] = (*_UNSUPPORTED, NARROW_DBIAS)


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    return first_reason(_UNSUPPORTED_FORWARD, problem, context)


def _why_not_backward(problem: Problem, context: LaunchContext) -> str | None:
    return first_reason(_UNSUPPORTED_BACKWARD, problem, context)


def _concerns(problem: Problem, _: LaunchContext) -> bool:
    return problem.dtype.name == "float32" and not problem.is_paged


def _forward(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    P, (dim, value) = problem, _buckets(problem)
    tile, shared = _tiles(P, context)[0]
    key = key_of(FLOAT32_FORWARD, P, context, dim, value, tile, shared)
    key = replace(key, alignment_bytes=row_alignment(P, context), split_floats=True)
    grid = Grid("queries", key.block_q, most=context.sm_count)
    maps = ("k_planes", key.block_k), ("v_planes", key.block_k)
    main = KernelLaunch(key, grid, shared, f"{SUPPORTED}, {tile.why}", maps, traits=_FORWARD)
    return split_and_repaired(main, P, context)


def split_and_repaired(
    main: KernelLaunch, P: Problem, context: LaunchContext
) -> tuple[KernelLaunch, ...]:
    """Split the keys before a forward kernel, and compute the heads that fail after it."""
    splits = split_launch(SPLIT_KEYS, P, context, (main.key.head_dim, main.key.value_dim))
    others = generic.repairing(generic.forward_launch(P, context), context, FAILED)
    return splits, main, others._replace(traits=PLAIN)


def row_alignment(P: Problem, context: LaunchContext) -> int:
    """Return the alignment of rows of queries that two elements at a time do not overrun."""
    return P.dtype.itemsize if P.D % 2 else context.alignment_bytes


def _tiles(P: Problem, context: LaunchContext) -> list[tuple[TileSize, int]]:
    """List the tiles that fit, each with its bytes of shared memory, the best first.

    With a mask a tile has 128 queries, as blocks of masks.
    """
    dim, value = _buckets(P)
    plain = not (P.changes_scores or P.has_pair_mask or P.has_dropout)
    tiles = tuned_tiles(FLOAT32_FORWARD, P.dtype.itemsize, max(dim, value))
    sized = (
        (tile, float32_forward_bytes(tile, dim, value, bias_size(context)))
        for tile in tiles
        if plain or not tile.is_tall
    )
    return [(tile, shared) for tile, shared in sized if shared <= HOPPER_LIMIT - HOPPER_STATIC]


def _backward(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the kernel over keys, the kernel for dq, and what recomputes flagged heads.

    All sums stay in registers, so they have a fixed order, also without ``deterministic``. The
    kernel for dq has dS of every pair, so it writes dbias like the generic kernel over keys.
    """
    P = problem
    changes_bias = P.softcap is not None or P.score_mod is not None  # on the way from dS to dbias
    dbias = context.dbias and (context.full_bias or context.entry_copies) and not changes_bias
    main = _gradients(FLOAT32_BACKWARD, "keys", P, context, hopper_backward_bytes, _KEYS)
    main = main._replace(key=replace(main.key, head_major=is_head_major(P, context.tuning)))
    dq = _gradients(FLOAT32_DQ, "queries", P, context, hopper_wide_dq_bytes, _DQ)
    dq = dq._replace(key=replace(dq.key, write_dbias=dbias))
    context = context._replace(dbias=dbias)  # otherwise a kernel of its own computes it
    return split_and_repaired_gradients(main, dq, P, context)


def split_and_repaired_gradients(
    main: KernelLaunch, dq: KernelLaunch, P: Problem, context: LaunchContext
) -> tuple[KernelLaunch, ...]:
    """Split all operands before both backward kernels, and compute the heads left after them."""
    others = generic.dq_launch(P, context), generic.dkdv_launch(P, context, add_dq=False)
    left = NON_FINITE | LARGE_SCORES | FAILED
    repairs = (generic.repairing(x, context, left)._replace(traits=PLAIN) for x in others)
    sizes = main.key.head_dim, main.key.value_dim
    splits = (split_launch(kernel, P, context, sizes) for kernel in (SPLIT_KEYS, SPLIT_QUERIES))
    return *splits, main, dq, *repairs


def _gradients(
    kernel: str,
    over: Literal["keys", "queries"],
    P: Problem,
    context: LaunchContext,
    count_bytes: Callable[[TileSize, int, int], int],
    traits: KernelTraits,
) -> KernelLaunch:
    """Launch a backward kernel over blocks of keys, or of queries."""
    dim, value = _buckets(P)
    tile = tuned_tiles(kernel, P.dtype.itemsize, max(dim, value))[0]
    shared = count_bytes(tile, plane_columns(dim), plane_columns(value))
    key = key_of(kernel, P, context, dim, value, tile, shared)
    key = replace(key, alignment_bytes=context.alignment_bytes, bias_alignment_bytes=0)
    key = replace(key, split_floats=True)
    grid = Grid(over, key.block_k if over == "keys" else key.block_q, most=context.sm_count)
    q_rows, k_rows = min(tile.block_q, TILE_ROWS), min(tile.block_k, TILE_ROWS)
    rows = {"q": q_rows, "k": k_rows, "v": k_rows, "dout": q_rows}
    maps = tuple((f"{name}_planes", count) for name, count in rows.items())
    return KernelLaunch(key, grid, shared, f"{SUPPORTED}, {tile.why}", maps, traits=traits)


def _buckets(P: Problem) -> tuple[int, int]:
    dim, value = (-(-n // _UNIT) * _UNIT for n in (P.D, P.Dv))
    return dim, value


def split_launch(
    kernel: str, P: Problem, context: LaunchContext, sizes: tuple[int, int]
) -> KernelLaunch:
    """Launch the kernel that splits k and v, or q and dout; ``sizes`` are the buckets of both."""
    of_keys = kernel == SPLIT_KEYS
    key = KernelKey(
        *(kernel, P.dtype.name, *sizes),
        warps_m=_WARPS,
        alignment_bytes=context.alignment_bytes,
        packed=P.is_packed,
    )
    over: Over = "keys" if of_keys else "queries"
    traits = KernelTraits(workspace=_Planes(("k", "v") if of_keys else ("q", "dout")))
    return KernelLaunch(key, Grid(over, TILE_ROWS, each=2), why=_SPLITS, traits=traits)


def plane_columns(dim: int) -> int:
    """Return the columns of a row of planes: as in ``src/splitting.cuh``."""
    return -(-dim // 64) * 128


def plane_shape(problem: Problem, name: str) -> tuple[int, int, int, int]:
    """Return the shape of the planes of q, k, v or dout."""
    P = problem
    H, N = (P.Hq, P.Nq) if name in ("q", "dout") else (P.Hkv, P.Nk)
    return P.B, H, N, plane_columns(P.D if name in ("q", "k") else P.Dv)


@dataclass(frozen=True)
class _Planes:
    """The part of the workspace for the planes of two arrays, and for their factors."""

    names: tuple[str, ...]

    def __call__(self, P: Problem, _: KernelKey) -> Parts:
        """Return the bytes of each part."""
        found = {}
        for name in self.names:
            B, H, N, columns = plane_shape(P, name)
            found[f"{name}_planes"] = PLANE_BYTES * B * H * N * columns
            found[f"{name}_factors"] = _FACTOR_BYTES * B * H * block_count(P, N, TILE_ROWS)
        return Parts(found, {})


def _forward_workspace(P: Problem, key: KernelKey) -> Parts:
    """Add flags of query heads, which the kernel that splits keys clears."""
    found = forward_workspace(P, key)
    return found._replace(scratch=found.scratch | query_head_flags(P, key).scratch)


def query_head_flags(P: Problem, _: KernelKey) -> Parts:
    """Return the flags of query heads."""
    return Parts({"head_flags": (2 + P.entries * P.Hq) * COUNT}, {})


_FORWARD = KernelTraits(
    main=True, persistent="queries", tile_lists=True, workspace=_forward_workspace
)
_KEYS = KernelTraits(main=True, persistent="keys", tile_lists=True, workspace=backward_workspace)
_DQ = KernelTraits(persistent="queries")

FLOAT32_FORWARD_FAMILY = Family("the Hopper kernel for float32", _forward, _why_not, _concerns)
FLOAT32_BACKWARD_FAMILY = Family(
    "the Hopper kernel for float32", _backward, _why_not_backward, _concerns
)
