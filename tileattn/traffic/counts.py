"""How often queries and keys are loaded: over a schedule, and in closed form.

It covers both orders of the loops. With query blocks outside, every tile loads its keys. With key
blocks outside, every tile loads its queries, and a key block is loaded once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from tileattn.algorithm.heads import head_groups
from tileattn.algorithm.mask import AttentionMask, SlidingWindow
from tileattn.call.problem import Operands, Problem
from tileattn.traffic.tiles import TileCounts, count_tiles

_Key = tuple[SlidingWindow, int, int, int]  # window, keys, batch entry and head


class TileLoads(Protocol):
    """Rows of arrays that a schedule loads, summed over batch and heads."""

    @property
    def keys(self) -> int:
        """Keys of all tiles that are not empty: loads of k with query blocks outside."""

    @property
    def rows(self) -> int:
        """Queries of all tiles that are not empty: loads of q with key blocks outside."""

    @property
    def held(self) -> int:
        """Keys of all key blocks with a tile: loads of k with key blocks outside."""

    @property
    def pairs(self) -> int:
        """Elements of all score matrices."""


def loads_of_a_key(problem: Problem, heads_per_load: int) -> int:
    """How often one key is loaded in all, if each set of heads loads it once."""
    return problem.B * problem.Hkv * -(-problem.group // heads_per_load)


@dataclass(frozen=True)
class ScheduledTiles:
    """TileLoads of the schedule that the backends run.

    Heads with the same mask are counted once.

    Parameters
    ----------
    problem : Problem
        Problem of the call.
    operands : Operands
        Arrays of the call; only masks and sizes are read.
    tile : (int, int)
        Queries and keys of a tile.
    heads_per_load : int
        Query heads of a group for each load of k and v. With query blocks outside, heads that
        differ in their empty blocks load for themselves.
    """

    problem: Problem
    operands: Operands
    tile: tuple[int, int]
    heads_per_load: int = 1

    @property
    def tiles(self) -> dict[str, int]:
        """Empty tiles (``"skipped"``), and parts of the others, ``"partial"`` or ``"full"``.

        Query blocks are outside. A block mask of smaller blocks cuts a tile into parts. Heads that
        load together share their tiles.
        """
        block_q, block_k = self.tile
        total = Counter(skipped=0, partial=0, full=0)
        for keys, sets in self._sets.items():
            for key in keys:
                window, Nk, *_ = key
                tiles = -(-window.Nq // block_q) * -(-Nk // block_k)
                x = self._counts[key]
                total["skipped"] += sets * (tiles - x.visited)
                total["partial"] += sets * (x.parts - x.full)
                total["full"] += sets * x.full
        return dict(total)

    @property
    def keys(self) -> int:
        """Keys of all tiles that are not empty, with query blocks outside."""
        return sum(n * self._counts[key].keys for keys, n in self._sets.items() for key in keys)

    @property
    def rows(self) -> int:
        """Queries of all tiles that are not empty, with key blocks outside."""
        return sum(heads * self._counts[key].rows for key, heads in self._heads.items())

    @property
    def held(self) -> int:
        """Keys of all key blocks with a tile for any head that shares the load."""
        block, total = self.tile[1], 0
        for keys, n in self._sets.items():
            Nk = next(iter(keys))[1]  # of all heads that share a load
            held = np.logical_or.reduce([self._counts[key].held for key in keys])
            total += n * (block * int(held.sum()) - (-Nk % block if held[-1:].any() else 0))
        return total

    @property
    def pairs(self) -> int:
        """Elements of all score matrices."""
        return sum(heads * window.Nq * Nk for (window, Nk, *_), heads in self._heads.items())

    @cached_property
    def _counts(self) -> dict[_Key, TileCounts]:
        """For each kind of head, its tiles."""
        alike: dict[tuple[int, ...], list[_Key]] = {}
        for key in self._masks:
            alike.setdefault((key[0].Nq, *key[1:]), []).append(key)
        counts: dict[_Key, TileCounts] = {}
        for keys in alike.values():
            masks = [self._masks[key] for key in keys]
            counts.update(zip(keys, count_tiles(masks, self.tile), strict=True))
        return counts

    @cached_property
    def _masks(self) -> dict[_Key, AttentionMask]:
        return {key: mask for key, _, _, mask in self._each_head()}

    @cached_property
    def _heads(self) -> Counter[_Key]:
        return Counter(key for key, _, _, _ in self._each_head())

    @cached_property
    def _sets(self) -> Counter[frozenset[_Key]]:
        """Sets of heads that share loads, by their masks, and how many sets there are of each."""
        sets: dict[tuple[int, ...], set[_Key]] = {}
        group = self.problem.group
        for key, batch, head, _ in self._each_head():
            where = batch, head // group, head % group // self.heads_per_load
            sets.setdefault(where, set()).add(key)
        return Counter(map(frozenset, sets.values()))

    def _each_head(self) -> Iterator[tuple[_Key, int, int, AttentionMask]]:
        """Yield each head with a key that is the same for all heads with the same mask."""
        mask = self.operands.block_mask
        batches, of_heads = (1, 1) if mask is None else mask.kinds.shape[:2]
        for heads in head_groups(self.problem, self.operands):
            own = heads.mask.function
            by_batch = batches > 1 or (own is not None and own.over_batch)
            by_head = of_heads > 1 or (own is not None and own.over_heads)
            for head in range(heads.q_heads.start, heads.q_heads.stop):
                entry = heads.batch if by_batch else 0, head if by_head else 0
                key = heads.mask.window, heads.mask.Nk, *entry
                yield key, heads.batch, head, heads.mask


@dataclass(frozen=True)
class ClosedForm:
    """TileLoads in closed form: every sum over blocks is a clamped arithmetic series.

    Parameters
    ----------
    problem : Problem
        Problem with full lengths and queries that end where the keys end.
    tile : (int, int)
        Queries and keys of a tile.
    density : float or None
        Part of the blocks that are not empty, in place of the window's.
    heads_per_load : int
        Query heads of a group for each load of k and v.
    """

    problem: Problem
    tile: tuple[int, int]
    density: float | None = None
    heads_per_load: int = 1

    @property
    def keys(self) -> int:
        """Keys of all tiles that are not empty, with query blocks outside."""
        P, block = self.problem, self.tile[0]
        loads = loads_of_a_key(P, self.heads_per_load)
        if self.density is not None:
            return round(self.density * (loads * -(-P.Nq // block) * P.Nk))
        left, right = P.window
        return loads * reached(P.Nq, P.Nk, block, P.Nk - P.Nq, left, right)

    @property
    def rows(self) -> int:
        """Queries of all tiles that are not empty, with key blocks outside."""
        P, block = self.problem, self.tile[1]
        heads = P.B * P.Hq
        if self.density is not None:
            return round(self.density * (heads * -(-P.Nk // block) * P.Nq))
        left, right = P.window
        return heads * reached(P.Nk, P.Nq, block, P.Nq - P.Nk, right, left)

    @property
    def pairs(self) -> int:
        """Elements of all score matrices."""
        P = self.problem
        return P.B * P.Hq * P.Nq * P.Nk

    @property
    def held(self) -> int:
        """Keys of all key blocks with a tile; with a density above 0, all key blocks have one."""
        P, block = self.problem, self.tile[1]
        if self.density is None:
            lo, hi = SlidingWindow(P.Nq, P.Nk, P.Nk - P.Nq, *P.window).key_range(0, P.Nq)
        else:
            lo, hi = 0, P.Nk if self.density and P.Nq else 0
        keys = min(-(-hi // block) * block, P.Nk) - lo // block * block
        return loads_of_a_key(P, self.heads_per_load) * keys


def reached(
    rows: int, columns: int, block: int, offset: int, left: int | None, right: int | None
) -> int:
    """Sum, over the blocks of one axis, the length of the other axis that a block attends to.

    Parameters
    ----------
    rows, columns : int
        Lengths of the axis that is cut and of the other.
    block : int
        Length of a block.
    offset : int
        Position of row 0 among the columns.
    left, right : int or None
        Window to each side; None if that side is open.

    Returns
    -------
    int
        The sum over blocks ``[r0, r1)`` of the columns from ``r0 + offset - left`` up to
        ``r1 - 1 + offset + right`` that exist.
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
