"""Tiles of a schedule, counted with arrays in place of a walk.

A window attends to all pairs of most tiles and to none of most others. The former, *inner* tiles,
depend on the block mask alone: prefix sums over query blocks count them for every window. There
are few others on the boundary, and these are cut as ``AttentionMask`` cuts them, all at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.mask import TALL, AttentionMask, SlidingWindow
from tileattn.algorithm.tiles import Tile, cut
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL

Ints = NDArray[np.int64]

_AT_ONCE = 1 << 18  # tiles that are counted together: their counts stay in the L2 cache


class TileCounts(NamedTuple):
    """Counts of the tiles of one mask.

    Parameters
    ----------
    visited, parts, full : int
        Tiles that are not empty; the parts that they are cut into; full parts, with query blocks
        outside.
    keys, rows : int
        Keys of all parts with query blocks outside; queries of all parts with key blocks outside.
    held : array of bool
        True for key blocks with a tile.
    """

    visited: int
    parts: int
    full: int
    keys: int
    rows: int
    held: NDArray[np.bool_]


def count_tiles(masks: Sequence[AttentionMask], tile: tuple[int, int]) -> list[TileCounts]:
    """Count the tiles of masks that differ only in their windows.

    Parameters
    ----------
    masks : sequence of AttentionMask
        The masks.
    tile : (int, int)
        Queries and keys of a tile.

    Returns
    -------
    list of TileCounts
        One for each mask.
    """
    (block_q, block_k), mask = tile, masks[0]
    q, k = np.arange(0, mask.window.Nq, block_q), np.arange(0, mask.Nk, block_k)
    if not len(q) or not len(k):
        return [TileCounts(0, 0, 0, 0, 0, np.zeros(len(k), np.bool_)) for _ in masks]
    if mask.function is not None:
        return [_walked(x, tile) for x in masks]
    spans = [_spans(x.window, k, tile) for x in masks]
    if mask.block_mask is None:
        inner = [_inner(mask, first, stop, tile) for _, first, stop, _ in spans]
    else:
        inner = _inner_of_blocks(mask, [ends for _, *ends, _ in spans], q, k, tile)
    return [_with_boundary(*each, tile) for each in zip(masks, inner, spans, strict=True)]


def _walked(mask: AttentionMask, tile: tuple[int, int]) -> TileCounts:
    """Count the tiles of the user's function, of which the schedule lists few."""
    (block_q, block_k), visited, parts = tile, 0, list[Tile]()
    for span in cut(mask.window.Nq, block_q):
        of_rows = list(mask.row_tiles(*span, block_k))
        visited += len({x.k0 // block_k for x in of_rows})
        parts += of_rows
    columns = [list(mask.column_tiles(*span, block_q)) for span in cut(mask.Nk, block_k)]
    full = sum(x.kind == FULL for x in parts)
    keys, rows = sum(x.k1 - x.k0 for x in parts), sum(x.q1 - x.q0 for y in columns for x in y)
    return TileCounts(visited, len(parts), full, keys, rows, np.array([bool(x) for x in columns]))


def _inner(mask: AttentionMask, first: Ints, stop: Ints, tile: tuple[int, int]) -> Ints:
    """Count the inner tiles of each key block, from and up to some query blocks."""
    tiles, queries = stop - first, np.minimum(stop * tile[0], mask.window.Nq) - first * tile[0]
    return np.stack([tiles, tiles, tiles * (mask.dense is None), tiles * tile[1], queries])


def _inner_of_blocks(
    mask: AttentionMask, ends: list[list[Ints]], q: Ints, k: Ints, tile: tuple[int, int]
) -> list[Ints]:
    """Count the inner tiles under a block mask, for each window's first and last query blocks."""
    inner, at = [np.zeros((5, len(k)), np.int64) for _ in ends], np.arange(len(k))
    dtype = np.int32 if mask.window.Nq * tile[1] < 1 << 31 else np.int64  # half as many bytes
    for lo, hi in cut(len(q), max(1, _AT_ONCE // len(k))):
        rows, columns = q[lo:hi, None], k[None]
        q1 = np.minimum(rows + tile[0], mask.window.Nq)
        sums = np.zeros((5, hi - lo + 1, len(k)), dtype)
        sums[:, 1:] = _parts(mask, None, rows, q1, columns, columns + tile[1], dtype)
        for n in range(hi - lo):  # faster than cumsum, which is slow along this axis
            sums[:, n + 1] += sums[:, n]
        for total, pair in zip(inner, ends, strict=True):
            first, stop = (np.clip(end - lo, 0, hi - lo) for end in pair)
            np.add(total, sums[:, stop, at] - sums[:, first, at], out=total)
    return inner


def _with_boundary(
    mask: AttentionMask, inner: Ints, spans: tuple[Ints, ...], tile: tuple[int, int]
) -> TileCounts:
    """Count the tiles on the boundary too, with query blocks outside and with key blocks."""
    (block_q, block_k), window = tile, mask.window
    first, inner_first, inner_stop, stop = spans
    before = inner_first - first
    counts = before + stop - inner_stop
    column = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(column)) - (counts.cumsum() - counts)[column]
    row = (
        first[column] + nth + np.where(nth < before[column], 0, (inner_stop - inner_first)[column])
    )
    q0, k0 = row[None] * block_q, column[None] * block_k
    q1, k1 = np.minimum(q0 + block_q, window.Nq), np.minimum(k0 + block_k, mask.Nk)
    lo, hi = window.key_range(q0, q1)
    by_rows = _halves(mask, q0, q1, np.maximum(k0, lo), np.minimum(k1, hi))
    lo, hi = window.query_range(k0, k1)
    by_columns = _halves(mask, np.maximum(q0, lo), np.minimum(q1, hi), k0, k1)
    visited, parts, full, keys = (inner[:4].sum(axis=1) + by_rows[:4].sum(axis=(1, 2))).tolist()
    held = inner[0] + np.bincount(column, by_columns[0, 0], len(counts)) > 0
    return TileCounts(visited, parts, full, keys, int(inner[4].sum() + by_columns[4].sum()), held)


def _spans(window: SlidingWindow, k: Ints, tile: tuple[int, int]) -> tuple[Ints, ...]:
    """Return the query blocks that attend to a key block, and which of them have inner tiles."""
    block_q, block_k = tile
    some = window.query_range(k, k + block_k)
    every = window.transposed.full_key_range(k, k + block_k)
    first, stop = some[0] // block_q, -(-some[1] // block_q)
    inside = (every[0] < every[1]) & (k + block_k <= window.length)
    begin = -(-every[0] // block_q)
    end = np.where(every[1] < window.Nq, every[1] // block_q, -(-window.Nq // block_q))
    inside &= begin < end
    return first, np.where(inside, begin, first), np.where(inside, end, first), stop


def _halves(mask: AttentionMask, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> Ints:
    """Count the parts of tiles, of which tall ones on the boundary come in halves."""
    window = mask.window
    tall = (q1 - q0 > TALL) & (window.kind(q0, q1, k0, k1) == PARTIAL)
    middle = np.where(tall, (q0 + q1) // 2, q1)
    total = np.zeros((5, *q0.shape), np.int64)
    for r0, r1 in ((q0, middle), (middle, q1)):
        lo, hi = window.key_range(r0, r1)
        total += _parts(mask, window, r0, r1, np.maximum(k0, lo), np.minimum(k1, hi))
    total[0] = total[1] > 0
    return total


def _parts(
    mask: AttentionMask,
    window: SlidingWindow | None,
    q0: Ints,
    q1: Ints,
    k0: Ints,
    k1: Ints,
    dtype: type[np.signedinteger[Any]] = np.int64,
) -> NDArray[Any]:
    """Cut tiles at the blocks of the mask; a part is a run of blocks of one kind, not empty.

    Queries of tiles have the shape (rows, 1) and keys (1, columns), or both (1, tiles).

    Returns
    -------
    array of int, shape (5, rows or 1, columns or tiles)
        Of each tile: whether it has a part, parts, full parts, their keys and their queries.
    """
    of = mask.block_mask
    bq, bk = (max(mask.window.Nq, 1), max(mask.Nk, 1)) if of is None else of.block_size
    s0, s1 = (x[:, :, None] for x in _cut(q0, q1, bq))  # axes of blocks are the first and third
    t0, t1 = (x.swapaxes(0, 1) for x in _cut(k0, k1, bk))
    if of is None:
        kind = np.full(np.broadcast_shapes(s0.shape, t0.shape), FULL, np.int8)
    else:
        blocks = of.kinds[mask.batch % len(of.kinds), mask.heads.start % of.kinds.shape[1]]
        row, column = (
            np.minimum(x, n - 1) for x, n in zip((s0 // bq, t0 // bk), blocks.shape, strict=True)
        )
        if window is None:  # the same columns of all rows
            kind = blocks[row.ravel()].take(column.ravel(), axis=1)
            kind = kind.reshape(*row.shape[:2], *column.shape[-2:])
        else:
            kind = blocks[row, column]
    kind *= s0 < s1
    kind *= t0 < t1
    if mask.dense is not None:
        np.minimum(kind, PARTIAL, out=kind)
    if window is not None:
        np.minimum(kind, window.kind(s0, s1, t0, t1), out=kind)
    used = kind != EMPTY
    begins = used.copy()
    begins[:, :, 1:] &= kind[:, :, 1:] != kind[:, :, :-1]
    rows, keys = begins.sum(axis=2, dtype=dtype), used.sum(axis=0, dtype=dtype)
    counts = np.empty((5, *rows.shape[1:]), dtype)
    parts, full, keys_of, rows_of = counts[1:]
    rows.sum(axis=0, out=parts)
    np.greater(parts, 0, out=counts[0])
    (begins & (kind == FULL)).sum(axis=(0, 2), out=full)
    (keys * (t1 - t0)[0].astype(dtype)).sum(axis=1, out=keys_of)
    (rows * (s1 - s0)[:, :, 0].astype(dtype)).sum(axis=0, out=rows_of)
    return counts


def _cut(lo: Ints, hi: Ints, block: int) -> tuple[Ints, Ints]:
    """Cut ranges at the multiples of a block length, on a new first axis; some may be empty."""
    first, stop = lo // block, -(-np.maximum(lo, hi) // block)
    pieces = np.arange(max(1, (stop - first).max(initial=0))).reshape(-1, *lo.ndim * (1,))
    start = (first + pieces) * block
    return np.clip(start, lo, np.maximum(lo, hi)), np.clip(start + block, lo, np.maximum(lo, hi))
