"""The generic kernels for float32 as two float16 numbers: on GPUs without wgmma.

``forward`` with ``split_floats`` reads keys and values as ``split_keys`` writes them, and splits
queries and P in registers (``src/split_forward.cuh``). ``backward_float32`` and
``backward_float32_dq`` also read queries and dout as ``split_queries`` writes them. Heads that
cannot be split, and heads with large scores, are left to the generic kernels for float32.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from tileattn.call.problem import Problem
from tileattn.dtypes import NAMED
from tileattn.kernels.cuda.families.context import (
    PLAIN,
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    capability,
    option_fields,
)
from tileattn.kernels.cuda.families.family import Clause, Family, first_reason
from tileattn.kernels.cuda.families.float32 import (
    NARROW_DBIAS,
    query_head_flags,
    row_alignment,
    split_and_repaired,
    split_and_repaired_gradients,
)
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.query_splits import has_short_splits
from tileattn.kernels.cuda.families.shared_memory import (
    float32_generic_backward_bytes,
    float32_generic_bytes,
    generic_static_bytes,
    limit_of_block,
)
from tileattn.kernels.cuda.families.size_class import (
    empty_axes,
    fits_positions,
    suits_generic_planes,
)
from tileattn.kernels.cuda.families.tiles import bucket, tuned_tiles
from tileattn.kernels.cuda.tile_sizes import TileSize

SPLIT_FORWARD = "forward_split_floats"  # the name of its tiles
SPLIT_BACKWARD, SPLIT_DQ = "backward_float32", "backward_float32_dq"
MAX_DIM = 128  # queries of wider heads do not fit in registers, nor dK and dV
_AMPERE = 80  # first compute capability with mma of 16 x 8 x 16 float16 numbers, times ten

_Tiles = Callable[[Problem, LaunchContext], list[tuple[TileSize, int]]]
_CountBytes = Callable[[TileSize, int, int, int], int]

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
        lambda P, context: not suits_generic_planes(P, context.tuning),
    ),
)
_NO_TILE = "no tile fits in shared memory"


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    return first_reason(_UNSUPPORTED, problem, context) or (
        None if _forward_tiles(problem, context) else _NO_TILE
    )


def _why_not_backward(problem: Problem, context: LaunchContext) -> str | None:
    return first_reason((*_UNSUPPORTED, NARROW_DBIAS), problem, context) or (
        None if _key_tiles(problem, context) and _query_tiles(problem, context) else _NO_TILE
    )


def _concerns(problem: Problem, _: LaunchContext) -> bool:
    return problem.dtype.name == "float32" and not problem.is_paged


def _forward(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    P = problem
    traits = KernelTraits(
        main=True, l2_share=context.tuning.grid_l2_share, workspace=query_head_flags
    )
    main = _launch("forward", "queries", P, context, _forward_tiles, traits)
    main = main._replace(key=replace(main.key, alignment_bytes=row_alignment(P, context)))
    return split_and_repaired(main, P, context)


def _backward(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the kernel over keys, the kernel for dq, and what recomputes flagged heads.

    One thread adds to an element of a gradient, or splits are added in a tree. So the order of the
    sums is fixed, also without ``deterministic``.
    """
    P = problem
    main = _launch(SPLIT_BACKWARD, "keys", P, context, _key_tiles, KernelTraits(main=True))
    write_dbias = context.dbias and (context.full_bias or context.entry_copies)
    main = main._replace(key=replace(main.key, write_dbias=write_dbias))
    if has_short_splits(P, context.tuning):
        main = main.split()
    dq = _launch(SPLIT_DQ, "queries", P, context, _query_tiles, PLAIN)
    return split_and_repaired_gradients(main, dq, P, context)


def _launch(
    kernel: str,
    over: Literal["keys", "queries"],
    P: Problem,
    context: LaunchContext,
    tiles: _Tiles,
    traits: KernelTraits,
) -> KernelLaunch:
    """Launch a kernel with the best tile that fits."""
    tile, shared = tiles(P, context)[0]
    key = KernelKey(
        *(kernel, P.dtype.name, *_buckets(P), *tile[:6]),
        split_floats=True,
        alignment_bytes=context.alignment_bytes,
        mask_vector_width=context.mask_vector_width,
        bias_alignment_bytes=context.bias_alignment_bytes,
        **option_fields(P, context),
    )
    grid = Grid(over, key.block_k if over == "keys" else key.block_q)
    return KernelLaunch(key, grid, shared, f"float16 tensor cores, {tile.why}", traits=traits)


def _buckets(P: Problem) -> tuple[int, int]:
    return bucket(P.D), bucket(P.Dv)


def _tiles(
    name: str, static_of: str, count_bytes: _CountBytes, P: Problem, context: LaunchContext
) -> list[tuple[TileSize, int]]:
    """List the tiles that fit, each with its bytes of shared memory, the best first."""
    dim, value = _buckets(P)
    bias_size = NAMED[context.bias].itemsize if context.bias_alignment_bytes else 0
    sized = [
        (tile, count_bytes(tile, dim, value, bias_size))
        for tile in tuned_tiles(name, P.dtype.itemsize, max(dim, value))
    ]
    return [
        (tile, n)
        for tile, n in sized
        if n + generic_static_bytes(static_of, tile, P.dtype.itemsize)
        <= limit_of_block(context.shared_limit, tile.min_blocks_per_sm)
    ]


_forward_tiles: _Tiles = partial(_tiles, SPLIT_FORWARD, "forward", float32_generic_bytes)
_key_tiles: _Tiles = partial(
    _tiles,
    *(SPLIT_BACKWARD, "backward_dkdv", partial(float32_generic_backward_bytes, over_keys=True)),
)
_query_tiles: _Tiles = partial(
    _tiles, *(SPLIT_DQ, "backward_dq", partial(float32_generic_backward_bytes, over_keys=False))
)

SPLIT_GENERIC_FORWARD = Family(
    "the generic kernel for split float32", _forward, _why_not, _concerns
)
SPLIT_GENERIC_BACKWARD = Family(
    "the generic kernels for split float32", _backward, _why_not_backward, _concerns
)
