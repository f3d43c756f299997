"""The kernels for few queries over many keys, which cut the keys into splits (Flash-Decoding).

How keys are cut depends on head dimensions and dtype alone, so that a row has the same bits in any
batch.
"""

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    LaunchContext,
    block_count,
    function_fields,
    option_fields,
    refused,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import split_bytes, split_static_bytes
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, TileSize, bucket

SPLIT, COMBINE = "forward_split", "forward_combine"
LATENT = "forward_latent_sm90"  # for wider heads
LATENT_VALUE_DIM = 512

_REFUSED = frozenset({"block_mask", "dropout_p"})
_FEW_QUERIES = 64
FEW_ROWS = 128  # that share keys, at most: queries of all query heads of a key head
MOST_ROWS = 1 << 30  # counted in 32 bits
_SPLIT_BYTES = 1 << 19  # of keys and values, in a split (measured)
_LEAST_KEYS = 64
_ALL = 1 << 30  # keys
_SHARES = 8  # of the splits of a row, by their index, each of which one warp takes, or one warp all
_WARP_SPLITS = 16  # that one warp loads in two rounds; of more, a warp each share
_WARP_BYTES = 512  # of a row of sums, so that a warp's registers hold those of all shares
_LATENT_KEYS_OF_A_ROW = 64  # of a split, so that its sums have a small share of the bytes

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


def why_not(problem: Problem, context: LaunchContext) -> str | None:
    """Why these kernels do not run a forward pass, if so."""
    P, option = problem, refused(problem, _REFUSED)
    if option is not None:
        return f"{option} is in use"
    if P.page is None and P.sequences is not None:
        return "sequences are packed"
    if max(P.D, P.Dv) > MAX_HEAD_DIM:
        return f"a head dimension is above {MAX_HEAD_DIM}"
    if not P.Nk:
        return "there are no keys"
    if P.page is None and (P.Nq > _FEW_QUERIES or P.group * P.Nq > FEW_ROWS):
        return f"there are more than {_FEW_QUERIES} queries, or {FEW_ROWS} that share keys"
    if P.page is None and "kv_lengths" not in P.features and P.Nk <= keys_per_split(P):
        return "there are few keys"
    if _tile(P, context) is None:
        return "no tile fits in shared memory"
    return None


def why_not_paged(problem: Problem) -> str | None:
    """Why keys in pages do not go with a problem on any GPU: no other kernels read pages."""
    P, option = problem, refused(problem, _REFUSED)
    if option is not None:
        return f"block_table: with {option}"
    if max(P.D, P.Dv) > MAX_HEAD_DIM:
        return f"block_table: with a head dimension above {MAX_HEAD_DIM}"
    if P.group * P.Nq > MOST_ROWS:
        return f"block_table: with more than {MOST_ROWS:,} queries that share a key head"
    return None


def keys_per_split(problem: Problem) -> int:
    """Keys of a split: a power of two, or all where many rows share them, or may.

    Those of wide heads are for latent attention.
    """
    P, shared = problem, problem.group * problem.Nq
    if max(P.D, P.Dv) > MAX_HEAD_DIM:
        return _LATENT_KEYS_OF_A_ROW << (min(max(shared, 16), FEW_ROWS) - 1).bit_length()
    if shared > FEW_ROWS or P.sequences is not None:
        return _ALL
    row = (bucket(P.D) + bucket(P.Dv)) * P.dtype.itemsize
    return max(_LEAST_KEYS, 1 << (_SPLIT_BYTES // row).bit_length() - 1)


def split_count(problem: Problem) -> int:
    """Count the splits of a sequence as long as the arrays have room for."""
    return -(-problem.Nk // keys_per_split(problem))


def partial_bytes(problem: Problem) -> dict[str, int]:
    """Count the bytes of the sums that splits leave: none where each sequence is one split."""
    P, splits = problem, split_count(problem)
    rows = P.B * P.Hq * P.Nq * splits if splits > 1 else 0
    value_dim = bucket(P.Dv) if max(P.D, P.Dv) <= MAX_HEAD_DIM else LATENT_VALUE_DIM
    numbers = {"partial_out": value_dim, "partial_sums": 2}
    return {name: rows * n * P.accum_dtype.itemsize for name, n in numbers.items()}


def launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the kernel over splits, and what joins them where there are several."""
    P, tile = problem, _tile(problem, context)
    if tile is None:
        return ()
    key = _key(P, context, tile)
    shared = _bytes(P, tile)
    splits = split_count(P)
    grid = splits * P.B * P.Hkv * block_count(P, P.group * P.Nq, key.block_q)
    return joined(P, KernelLaunch(key, grid, shared, _FEW if P.page is None else _PAGED))


def joined(problem: Problem, split: KernelLaunch) -> tuple[KernelLaunch, ...]:
    """Launch a kernel over splits, and what joins them where there are several."""
    P, key, splits = problem, split.key, split_count(problem)
    if splits == 1:
        return (split,)
    split = split._replace(why=f"{split.why}: {_CUT.format(keys_per_split(P))}")
    row_bytes = key.value_dim * P.accum_dtype.itemsize
    by_warp = splits <= _WARP_SPLITS and row_bytes <= _WARP_BYTES
    rows, warps = (_SHARES, 1) if by_warp else (1, _SHARES)
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
    return split, KernelLaunch(join, -(-P.B * P.Hq * P.Nq // rows), why=why)


def cuts_keys(key: KernelKey) -> bool:
    """Whether a kernel takes the rows that share keys together, over splits of the keys."""
    return key.kernel in (SPLIT, LATENT) or key.split_kv


def _key(P: Problem, context: LaunchContext, tile: TileSize) -> KernelKey:
    options = option_fields(P, context.bias) | function_fields(P, context)
    sizes = bucket(P.D), bucket(P.Dv), *tile[:6]
    return KernelKey(
        *(SPLIT, P.dtype.name, *sizes),
        alignment_bytes=context.alignment_bytes,
        paged=P.page is not None,
        **options,
    )


def _tile(P: Problem, context: LaunchContext) -> TileSize | None:
    # The rows of packed sequences the device alone may know: their tiles are the same whatever
    # sequences there are, and so are the bits of each.
    rows = P.group * P.Nq if P.sequences is None else FEW_ROWS
    tiles = next((x for x in (_NARROW, _WIDE) if rows <= x[0].block_q), _WIDEST)
    static = (split_static_bytes(tile, P.accum_dtype.itemsize) for tile in tiles)
    fits = (
        tile
        for tile, fixed in zip(tiles, static, strict=True)
        if _bytes(P, tile) + fixed <= context.shared_limit
    )
    return next(fits, None)


def _bytes(P: Problem, tile: TileSize) -> int:
    return split_bytes(tile, bucket(P.D), bucket(P.Dv), P.dtype.itemsize)
