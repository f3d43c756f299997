"""Size classes: all that the numbers of a call decide about its kernels.

Calls of one kind, one `SizeClass` and one `LaunchContext` run the same kernels. Kernel families ask
the functions of this module and read no other number: grids and parameters are filled in later.
"""

from bisect import bisect_left
from typing import NamedTuple

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.grid import (
    PACKED_ROWS,
    TALL_ROWS,
    block_count,
    split_count,
)
from tileattn.kernels.cuda.families.query_splits import has_short_splits, splits_queries
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, SMALL_TILE, bucket
from tileattn.kernels.cuda.tuning import Tuning

FEW_ROWS = 128  # query rows that share a key head, at most, in one block of split-KV
MOST_ROWS = 1 << 30  # query rows that share a key head, at most: kernels count them in 32 bits
WHOLE = 1 << 30  # keys of a split that has all keys
_SEVERAL = 2  # stands for any number of splits above 1

# Keys of a split of all calls with ``invariant``, a multiple of the keys of a tile. Measured on an
# H200 (docs/tuning-log.md, invariant calls).
_INVARIANT_SPLIT = 4096
_MANY_ROWS = 2048  # query rows that share a key head; with more, splits grow no longer
_SHARED_ROWS = (16, 32, 64, FEW_ROWS, MOST_ROWS, MOST_ROWS + 1)
_MANY_QUERIES = 2  # for each SM
_NO_AXES: frozenset[str] = frozenset()
# Queries and keys of tiles: of short ones, and of the others.
_SHORT_BLOCKS, _LARGE_BLOCK = ((64, 64), (128, 96)), (128, 128)
_TALL_QUERIES, _TALL_COLUMNS = 192, 128  # of a forward tile; the columns at most
_MOST_TALL_KEYS, _WIDE_TALL_KEYS = 128, (96, 64)  # wide: above `_NARROW` columns
_NARROW = 64  # columns of heads that leave registers for larger tiles
# Largest head dimension at which generic kernels were faster for float32 with few keys (H200:
# docs/tuning-log.md).
_NARROW_PLANES = 32
# Largest head dimension at which small key blocks were faster (float32, H200: docs/tuning-log.md).
_SMALL_BLOCK_DIM = 32
_KEY_BLOCKS = (64, 128)  # keys of a tile of the Hopper backward kernels
# Positions have 32 bits; the margin is for what the last tile goes beyond.
_MOST_POSITIONS = (1 << 31) - (1 << 16)


class SizeClass(NamedTuple):
    """The answers of this module's functions for one call, by their names."""

    empty_axes: frozenset[str]
    fits_positions: bool
    positive_scale: bool
    shared_rows: int
    split_keys: int
    splits: int
    groups: int
    pieces: int
    fills_groups: bool
    has_many_queries: bool
    has_split_queries: bool
    packs_heads: bool
    has_dynamic_keys: bool
    has_short_keys: bool
    has_two_group_keys: bool
    short_rows: tuple[int, ...]
    suits_planes: bool
    suits_generic_planes: bool
    tall_keys: int
    fills_tall_tiles: bool
    suits_tall_rows: bool
    is_head_major: bool
    suits_small_ds_tiles: bool
    suits_small_key_blocks: bool
    has_small_key_block: bool
    is_window: bool
    splits_queries: bool
    has_short_splits: bool
    delta_beside: tuple[int, ...]


def size_class(P: Problem, tuning: Tuning, sm_count: int) -> SizeClass:
    """Return the size class of a call."""
    keys = split_keys(P, tuning)
    return SizeClass(
        empty_axes(P),
        fits_positions(P),
        positive_scale(P),
        shared_rows(P),
        keys,
        splits(P, keys),
        splits(P, group_keys(P, tuning)),
        splits(P, piece_keys(P, tuning)),
        fills_groups(P, tuning, sm_count),
        has_many_queries(P, sm_count),
        has_split_queries(P, tuning),
        packs_heads(P, tuning),
        has_dynamic_keys(P, tuning),
        has_short_keys(P, tuning),
        has_two_group_keys(P, tuning),
        short_rows(P, tuning),
        suits_planes(P, tuning),
        suits_generic_planes(P, tuning),
        tall_keys(P, tuning),
        fills_tall_tiles(P, tuning, sm_count),
        suits_tall_rows(P, tuning),
        is_head_major(P, tuning),
        suits_small_ds_tiles(P, tuning),
        suits_small_key_blocks(P, tuning),
        has_small_key_block(P),
        is_window(P),
        splits_queries(P, tuning),
        has_short_splits(P, tuning),
        tuple([n for n in _KEY_BLOCKS if delta_beside(P, n, tuning, sm_count)]),
    )


def empty_axes(P: Problem) -> frozenset[str]:
    """Return the axes of length 0. Their kernels do not run."""
    if P.B and P.Hq and P.Hkv and P.Nq and P.Nk:
        return _NO_AXES
    return frozenset(name for name in ("B", "Hq", "Hkv", "Nq", "Nk") if not getattr(P, name))


def has_queries(P: Problem) -> bool:
    """Return True if q has a row."""
    return P.B * P.Hq * P.Nq > 0


def has_keys(P: Problem) -> bool:
    """Return True if k has a row."""
    return P.B * P.Hkv * P.Nk > 0


def fits_positions(P: Problem) -> bool:
    """Return True if the Hopper kernels can count all rows."""
    return P.B * max(P.Hq * P.Nq, P.Hkv * P.Nk) < _MOST_POSITIONS


def positive_scale(P: Problem) -> bool:
    """Return True if the scale may be folded into the exponent."""
    return P.scale > 0


def shared_rows(P: Problem) -> int:
    """Return the query rows that share a key head, rounded up to a class: see `_SHARED_ROWS`."""
    return _SHARED_ROWS[bisect_left(_SHARED_ROWS, P.group * P.Nq, 0, len(_SHARED_ROWS) - 1)]


def split_keys(P: Problem, tuning: Tuning) -> int:
    """Return the keys of a split: a power of two, or `WHOLE` if there are many queries, or may be.

    Packed sequences with few rows are split if their keys are in pages: then the arrays tell the
    longest length.
    If many rows share keys, splits are long, so that their sums are few bytes: more rows are more
    work tiles, too.
    Many rows with score functions or a mask are not split: other kernels skip more of their tiles.
    With ``invariant`` nothing of a call counts, since kernels for many queries cut the keys, too.
    """
    if P.is_invariant:
        return _INVARIANT_SPLIT
    rows = PACKED_ROWS if P.is_packed else shared_rows(P)
    if max(P.D, P.Dv) > MAX_HEAD_DIM:
        return tuning.latent_keys_per_row << (min(rows, FEW_ROWS) - 1).bit_length()
    few = rows <= FEW_ROWS or (has_split_queries(P, tuning) and not has_functions(P))
    if not few or (P.is_packed and not P.is_paged):
        return WHOLE
    least = _keys_of(P, tuning.split_bytes)
    if rows <= FEW_ROWS:
        return least
    many = min(1 << (P.group * P.Nq - 1).bit_length(), _MANY_ROWS)
    return max(least, many * many // tuning.split_square)


def splits(P: Problem, keys: int) -> int:
    """Return 0, 1 or `_SEVERAL`."""
    return min(split_count(P, keys), _SEVERAL)


def group_keys(P: Problem, tuning: Tuning) -> int:
    """Return the keys of a split of the Hopper kernel for few rows: a power of two."""
    few = P.is_packed or P.group * P.Nq <= PACKED_ROWS
    return _keys_of(P, tuning.group_bytes[0 if few else 1])


def piece_keys(P: Problem, tuning: Tuning) -> int:
    """Return the keys of a piece of such a split: a power of two."""
    return _keys_of(P, tuning.piece_bytes)


def fills_groups(P: Problem, tuning: Tuning, sm_count: int) -> bool:
    """Return True if work tiles of `group_keys` are enough for all SMs; else use `piece_keys`.

    The answer depends on the batch, so both must give bitwise identical results.
    """
    count = split_count(P, group_keys(P, tuning)) * P.entries * P.Hkv
    return count >= tuning.group_waves * sm_count


def has_many_queries(P: Problem, sm_count: int) -> bool:
    """Return True if one warp for each query of each head gives work to all SMs."""
    return P.B * P.Hq * P.Nq >= _MANY_QUERIES * sm_count


def _keys_of(P: Problem, nbytes: int) -> int:
    """Return how many keys have ``nbytes`` with their values, rounded down to a power of two.

    Heads above `MAX_HEAD_DIM` columns have other kernels: `WHOLE` for them.
    """
    if max(P.D, P.Dv) > MAX_HEAD_DIM:
        return WHOLE
    row_bytes = (bucket(P.D) + bucket(P.Dv)) * P.kv_itemsize
    return 1 << (nbytes // row_bytes).bit_length() - 1


def has_split_queries(P: Problem, tuning: Tuning) -> bool:
    """Return True if queries are few enough for split-KV."""
    return P.Nq <= tuning.split_queries


def packs_heads(P: Problem, tuning: Tuning) -> bool:
    """Return True if a tile of split-KV should have the queries of all heads that share a key head.

    A head that shares its keys with no other needs such a tile only for one or two queries.
    """
    if P.is_packed or has_functions(P):
        return False
    if P.group == 1:
        return P.Nq <= tuning.split_few_queries
    most = tuning.split_queries if P.Nk >= tuning.pack_keys else tuning.pack_queries
    return P.Nq <= most


def has_functions(P: Problem) -> bool:
    """Return True if something modifies or masks out scores pair by pair."""
    return P.has_alibi or P.has_bias or P.score_mod is not None or P.has_pair_mask


def has_dynamic_keys(P: Problem, tuning: Tuning) -> bool:
    """Return True if keys are few, and work tiles wait for memory."""
    return P.Nk <= tuning.dynamic_keys


def has_short_keys(P: Problem, tuning: Tuning) -> bool:
    """Return True if a causal mask hides much of each key tile."""
    return P.Nk <= tuning.small_tile_keys


def has_two_group_keys(P: Problem, tuning: Tuning) -> bool:
    """Return True if the middle query attends to few keys.

    It stands for the mean, and only the window counts. Packed lengths are known only on the device:
    their tiles are the same for any, and so are the bits of each sequence.
    """
    return P.is_packed or attended_keys(P) <= tuning.two_group_keys


def attended_keys(P: Problem) -> int:
    """Return the keys to which the middle query attends, if only the window counts."""
    left, right = P.window
    key = (P.Nq - 1) // 2 + P.Nk - P.Nq  # on its diagonal
    first = 0 if left is None else max(key - left, 0)
    end = P.Nk if right is None else min(key + right + 1, P.Nk)
    return end - first


def suits_planes(P: Problem, tuning: Tuning) -> bool:
    """Return True if Hopper's kernels for float32 suit the lengths.

    Wider heads may have fewer keys.
    """
    is_narrow = max(P.D, P.Dv) <= _NARROW_PLANES
    return _has_rows(P, tuning.plane_rows, tuning.plane_rows if is_narrow else tuning.plane_keys)


def suits_generic_planes(P: Problem, tuning: Tuning) -> bool:
    """Return True if the generic kernels for split float32 suit the lengths."""
    return _has_rows(P, tuning.generic_plane_rows, tuning.generic_plane_rows)


def _has_rows(P: Problem, queries: int, keys: int) -> bool:
    """Return True for float32 with at least ``queries`` queries, and ``keys`` keys in reach.

    The keys in reach are the keys of the middle query.

    Only the lengths and the window count, so that a row has the same bits in any batch. Packed
    lengths are known only on the device, and count as long.
    """
    left, right = P.window
    if P.dtype.name != "float32":
        return False
    if P.is_packed:
        return left is None or right is None or left + right + 1 >= keys
    return P.Nq >= queries and attended_keys(P) >= keys


def short_rows(P: Problem, tuning: Tuning) -> tuple[int, ...]:
    """Return the queries of the short tiles that suit few queries and keys.

    They pad them less than tiles of 128 x 128. Packed lengths are known only on the device.
    """
    most = tuning.short_tile_rows
    if P.is_packed or P.Nq > most or P.Nk > most:
        return ()
    pairs = padded_pairs(P, *_LARGE_BLOCK)
    return tuple([block[0] for block in _SHORT_BLOCKS if padded_pairs(P, *block) < pairs])


def padded_pairs(P: Problem, block_q: int, block_k: int) -> int:
    """Count the pairs of queries and keys in the tiles of a head."""
    return -(-P.Nq // block_q) * block_q * (-(-P.Nk // block_k) * block_k)


def suits_tall_tiles(P: Problem, tuning: Tuning) -> bool:
    """Return True if forward tiles of 192 queries are best: always for narrow heads.

    They read the keys less often. For wider heads they must pad the queries little more than tiles
    of 128, and no mask may leave tiles empty. Packed lengths are known only on the device, and
    count as long.
    """
    columns = max(P.D, P.Dv)
    if columns <= _NARROW or columns > _TALL_COLUMNS or not _allows_tall_tiles(P, tuning):
        return columns <= _NARROW
    if P.is_packed:
        return True
    tall, other = (-(-P.Nq // rows) * rows for rows in (_TALL_QUERIES, _LARGE_BLOCK[0]))
    return tall <= tuning.tall_padding * other


def tall_keys(P: Problem, tuning: Tuning) -> int:
    """Return how many keys tall forward tiles may have; 0 if tall tiles do not suit.

    Tiles of 96 keys, for 65 to 96 columns, may pad the keys much more than tiles of 64. With a
    causal mask only the last queries would reach the padding.
    """
    if not suits_tall_tiles(P, tuning):
        return 0
    if max(P.D, P.Dv) <= _NARROW or P.is_packed or P.window[1] is not None:
        return _MOST_TALL_KEYS
    padded, least = (-(-P.Nk // keys) * keys for keys in _WIDE_TALL_KEYS)
    return min(_WIDE_TALL_KEYS) if padded > tuning.tall_key_padding * least else _MOST_TALL_KEYS


def fills_tall_tiles(P: Problem, tuning: Tuning, sm_count: int) -> bool:
    """Return True if tall tiles suit, and wide heads have enough of them for all SMs.

    The answer depends on the batch, so the tiles it decides between must give the same bits.
    """
    blocks = P.B * P.Hq * -(-P.Nq // _LARGE_BLOCK[0])
    many = max(P.D, P.Dv) <= _NARROW or blocks >= tuning.tall_waves * sm_count
    return many and _allows_tall_tiles(P, tuning) and suits_tall_tiles(P, tuning)


def _allows_tall_tiles(P: Problem, tuning: Tuning) -> bool:
    """Return True if there is no mask, or the tuned numbers allow tall tiles with a mask."""
    return not P.has_pair_mask or tuning.masked_rows >= _TALL_QUERIES


def suits_tall_rows(P: Problem, tuning: Tuning) -> bool:
    """Return True if backward tiles of `TALL_ROWS` queries suit a call without score modifiers.

    They are faster where queries fill the last tile, without a mask, and if a mask leaves queries
    many keys: with few, more of a tile lies beyond the diagonals. Packed lengths are known only on
    the device: packed sequences count as long, but as short if a window bounds the left side.
    """
    if P.has_pair_mask:
        return False
    left, right = P.window
    if P.is_packed:
        return left is None
    if left is not None or right is not None:
        keys = 0 if right is None else P.Nq if left is None else min(left + right + 1, P.Nk)
        if keys < tuning.tall_mask_keys:
            return False  # whether queries fill the last tile would only split a compiled path
    return -(-P.Nq // TALL_ROWS) * TALL_ROWS <= tuning.padded_queries * P.Nq


def is_head_major(P: Problem, tuning: Tuning) -> bool:
    """Return True if a key block takes the query heads that share its keys one after the other.

    In a window key blocks that run together are at a query tile each, and one comes to a tile a
    step after its neighbour. The L2 cache holds what all load in a step of one head, but not in a
    step of all heads. In a window over most keys more blocks are at the same tile. If the window is
    open on the right, the left side counts.
    """
    left, right = P.window
    if left is None or P.group == 1 or P.is_packed:
        return False
    part, of = tuning.head_major_window
    return of * (left + (right or 0)) <= part * P.Nk


def suits_small_ds_tiles(P: Problem, tuning: Tuning) -> bool:
    """Return True if large tiles of the kernels that sum dS lie mostly past the ends."""
    large, small = (padded_pairs(P, n, n) for n in (2 * SMALL_TILE, SMALL_TILE))
    return P.has_bias and large >= tuning.small_ds_tiles * small


def suits_small_key_blocks(P: Problem, tuning: Tuning) -> bool:
    """Return True if small tiles of the generic kernel over keys are faster."""
    is_narrow = P.dtype.name == "float32" and max(P.D, P.Dv) <= _SMALL_BLOCK_DIM
    few = tuning.small_block_keys if is_narrow else SMALL_TILE
    return P.Nk <= few and not P.is_packed


def has_small_key_block(P: Problem) -> bool:
    """Return True if a small tile of the generic kernel over keys has all keys."""
    return P.Nk <= SMALL_TILE and not P.is_packed


def is_window(P: Problem) -> bool:
    """Return True if a small tile has all queries, too, and columns leave it registers.

    Tiles of the Hopper backward kernels lie mostly past the ends there.
    """
    return has_small_key_block(P) and P.Nq <= SMALL_TILE and max(P.D, P.Dv) <= SMALL_TILE


def fills_tiles(P: Problem) -> bool:
    """Return True if no mask leaves a tile empty."""
    return P.window == (None, None) and not (P.has_pair_mask or P.has_lengths or P.is_packed)


def delta_beside(P: Problem, block_k: int, tuning: Tuning, sm_count: int) -> bool:
    """Return True if there are enough key blocks to compute delta beside the main kernel."""
    blocks = P.B * P.Hkv * block_count(P, P.Nk, block_k)
    return blocks >= tuning.rows_beside_waves * sm_count
