"""How often queries and keys are loaded: over a schedule, and in closed form.

It covers both orders of the loops. With query blocks outside, every tile loads its keys. With key
blocks outside, every tile loads its queries, and a key block is loaded once.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tileattn.algorithm.heads import head_groups
from tileattn.algorithm.mask import AttentionMask, SlidingWindow
from tileattn.call.problem import Operands, Problem
from tileattn.traffic.tiles import TileCounts, count_tiles

_Key = tuple[SlidingWindow, int, int, int]  # window, keys, batch entry and head


class TileLoads(NamedTuple):
    """Rows of arrays that a schedule loads, summed over batch and heads."""

    keys: int  # of all tiles that are not empty: loads of k with query blocks outside
    rows: int  # queries of all tiles that are not empty: loads of q with key blocks outside
    held: int  # keys of all key blocks with a tile: loads of k with key blocks outside
    pairs: int  # elements of all score matrices


def loads_of_a_key(problem: Problem, heads_per_load: int) -> int:
    """Return how often one key is loaded in all, if each set of heads loads it once."""
    return problem.B * problem.Hkv * -(-problem.group // heads_per_load)


def scheduled(
    problem: Problem, operands: Operands, tile: tuple[int, int], heads_per_load: int = 1
) -> tuple[TileLoads, dict[str, int]]:
    """Count the loads of the schedule that the backends run, and its tiles.

    Heads with the same mask are counted once. With query blocks outside, the ``heads_per_load``
    query heads that load k and v together share their tiles; heads that differ in their empty
    blocks load for themselves. The tiles are empty (``"skipped"``), or parts of others,
    ``"partial"`` or ``"full"``: a block mask of smaller blocks cuts a tile into parts.
    """
    block_q, block_k = tile
    masks: dict[_Key, AttentionMask] = {}
    heads, sets = Counter[_Key](), dict[tuple[int, ...], set[_Key]]()
    for key, batch, head, mask in _each_head(problem, operands):
        masks[key] = mask
        heads[key] += 1
        together = head % problem.group // heads_per_load
        sets.setdefault((batch, head // problem.group, together), set()).add(key)
    counts = _counts(masks, tile)
    total, keys, held = Counter(skipped=0, partial=0, full=0), 0, 0
    for shared, n in Counter(map(frozenset, sets.values())).items():
        for key in shared:
            window, Nk, *_ = key
            x = counts[key]
            keys += n * x.keys
            tiles = -(-window.Nq // block_q) * -(-Nk // block_k)
            total["skipped"] += n * (tiles - x.visited)
            total["partial"] += n * (x.parts - x.full)
            total["full"] += n * x.full
        Nk = next(iter(shared))[1]  # of all heads that share a load
        reached_by_any = np.logical_or.reduce([counts[key].held for key in shared])
        last = -Nk % block_k if reached_by_any[-1:].any() else 0
        held += n * (block_k * int(reached_by_any.sum()) - last)
    rows = sum(n * counts[key].rows for key, n in heads.items())
    pairs = sum(n * window.Nq * Nk for (window, Nk, *_), n in heads.items())
    return TileLoads(keys, rows, held, pairs), dict(total)


def _counts(masks: dict[_Key, AttentionMask], tile: tuple[int, int]) -> dict[_Key, TileCounts]:
    """Count the tiles of each mask; masks that differ only in their windows are counted at once."""
    alike: dict[tuple[int, ...], list[_Key]] = {}
    for key in masks:
        alike.setdefault((key[0].Nq, *key[1:]), []).append(key)
    counts: dict[_Key, TileCounts] = {}
    for keys in alike.values():
        found = count_tiles([masks[key] for key in keys], tile)
        counts.update(zip(keys, found, strict=True))
    return counts


def _each_head(
    problem: Problem, operands: Operands
) -> Iterator[tuple[_Key, int, int, AttentionMask]]:
    """Yield each head with a key that is the same for all heads with the same mask."""
    mask = operands.block_mask
    batches, of_heads = (1, 1) if mask is None else mask.kinds.shape[:2]
    for heads in head_groups(problem, operands):
        own = heads.mask.function
        by_batch = batches > 1 or (own is not None and own.over_batch)
        by_head = of_heads > 1 or (own is not None and own.over_heads)
        for head in range(heads.q_heads.start, heads.q_heads.stop):
            entry = heads.batch if by_batch else 0, head if by_head else 0
            key = heads.mask.window, heads.mask.Nk, *entry
            yield key, heads.batch, head, heads.mask


def closed_form(
    P: Problem, tile: tuple[int, int], density: float | None = None, heads_per_load: int = 1
) -> TileLoads:
    """Compute the loads in closed form: every sum over blocks is a clamped arithmetic series.

    Lengths are full, and queries end where the keys end. ``density`` is the part of the blocks
    that are not empty, in place of the window; above 0, every key block has a tile.
    """
    (block_q, block_k), offset, (left, right) = tile, P.Nk - P.Nq, P.window
    loads, heads = loads_of_a_key(P, heads_per_load), P.B * P.Hq
    if density is None:
        keys = loads * reached(P.Nq, P.Nk, block_q, offset, left, right)
        rows = heads * reached(P.Nk, P.Nq, block_k, -offset, right, left)
        lo, hi = SlidingWindow(P.Nq, P.Nk, offset, left, right).key_range(0, P.Nq)
    else:
        keys = round(density * (loads * -(-P.Nq // block_q) * P.Nk))
        rows = round(density * (heads * -(-P.Nk // block_k) * P.Nq))
        lo, hi = 0, P.Nk if density and P.Nq else 0
    held = min(-(-hi // block_k) * block_k, P.Nk) - lo // block_k * block_k
    return TileLoads(keys, rows, loads * held, heads * P.Nq * P.Nk)


def reached(
    rows: int, columns: int, block: int, offset: int, left: int | None, right: int | None
) -> int:
    """Sum the columns that each block of rows attends to; row 0 is at column ``offset``.

    A block ``[r0, r1)`` attends to columns ``r0 + offset - left`` to ``r1 - 1 + offset + right``.
    """
    whole, rest = divmod(rows, block)
    blocks = whole + (rest > 0)
    lower = 0 if left is None else _clamped_series(offset - left, block, blocks, columns)
    if right is None:
        return blocks * columns - lower
    upper = _clamped_series(block + offset + right, block, whole, columns)
    if rest:
        upper += min(max(rows + offset + right, 0), columns)
    return upper - lower


def _clamped_series(first: int, step: int, n: int, top: int) -> int:
    """Sum n terms of an arithmetic series, each clamped to lie between 0 and top."""
    start = min(max(-(first // step), 0), n)  # terms below 0
    stop = min(max(-((first - top) // step), start), n)  # terms below top
    inside = stop - start
    return inside * first + step * (inside * (start + stop - 1) // 2) + (n - stop) * top
