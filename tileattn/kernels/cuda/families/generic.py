"""The generic kernels (mma.sync): every problem, on every GPU.

If no tile fits in shared memory, naive kernels run instead, one warp per row.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tileattn.call.problem import Problem
from tileattn.dtypes import NAMED
from tileattn.kernels.cuda.families.context import (
    FAILED,
    LARGE_SCORES,
    NON_FINITE,
    PLAIN,
    ROW_WARPS,
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    Parts,
    has_clusters,
    option_fields,
    rows_of_block,
)
from tileattn.kernels.cuda.families.family import NO_GENERIC, Family, first_reason
from tileattn.kernels.cuda.families.grid import OPEN, Grid
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.query_splits import splits_queries
from tileattn.kernels.cuda.families.shared_memory import (
    generic_bytes,
    generic_static_bytes,
    limit_of_block,
)
from tileattn.kernels.cuda.families.size_class import (
    has_keys,
    has_queries,
    has_small_key_block,
    short_rows,
    suits_small_ds_tiles,
    suits_small_key_blocks,
)
from tileattn.kernels.cuda.families.tiles import (
    MAX_HEAD_DIM,
    SMALL_TILE,
    small_first,
    tuned_tiles,
    whole_row_bucket,
)
from tileattn.kernels.cuda.tile_sizes import TileSize

NAIVE = {
    "forward": "naive_forward",
    "backward_dkdv": "naive_dkdv",
    "backward_dq": "naive_dq",
    "backward_dbias": "naive_dbias",
    "backward_large_scores": "naive_large_scores",
}

_STAGES_BIAS = ("backward_dbias", "backward_daux")  # in shared memory, also if it is not aligned

# Bytes of a row of dq that the kernel over keys may write. Wider rows took longer (H200, float32,
# D = 64, windows of 64: 0.89).
_WRITTEN_DQ_BYTES = 128

_REPAIRS = (
    "for heads with large scores, NaN or infinity; usually there are none, and it returns at once"
)

# Tiles for GPUs with so little shared memory that no row of `TILES` fits.
_SMALL = tuple(TileSize(*x) for x in ((64, 32, 4), (32, 32, 2), (32, 16, 2), (16, 16, 1)))
_SMALL_KEYS = tuple(
    TileSize(*x) for x in ((32, 64, 4, 2), (32, 32, 2, 2), (16, 32, 2), (16, 16, 1))
)


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    return first_reason((NO_GENERIC,), problem, context)


def _backward(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch what computes dq, dk and dv.

    By default the kernel over keys also adds dq, in any order, or writes it if a block has all
    keys. In deterministic mode a kernel over queries computes dq, since it also computes dq of
    flagged heads, with the same bits. Pairs of thread blocks leave flagged heads to other kernels.
    """
    P = problem
    if not has_keys(P):
        return (dq_launch(P, context),) if has_queries(P) else ()
    dkdv = dkdv_launch(P, context, add_dq=not context.deterministic, pair=True)
    if not has_queries(P):
        return (dkdv,)
    alone = dkdv.key.pair or dkdv.traits.pair_by_pair
    if splits_queries(P, context.tuning) and not alone:
        dkdv = dkdv.split()
    own = _with_repairs(dkdv, dkdv_launch(P, context, add_dq=False), context)
    others = dq_launch(P, context)
    if not dkdv.key.add_dq:
        return *own, *_with_repairs(dq_launch(P, context, pair=True), others, context)
    convert = () if dkdv.key.write_dq else (_dq_convert(dkdv.key),)
    return *own, *convert, repairing(others, context, NON_FINITE | LARGE_SCORES)


def forward_launch(
    problem: Problem, context: LaunchContext, tiles: Sequence[TileSize] = ()
) -> KernelLaunch:
    """Launch the forward pass with the first tile that fits, of ``tiles`` if there are any."""
    P = problem
    launch = configure("forward", P, context, tiles, pair=True)
    columns = 1 if launch.traits.pair_by_pair else max(1, -(-P.Dv // launch.key.value_dim))
    return _over_queries(launch, columns)


def dkdv_launch(
    problem: Problem, context: LaunchContext, *, add_dq: bool, pair: bool = False
) -> KernelLaunch:
    """Launch the kernel over keys.

    ``add_dq`` lets it add to dq if it can and there are queries. ``pair`` allows pairs of thread
    blocks.
    """
    launch = configure("backward_dkdv", problem, context, pair=pair)
    if launch.traits.pair_by_pair:
        return launch._replace(blocks=Grid("keys", together=ROW_WARPS))
    write_dbias = context.dbias and (context.full_bias or context.entry_copies)
    add_dq = add_dq and has_queries(problem)
    has_all_keys = has_small_key_block(problem) and launch.key.block_k >= SMALL_TILE
    is_narrow = launch.key.head_dim * problem.dtype.itemsize <= _WRITTEN_DQ_BYTES
    write_dq = add_dq and has_all_keys and is_narrow
    write_dq = write_dq and not splits_queries(problem, context.tuning)
    key = replace(launch.key, add_dq=add_dq, write_dq=write_dq, write_dbias=write_dbias)
    return launch._replace(key=key, blocks=Grid("keys", key.block_k, each=1 + key.pair))


def dq_launch(problem: Problem, context: LaunchContext, *, pair: bool = False) -> KernelLaunch:
    """Launch the kernel over queries that computes dq; ``pair`` is as in `dkdv_launch`."""
    return _over_queries(configure("backward_dq", problem, context, pair=pair))


def large_scores_launch(problem: Problem, context: LaunchContext) -> KernelLaunch:
    """Launch the kernel that recomputes lse from exactly the scores that the dq kernel computes."""
    dq = configure("backward_dq", problem, context)
    if dq.traits.pair_by_pair:
        launch = dq._replace(key=replace(dq.key, kernel=NAIVE["backward_large_scores"]))
    else:
        launch = configure("backward_large_scores", problem, context)
    launch = launch._replace(key=replace(launch.key, dropout=False, origin=False))
    return repairing(_over_queries(launch), context, LARGE_SCORES)


def _over_queries(launch: KernelLaunch, columns: int = 1) -> KernelLaunch:
    """Set the grid: the query blocks of all heads, or their rows in a naive kernel."""
    if launch.traits.pair_by_pair:
        return launch._replace(blocks=Grid("queries", together=ROW_WARPS))
    each = columns * (1 + launch.key.pair)
    return launch._replace(blocks=Grid("queries", launch.key.block_q, each=each))


def _with_repairs(
    launch: KernelLaunch, others: KernelLaunch, context: LaunchContext
) -> tuple[KernelLaunch, ...]:
    """Add the kernel that computes the heads that pairs of thread blocks leave to it."""
    if not launch.key.pair:
        return (launch,)
    return launch, repairing(others, context, NON_FINITE | LARGE_SCORES | FAILED)


def repairing(launch: KernelLaunch, context: LaunchContext, flags: int) -> KernelLaunch:
    """Restrict a kernel to flagged heads, with at most as many thread blocks as run at a time."""
    each = _NAIVE_BLOCKS if launch.traits.pair_by_pair else launch.key.min_blocks_per_sm
    most = min(launch.blocks.most, context.sm_count * each)
    key, blocks = replace(launch.key, head_flags=flags), launch.blocks._replace(most=most)
    return launch._replace(key=key, blocks=blocks, why=_REPAIRS)


def configure(
    kernel: str,
    problem: Problem,
    context: LaunchContext,
    tiles: Sequence[TileSize] = (),
    *,
    pair: bool = False,
) -> KernelLaunch:
    """Choose the first tile of a kernel that fits, else the naive kernel; leave the grid open.

    ``pair`` allows pairs of thread blocks if the GPU has clusters.
    """
    P, pair = problem, pair and has_clusters(context.arch)
    options = option_fields(P, context)
    options["mask_vector_width"] = context.mask_vector_width
    options["alignment_bytes"] = context.alignment_bytes
    for tile in tiles or _tiles(kernel, P, context):
        if pair or not tile.pair:
            launch = _tiled(kernel, tile, P, context, options)
            if launch is not None:
                return launch
    key = KernelKey(NAIVE[kernel], P.dtype.name, warps_m=ROW_WARPS, **options)
    why = f"no tile fits head dimensions {P.D} and {P.Dv}: one warp for each row"
    return KernelLaunch(key, OPEN, why=why, traits=replace(_NAIVE, main=kernel in _MAIN))


def _tiles(kernel: str, P: Problem, context: LaunchContext) -> tuple[TileSize, ...]:
    """List the tiles of a kernel, the fastest first.

    With a block mask, forward tiles whose keys align with the blocks come first. A tile that
    straddles two blocks is often partial, which costs most. The keys of a tile decide about bits,
    so with ``invariant`` they depend on neither blocks nor alignment.
    """
    mask_block_k = context.mask_block_k

    def straddles(tile: TileSize) -> bool:
        return max(tile.block_k, mask_block_k) % min(tile.block_k, mask_block_k) > 0

    best = tuned_tiles(kernel, P.dtype.itemsize, max(P.D, P.Dv))
    if not best:
        return ()
    short = short_rows(P, context.tuning)
    best = tuple([tile for tile in best if not tile.short or tile.block_q in short])
    if mask_block_k and kernel == "forward" and not P.is_invariant:
        best = tuple(sorted(best, key=straddles))
    small = {
        "backward_dbias": suits_small_ds_tiles(P, context.tuning),
        "backward_dkdv": suits_small_key_blocks(P, context.tuning),
    }
    if small.get(kernel):
        best = small_first(best)
    return best + (_SMALL_KEYS if kernel == "backward_dkdv" else _SMALL)


def _tiled(
    kernel: str, tile: TileSize, P: Problem, context: LaunchContext, options: dict[str, Any]
) -> KernelLaunch | None:
    """Launch a kernel with a tile; None if it does not fit in shared memory."""
    size, bias_alignment = P.dtype.itemsize, context.bias_alignment_bytes
    staged = context.bias and (bias_alignment or kernel in _STAGES_BIAS or P.is_invariant)
    bias_size = NAMED[context.bias].itemsize if staged else 0
    unit = 32 * tile.warps_n if tile.pair else 1
    dims = P.D, min(P.Dv, MAX_HEAD_DIM)
    dim, value = (whole_row_bucket(n, size, unit) for n in dims)
    shared_bytes = generic_bytes(kernel, tile, dim, value, size, bias_size)
    # A bias must not lower the occupancy that the tile asks for.
    blocks = tile.min_blocks_per_sm if bias_size else 1
    limit = limit_of_block(context.shared_limit, blocks)
    fits = shared_bytes + generic_static_bytes(kernel, tile, size) <= limit
    if not (fits and _divides(kernel, tile, dim, value)):
        return None
    sizes = kernel, P.dtype.name, dim, value, *tile[:6]
    key = KernelKey(*sizes, bias_alignment_bytes=bias_alignment, pair=tile.pair, **options)
    return KernelLaunch(key, OPEN, shared_bytes, tile.why, traits=_traits(kernel, context))


def _traits(kernel: str, context: LaunchContext) -> KernelTraits:
    if kernel == "forward":
        return KernelTraits(main=True, l2_share=context.tuning.grid_l2_share)
    return _DKDV if kernel == "backward_dkdv" else PLAIN


def _dq_sums(P: Problem, key: KernelKey) -> Parts:
    sums = P.B * P.Hq * P.Nq * key.head_dim * P.accum_dtype.itemsize
    return Parts({}, {"dq_accum": sums} if key.add_dq and not key.write_dq else {})


_MAIN = ("forward", "backward_dkdv")
_NAIVE_BLOCKS = 8  # thread blocks of a naive kernel that run at a time on an SM
_NAIVE = KernelTraits(pair_by_pair=True)
_DKDV = KernelTraits(main=True, workspace=_dq_sums)


def _dq_convert(key: KernelKey) -> KernelLaunch:
    """Launch the kernel that rounds the sums of dq to the dtype of q."""
    key = replace(key, kernel="backward_dq_convert", warps_m=ROW_WARPS, warps_n=1, pair=False)
    rows = rows_of_block(key, key.head_dim)
    key = replace(key, add_dq=False, write_dbias=False, score_mod=False, mask_mod=False)
    key = replace(key, split_q=False)
    key = replace(key, functions="")
    return KernelLaunch(key, Grid("queries", together=rows))


def _divides(kernel: str, tile: TileSize, dim: int, value: int) -> bool:
    """Return True if every warp has whole pairs of mma atoms of the columns that warps share."""
    if tile.pair:
        dim, value = dim // 2, value // 2
    shared = {
        "forward": (tile.block_k, value),
        "backward_dkdv": (tile.block_q, dim, value),
        "backward_dbias": (tile.block_k,),
        "backward_daux": (tile.block_k,),
    }.get(kernel, ())
    return all(columns % (16 * tile.warps_n) == 0 for columns in shared)


GENERIC_FORWARD = Family(
    "the generic kernel",
    lambda P, context: (forward_launch(P, context),),
    _why_not,
    invariant=True,
)
GENERIC_BACKWARD = Family("the generic kernel", _backward, _why_not)
