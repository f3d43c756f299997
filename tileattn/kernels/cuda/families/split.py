"""Split-KV (Flash-Decoding) for few queries over many keys, contiguous or in pages.

Splits depend only on head dimensions and dtype, so that a row has the same bits in any batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import decode
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    Parts,
    option_fields,
    refused,
)
from tileattn.kernels.cuda.families.family import (
    NO_GENERIC,
    Clause,
    Family,
    first_reason,
    reads_pages,
)
from tileattn.kernels.cuda.families.grid import PACKED_ROWS, Grid, partial_rows, split_count
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import split_bytes, split_static_bytes
from tileattn.kernels.cuda.families.size_class import (
    FEW_ROWS,
    WHOLE,
    empty_axes,
    has_many_queries,
    has_split_queries,
    packs_heads,
    shared_rows,
    split_keys,
    splits,
)
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, bucket
from tileattn.kernels.cuda.tile_sizes import TileSize

SPLIT, COMBINE, FOLD = "forward_split", "forward_combine", "forward_fold"

_WARP_BYTES = 512  # largest row of sums that one warp joins in its registers
_JOINING_WARPS = 8  # of a thread block: they share the splits of a row, or have a row each

# By the number of rows that share keys: warps_m take 16 rows each, warps_n keys of their own.
_NARROW = (
    TileSize(16, 16, 1, 4, 3),
    TileSize(16, 16, 1, 4, 2),
    TileSize(16, 16, 1, 2, 2),
    TileSize(16, 16, 1, 1, 2),
)
_WIDE = (TileSize(64, 32, 4, 2, 4), TileSize(64, 16, 4, 2, 3), TileSize(64, 16, 4, 1, 2), *_NARROW)
_WIDEST = (TileSize(128, 32, 8, 1, 4), *_WIDE)

# Keys and values of 8 bits beside 16-bit queries: twice the keys, which have as many bytes. A warp
# has all rows of a tile, because it converts the keys for all of its rows at once.
_8_BIT_TILES = (TileSize(16, 32, 1, 4, 3), *_NARROW), (TileSize(32, 32, 1, 4, 2), *_NARROW)
_8_BIT_DIM = 128  # columns that leave registers for these tiles
_8_BIT_UNIT = 32  # columns of a load of keys and values of 8 bits

_FEW = "few queries"
_MORE_ROWS = f"sequences of which more than {PACKED_ROWS} rows share keys"
_8_BIT = "k and v have 8 bits"
_PAGED = "keys are in pages"
_CUT = "cut into splits of {:,} keys"
_JOIN = "one {} for each query, which joins its splits"


def concerns(problem: Problem, context: LaunchContext) -> bool:
    """Return True if queries are few, and keys are many, in pages, or suit `packs_heads`.

    If more than `FEW_ROWS` rows share keys, keys must be many. Keys of 8 bits are always its own.
    """
    P, tuning = problem, context.tuning
    if max(P.D, P.Dv) > MAX_HEAD_DIM or "Nk" in empty_axes(P):
        return False
    if P.is_quantised:
        return True
    many = splits(P, split_keys(P, tuning)) > 1
    if shared_rows(P) <= FEW_ROWS:
        if reads_pages(P):
            return True
        many = many or P.has_lengths or packs_heads(P, tuning)
    return many and has_split_queries(P, tuning) and not P.is_packed


def why_not(problem: Problem, context: LaunchContext) -> str | None:
    """Return why the split-KV kernel does not support a call; None if it does."""
    option = refused(problem, "has_block_mask", "has_dropout")
    return f"{option} is in use" if option else first_reason(_UNSUPPORTED, problem, context)


_UNSUPPORTED: tuple[Clause, ...] = (
    NO_GENERIC,
    ("no tile fits in shared memory", lambda P, context: not any(_tiles(P, context, FEW_ROWS))),
)


@dataclass(frozen=True)
class PartialSums:
    """The part of the workspace for the partial sums of splits of some keys."""

    split_keys: int

    def __call__(self, P: Problem, key: KernelKey) -> Parts:
        """Count the bytes: 0 if each sequence is one split."""
        count = split_count(P, self.split_keys)
        rows = P.B * P.Hkv * partial_rows(P) * count if count > 1 else 0
        numbers = {"partial_out": key.value_dim, "partial_sums": 2}
        size = P.accum_dtype.itemsize
        return Parts({name: rows * n * size for name, n in numbers.items()}, {})


def launches_over_splits(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the split-KV kernel, and the one that joins the splits, if there are several.

    The rows of packed sequences are known only on the device. There one launch splits sequences
    with few rows, and another takes the rest whole, so that the bits of each depend on its own rows
    alone.
    """
    P, keys = problem, split_keys(problem, context.tuning)
    if not P.is_packed:
        return joined(P, context, _launch(P, context, shared_rows(P), Grid("splits"), keys))
    few = _launch(P, context, PACKED_ROWS, Grid("packed splits"), keys)
    many = _launch(P, context, FEW_ROWS, Grid("splits"), WHOLE)
    traits = replace(many.traits, main=False)
    return *joined(P, context, few), many._replace(why=_MORE_ROWS, traits=traits)


def _launch(P: Problem, context: LaunchContext, rows: int, grid: Grid, keys: int) -> KernelLaunch:
    why = _8_BIT if P.is_quantised else _PAGED if P.is_paged else _FEW
    if decode.supports(P, context, rows):
        return decode.launch(P, context, rows, grid)._replace(why=why)
    tile = next(_tiles(P, context, rows))
    key = _key(P, context, tile)
    traits = KernelTraits(main=True, split_keys=keys)
    grid = grid._replace(block=key.block_q, split_keys=keys)
    return KernelLaunch(key, grid, _bytes(P, tile), why, traits=traits)


def joined(
    problem: Problem, context: LaunchContext, split: KernelLaunch
) -> tuple[KernelLaunch, ...]:
    """Add the kernel that joins the splits, if there are several."""
    P, key, keys = problem, split.key, split.traits.split_keys
    count = splits(P, keys)
    if count == 1:
        return (split,)
    split = split._replace(why=f"{split.why}, {_CUT.format(keys)}")
    row_bytes = key.value_dim * P.accum_dtype.itemsize
    fits = row_bytes <= _WARP_BYTES
    by_warp = P.is_invariant or (fits and has_many_queries(P, context.sm_count))
    is_wide = P.accum_dtype.itemsize > 4 or key.value_dim > MAX_HEAD_DIM
    rows, warps = (_JOINING_WARPS, 1) if by_warp else (1, _JOINING_WARPS)
    why = _JOIN.format("warp" if by_warp else "thread block")
    join = KernelKey(
        *(FOLD if P.is_invariant else COMBINE, key.dtype),
        value_dim=key.value_dim,
        kv_dtype=key.kv_dtype,
        packed=key.packed,
        paged=key.packed and key.paged,  # where packed sequences have their keys
        warps_m=rows,
        warps_n=warps,
        min_blocks_per_sm=1 if is_wide else 2,  # two blocks leave a thread 128 registers
        invariant=key.invariant,
        bias=key.bias,
        score_mod=key.score_mod,
        fold_scale=key.fold_scale,
        functions=key.functions if key.score_mod else "",
    )
    traits = KernelTraits(workspace=PartialSums(keys))
    grid = Grid("packed rows" if P.is_packed else "queries", together=rows)
    return split, KernelLaunch(join, grid, why=why, traits=traits)


def _key(P: Problem, context: LaunchContext, tile: TileSize) -> KernelKey:
    sizes = *_buckets(P), *tile[:6]
    return KernelKey(
        *(SPLIT, P.dtype.name, *sizes),
        kv_dtype="" if P.kv_dtype is None else P.kv_dtype.name,
        alignment_bytes=context.alignment_bytes,
        paged=P.is_paged,
        **option_fields(P, context),
    )


def _tiles(P: Problem, context: LaunchContext, rows: int) -> Iterator[TileSize]:
    """Yield the tiles for some rows that fit in shared memory, the best first."""
    lists: tuple[tuple[TileSize, ...], ...] = (_NARROW, _WIDE, _WIDEST)
    if P.is_quantised and P.dtype.itemsize == 2 and max(P.D, P.Dv) <= _8_BIT_DIM:
        lists = _8_BIT_TILES
    tiles = next((x for x in lists if rows <= x[0].block_q), lists[-1])
    for tile in tiles:
        static = split_static_bytes(tile, P.accum_dtype.itemsize, quantised=P.is_quantised)
        if _bytes(P, tile) + static <= context.shared_limit:
            yield tile


def _bytes(P: Problem, tile: TileSize) -> int:
    return split_bytes(tile, *_buckets(P), P.dtype.itemsize, P.kv_itemsize)


def _buckets(P: Problem) -> tuple[int, int]:
    """Return the head dimensions of the kernel."""
    unit = _8_BIT_UNIT if P.is_quantised else 1
    return bucket(P.D, unit), bucket(P.Dv, unit)


SPLIT_FAMILY = Family(
    "split-KV",
    launches_over_splits,
    why_not,
    concerns,
    reads_8_bits=True,
)
