"""Attention masks: which query attends to which key, by pairs, by ranges and by tiles.

Everything here is integer arithmetic. ``visible`` of ``SlidingWindow`` and of ``AttentionMask`` is
the definition; ranges, kinds and tiles follow from it, and are tested against it by brute force.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.function_mask import FunctionMask, VisibleBlocks
from tileattn.algorithm.tile_mask import TileMask
from tileattn.algorithm.tiles import Tile, cut, cut_between, tile_of
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL, BlockMask

Ints = TypeVar("Ints", int, NDArray[np.int64])

TALL = 256  # rows from which it pays to halve a tile that the window's boundary crosses


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The part of a mask that depends on positions only: length, causal and window.

    Query ``i`` stands at position ``p = i + offset`` on the key axis and attends to key ``j`` where
    ``p - left <= j <= p + right`` and ``0 <= j < length``. Causal is ``right = 0``. Methods take
    integers, or arrays of them that broadcast.
    """

    Nq: int
    length: int  # keys at and past it are masked out
    offset: int  # position of query 0; may be negative
    left: int | None  # keys to each side of p; None leaves that side open
    right: int | None

    def visible(self, i: Any, j: Any) -> Any:
        """Return True if query ``i`` attends to key ``j``."""
        p = i + self.offset
        visible = (j >= 0) & (j < self.length)
        if self.left is not None:
            visible = visible & (j >= p - self.left)
        if self.right is not None:
            visible = visible & (j <= p + self.right)
        return visible

    def of_tile(self, q0: int, q1: int, k0: int, k1: int) -> "SlidingWindow":
        """Return the window of a tile whose queries and keys are counted from 0."""
        length = max(0, min(self.length, k1) - k0)
        return SlidingWindow(q1 - q0, length, self.offset + q0 - k0, self.left, self.right)

    @property
    def transposed(self) -> "SlidingWindow":
        """The same pairs, with keys in the place of queries."""
        return SlidingWindow(self.length, self.Nq, -self.offset, self.right, self.left)

    def key_range(self, q0: Ints, q1: Ints) -> tuple[Ints, Ints]:
        """Smallest range ``[lo, hi)`` of keys that any of queries q0 to q1 - 1 attends to."""
        return self._range(q0, q1, q0, q1 - 1)

    def full_key_range(self, q0: Ints, q1: Ints) -> tuple[Ints, Ints]:
        """Range ``[lo, hi)`` of the keys that all queries q0 to q1 - 1 attend to."""
        return self._range(q0, q1, q1 - 1, q0)

    def query_range(self, k0: Ints, k1: Ints) -> tuple[Ints, Ints]:
        """Smallest range ``[lo, hi)`` of queries that attend to any of keys k0 to k1 - 1."""
        stop: Ints = _smaller(k1, self.length)
        return self.transposed.key_range(k0, stop)

    def _range(self, q0: Any, q1: Any, first: Any, last: Any) -> tuple[Any, Any]:
        """From the left end of query ``first`` to the right end of ``last``; (0, 0) if empty."""
        lo, hi = 0, self.length
        if self.left is not None:
            lo = _larger(first + self.offset - self.left, 0)
        if self.right is not None:
            hi = _smaller(last + self.offset + self.right + 1, self.length)
        some = (q0 < q1) & (lo < hi)
        return lo * some, hi * some

    def kind(self, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> Ints:
        """Return the kind of the tile of queries q0 to q1 - 1 and keys k0 to k1 - 1."""
        lo, hi = self.key_range(q0, q1)
        some = _larger(k0, lo) < _smaller(k1, hi)
        lo, hi = self.full_key_range(q0, q1)
        kind: Ints = some * (PARTIAL + (FULL - PARTIAL) * ((lo <= k0) & (k1 <= hi)))
        return kind


def _larger(x: Any, y: Any) -> Any:
    return np.maximum(x, y) if isinstance(x, np.ndarray) else max(x, y)


def _smaller(x: Any, y: Any) -> Any:
    return np.minimum(x, y) if isinstance(x, np.ndarray) else min(x, y)


@lru_cache(maxsize=16)
def _window_pairs(window: SlidingWindow, columns: int) -> NDArray[np.bool_]:
    """Evaluate a window that starts at a tile; tiles along the diagonal ask for the same one."""
    pairs = window.visible(np.arange(window.Nq)[:, None], np.arange(columns))
    pairs = np.array(np.broadcast_to(pairs, (1, window.Nq, columns)))
    pairs.setflags(write=False)
    return pairs


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The mask of some heads of one batch entry.

    It has a window and, where they are given, a dense mask, a block mask and the user's function.
    """

    window: SlidingWindow
    Nk: int
    dense: NDArray[np.bool_] | None = None  # (heads or 1, Nq or 1, Nk or 1), True = visible
    block_mask: BlockMask | None = None
    batch: int = 0  # of the block mask, as the heads
    heads: slice = field(default_factory=lambda: slice(0, 1))
    function: FunctionMask | None = None

    @property
    def is_window(self) -> bool:
        """True if the mask depends on positions only."""
        return self.dense is None and self.block_mask is None and self.function is None

    def tile_mask(self, tile: Tile) -> TileMask | None:
        """Return the mask of a tile; None if every pair is visible."""
        if tile.kind == FULL:
            return None
        k0, k1 = tile.k0, tile.k1
        if self.is_window:
            lo, hi = self.window.full_key_range(tile.q0, tile.q1)
            if lo <= k0 < hi:
                k0 = min(hi, k1)
            elif lo < k1 <= hi:
                k1 = max(lo, k0)
        pairs = self.visible(tile._replace(k0=k0, k1=k1))
        return TileMask(slice(k0 - tile.k0, k1 - tile.k0), pairs, tile.k1 - tile.k0)

    def visible(self, tile: Tile) -> NDArray[np.bool_]:
        """Return the visible pairs of a tile: (heads or 1, queries, keys)."""
        visible = _window_pairs(self.window.of_tile(*tile[:4]), tile.k1 - tile.k0)
        if self.dense is not None:
            visible = visible & tile_of(self.dense, tile)
        h = np.arange(self.heads.start, self.heads.stop)[:, None, None]
        i, j = np.arange(tile.q0, tile.q1)[:, None], np.arange(tile.k0, tile.k1)
        for mask in (self.block_mask, self.function):
            if mask is not None:
                visible = visible & mask.visible(self.batch, h, i, j)
        return visible

    def kind(self, q0: int, q1: int, k0: int, k1: int) -> int:
        """Return the kind of a tile for all heads together; the dense mask counts as partial.

        ``EMPTY`` only if no pair is visible, ``FULL`` only if every pair is.
        """
        kind = self._kind(q0, q1, k0, k1)
        if kind != EMPTY and self.function is not None:
            kind = min(kind, self._blocks_of(self.function).kind(q0, q1, k0, k1))
        return kind

    def _kind(self, q0: int, q1: int, k0: int, k1: int) -> int:
        """Return the kind of a tile for all masks but the user's function."""
        kind = self.window.kind(q0, q1, k0, k1)
        if kind != EMPTY and self.block_mask is not None:
            kind = min(kind, self.block_mask.kind(self.batch, self.heads, q0, q1, k0, k1))
        return kind if self.dense is None else min(kind, PARTIAL)

    def _blocks_of(self, function: FunctionMask) -> VisibleBlocks:
        return function.blocks(self.window, self.Nk, self.batch, self.heads)

    def row_tiles(self, q0: int, q1: int, block_k: int) -> Iterator[Tile]:
        """Tiles of one query block, none ``EMPTY``: key blocks ascending, none crossed."""
        lo, hi = self.window.key_range(q0, q1)
        keys: Iterable[tuple[int, int]] = cut_between(lo, hi, block_k)
        if self.function is not None:
            keys = self._blocks_of(self.function).key_ranges(q0, q1, lo, hi, block_k)
        for k0, k1 in keys:
            yield from self._tiles(q0, q1, k0, k1)

    def column_tiles(self, k0: int, k1: int, block_q: int) -> Iterator[Tile]:
        """Tiles of one key block, query blocks ascending: ``row_tiles``, transposed."""
        lo, hi = self.window.query_range(k0, k1)
        queries: Iterable[tuple[int, int]] = cut_between(lo, hi, block_q)
        if self.function is not None:
            queries = self._blocks_of(self.function).query_ranges(k0, k1, lo, hi, block_q)
        for q0, q1 in queries:
            yield from self._tiles(q0, q1, k0, k1)

    def _tiles(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
        """Yield the tile; a tall one on the boundary in two halves, which mask out less."""
        tall = q1 - q0 > TALL and self.window.kind(q0, q1, k0, k1) == PARTIAL
        middle = (q0 + q1) // 2
        for r0, r1 in ((q0, middle), (middle, q1)) if tall else ((q0, q1),):
            lo, hi = self.window.key_range(r0, r1)
            yield from self._parts(r0, r1, max(k0, lo), min(k1, hi))

    def _parts(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
        """Yield the tile, or the parts of one kind that the masks cut it into."""
        whole = Tile(q0, q1, k0, k1, FULL)
        if self.function is None:
            yield from self._by_kind(whole)
            return
        for part in self._blocks_of(self.function).rectangles(q0, q1, k0, k1):
            yield from self._by_kind(Tile(*part))

    def _by_kind(self, tile: Tile) -> Iterator[Tile]:
        """Yield the tile, or the runs of blocks of one kind that a block mask cuts it into."""
        q0, q1, k0, k1, most = tile
        if self.block_mask is None:
            kind = min(most, self._kind(q0, q1, k0, k1))
            if kind != EMPTY:
                yield tile._replace(kind=kind)
            return
        block_q, block_k = self.block_mask.block_size
        for r0, r1 in cut_between(q0, q1, block_q):
            tiles = [
                Tile(r0, r1, *keys, min(most, self._kind(r0, r1, *keys)))
                for keys in cut_between(k0, k1, block_k)
            ]
            for kind, run in groupby(tiles, attrgetter("kind")):
                first, *others = run
                if kind != EMPTY:
                    yield first._replace(k1=others[-1].k1) if others else first


def schedule(
    mask: AttentionMask, block_q: int, block_k: int, outer_loop: str = "q"
) -> Iterator[Tile]:
    """List every tile in which some pair may be visible, once, in the order of an algorithm.

    The outer loop runs over query blocks, ``"q"`` (FlashAttention-2, Algorithm 1), or over key
    blocks, ``"kv"`` (FlashAttention, Algorithm 1).
    """
    if outer_loop == "q":
        for q0, q1 in cut(mask.window.Nq, block_q):
            yield from mask.row_tiles(q0, q1, block_k)
    elif outer_loop == "kv":
        for k0, k1 in cut(mask.Nk, block_k):
            yield from mask.column_tiles(k0, k1, block_q)
    else:
        raise ValueError(f"outer_loop must be 'q' or 'kv'; got {outer_loop!r}")
