"""The generic forward kernel for float32 as two float16 numbers: on GPUs without wgmma.

``forward`` with ``split_floats`` reads keys and values as ``split_keys`` writes them, and splits
queries and P in registers (``src/split_forward.cuh``). Heads that cannot be split, and heads with
large scores, are left to ``forward`` without ``split_floats``.
"""

from tileattn.call.problem import Problem
from tileattn.dtypes import NAMED
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    capability,
    option_fields,
)
from tileattn.kernels.cuda.families.family import Clause, Family, first_reason
from tileattn.kernels.cuda.families.float32 import (
    query_head_flags,
    row_alignment,
    split_and_repaired,
)
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import (
    float32_generic_bytes,
    generic_static_bytes,
    limit_of_block,
)
from tileattn.kernels.cuda.families.size_class import empty_axes, fits_positions, suits_planes
from tileattn.kernels.cuda.families.tiles import bucket, tuned_tiles
from tileattn.kernels.cuda.tile_sizes import TileSize

SPLIT_FLOATS = "forward_split_floats"  # its name in `TILES`
MAX_DIM = 128  # queries of wider heads do not fit in registers
_AMPERE = 80  # first compute capability with mma of 16 x 8 x 16 float16 numbers, times ten

_UNSUPPORTED: tuple[Clause, ...] = (
    ("dtype is not float32", lambda P, _: P.dtype.name != "float32"),
    (
        "the GPU has a compute capability below 8.0",
        lambda _, context: capability(context.arch) < _AMPERE,
    ),
    ("an array is empty", lambda P, _: bool(empty_axes(P)) or 0 in (P.D, P.Dv)),
    ("an array has nearly 2**31 rows or more", lambda P, _: not fits_positions(P)),
    (f"a head dimension is above {MAX_DIM}", lambda P, _: max(P.D, P.Dv) > MAX_DIM),
    (
        "queries or keys are few",
        lambda P, context: not suits_planes(P, context.tuning.generic_plane_rows),
    ),
    ("no tile fits in shared memory", lambda P, context: not _tiles(P, context)),
)


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    return first_reason(_UNSUPPORTED, problem, context)


def _concerns(problem: Problem, _: LaunchContext) -> bool:
    return problem.dtype.name == "float32" and not problem.is_paged


def _forward(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    P = problem
    tile, shared = _tiles(P, context)[0]
    key = KernelKey(
        *("forward", P.dtype.name, *_buckets(P), *tile[:6]),
        split_floats=True,
        alignment_bytes=row_alignment(P, context),
        mask_vector_width=context.mask_vector_width,
        bias_alignment_bytes=context.bias_alignment_bytes,
        **option_fields(P, context),
    )
    traits = KernelTraits(
        main=True, l2_share=context.tuning.grid_l2_share, workspace=query_head_flags
    )
    why = f"float16 tensor cores, {tile.why}"
    main = KernelLaunch(key, Grid("queries", key.block_q), shared, why, traits=traits)
    return split_and_repaired(main, P, context)


def _buckets(P: Problem) -> tuple[int, int]:
    return bucket(P.D), bucket(P.Dv)


def _tiles(P: Problem, context: LaunchContext) -> list[tuple[TileSize, int]]:
    """List the tiles that fit, each with its bytes of shared memory, the best first."""
    dim, value = _buckets(P)
    bias_size = NAMED[context.bias].itemsize if context.bias_alignment_bytes else 0
    sized = [
        (tile, float32_generic_bytes(tile, dim, value, bias_size))
        for tile in tuned_tiles(SPLIT_FLOATS, P.dtype.itemsize, max(dim, value))
    ]
    return [
        (tile, n)
        for tile, n in sized
        if n + generic_static_bytes("forward", tile, P.dtype.itemsize)
        <= limit_of_block(context.shared_limit, tile.min_blocks_per_sm)
    ]


SPLIT_GENERIC_FORWARD = Family(
    "the generic kernel for split float32", _forward, _why_not, _concerns
)
