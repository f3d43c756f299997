"""Split-KV (Flash-Decoding): kernels for few queries over many keys, which they split.

Splits depend only on head dimensions and dtype, so that a row has the same bits in any batch.
"""

from collections.abc import Iterator

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    Parts,
    block_count,
    function_fields,
    option_fields,
    refused,
)
from tileattn.kernels.cuda.families.family import Family, reads_pages
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import split_bytes, split_static_bytes
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, bucket
from tileattn.kernels.cuda.tuning import TileSize, Tuning

SPLIT, COMBINE = "forward_split", "forward_combine"

FEW_ROWS = 128  # that share keys, at most: queries of all query heads of a key head
MOST_ROWS = 1 << 30  # counted in 32 bits
WHOLE = 1 << 30  # keys of a split that has all
_GROUPS = 8  # of the splits of a row, by their index: a warp takes each, or one warp all
_WARP_BYTES = 512  # of a row of sums, so that a warp's registers hold those of all groups

# By the rows that share keys: warps_m take 16 of them each, and warps_n keys of their own.
_NARROW = (
    TileSize(16, 16, 1, 4, 3),
    TileSize(16, 16, 1, 4, 2),
    TileSize(16, 16, 1, 2, 2),
    TileSize(16, 16, 1, 1, 2),
)
_WIDE = (TileSize(64, 32, 4, 2, 4), TileSize(64, 16, 4, 2, 3), TileSize(64, 16, 4, 1, 2), *_NARROW)
_WIDEST = (TileSize(128, 32, 8, 1, 4), *_WIDE)

_FEW = "few queries over many keys"
_PAGED = "keys are in pages"
_CUT = "one thread block for each split of {:,} keys"
_JOIN = "one {} for each query, which joins up to {:,} splits"


class Split(Family):
    """Few queries over many keys, contiguous or in pages."""

    name = "split-KV"

    def concerns(self, problem: Problem, context: LaunchContext, direction: str) -> bool:
        """Return True if few rows share keys, and keys are many or in pages."""
        P, tuning = problem, context.tuning
        if direction != "forward" or max(P.D, P.Dv) > MAX_HEAD_DIM or P.group * P.Nq > FEW_ROWS:
            return False
        if reads_pages(P):
            return True
        many = P.has_lengths or P.Nk > split_keys_of(P, tuning)
        return P.Nk > 0 and many and P.Nq <= tuning.split_queries and not P.is_packed

    def why_not(self, problem: Problem, context: LaunchContext, direction: str) -> str | None:  # noqa: ARG002 - the interface of families
        """Return why the kernels do not run a pass; None if they do."""
        return why_not(problem, context)

    def forward(self, problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
        """Return the kernel over splits, and the one that joins them."""
        return joined(problem, context, launch_over_splits(problem, context))


SPLIT_FAMILY = Split()


def why_not(problem: Problem, context: LaunchContext) -> str | None:
    """Return why the kernel over splits does not honour a call; None if it does."""
    option = refused(problem, "has_block_mask", "has_dropout")
    if option is not None:
        return f"{option} is in use"
    return "no tile fits in shared memory" if next(_tiles(problem, context), None) is None else None


def split_keys_of(problem: Problem, tuning: Tuning) -> int:
    """Return the keys of a split: a power of two, or all if many rows share keys, or may."""
    P = problem
    if P.group * P.Nq > FEW_ROWS or P.is_packed:
        return WHOLE
    row = (bucket(P.D) + bucket(P.Dv)) * P.dtype.itemsize
    return 1 << (tuning.split_bytes // row).bit_length() - 1


def split_count(problem: Problem, split_keys: int) -> int:
    """Count the splits of a sequence as long as the arrays have room for."""
    return -(-problem.Nk // split_keys)


def partial_bytes(problem: Problem, split_keys: int, value_dim: int) -> dict[str, int]:
    """Count the bytes of the sums that splits leave: none if each sequence is one split."""
    P, splits = problem, split_count(problem, split_keys)
    rows = P.B * P.Hq * P.Nq * splits if splits > 1 else 0
    numbers = {"partial_out": value_dim, "partial_sums": 2}
    return {name: rows * n * P.accum_dtype.itemsize for name, n in numbers.items()}


def launch_over_splits(problem: Problem, context: LaunchContext) -> KernelLaunch:
    """Launch the kernel over splits."""
    P, tile = problem, next(_tiles(problem, context))
    key, split_keys = _key(P, context, tile), split_keys_of(P, context.tuning)
    grid = split_count(P, split_keys) * P.B * P.Hkv * block_count(P, P.group * P.Nq, key.block_q)
    traits = KernelTraits(main=True, split_keys=split_keys)
    why = _PAGED if P.is_paged else _FEW
    return KernelLaunch(key, grid, _bytes(P, tile), why, traits=traits)


def joined(
    problem: Problem, context: LaunchContext, split: KernelLaunch
) -> tuple[KernelLaunch, ...]:
    """Launch a kernel over splits, and what joins them if there are several."""
    P, key, split_keys = problem, split.key, split.traits.split_keys
    splits = split_count(P, split_keys)
    if splits == 1:
        return (split,)
    split = split._replace(why=f"{split.why}: {_CUT.format(split_keys)}")
    row_bytes = key.value_dim * P.accum_dtype.itemsize
    by_warp = splits <= context.tuning.warp_splits and row_bytes <= _WARP_BYTES
    rows, warps = (_GROUPS, 1) if by_warp else (1, _GROUPS)
    why = _JOIN.format("warp" if by_warp else "thread block", splits)
    join = KernelKey(
        *(COMBINE, key.dtype),
        value_dim=key.value_dim,
        warps_m=rows,
        warps_n=warps,
        bias=key.bias,
        score_mod=key.score_mod,
        fold_scale=key.fold_scale,
        functions=key.functions if key.score_mod else "",
    )

    def workspace(P: Problem, key: KernelKey) -> Parts:
        return Parts(partial_bytes(P, split_keys, key.value_dim), {})

    traits = KernelTraits(workspace=workspace)
    return split, KernelLaunch(join, -(-P.B * P.Hq * P.Nq // rows), why=why, traits=traits)


def _key(P: Problem, context: LaunchContext, tile: TileSize) -> KernelKey:
    options = option_fields(P, context.bias) | function_fields(P, context)
    sizes = bucket(P.D), bucket(P.Dv), *tile[:6]
    return KernelKey(
        *(SPLIT, P.dtype.name, *sizes),
        alignment_bytes=context.alignment_bytes,
        paged=P.is_paged,
        **options,
    )


def _tiles(P: Problem, context: LaunchContext) -> Iterator[TileSize]:
    """Yield the tiles that fit in shared memory, the best first."""
    # The rows of packed sequences may be known only on the device: their tiles, and so their bits,
    # are the same for all lengths.
    rows = FEW_ROWS if P.is_packed else P.group * P.Nq
    tiles = next((x for x in (_NARROW, _WIDE) if rows <= x[0].block_q), _WIDEST)
    for tile in tiles:
        static = split_static_bytes(tile, P.accum_dtype.itemsize)
        if _bytes(P, tile) + static <= context.shared_limit:
            yield tile


def _bytes(P: Problem, tile: TileSize) -> int:
    return split_bytes(tile, bucket(P.D), bucket(P.Dv), P.dtype.itemsize)
