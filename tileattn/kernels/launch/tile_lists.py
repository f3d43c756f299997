"""The lists of tiles by which Hopper's kernels skip what masks leave empty."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.block_mask import EMPTY, FULL, PARTIAL, BlockMask
from tileattn.expressions.nodes import Node
from tileattn.expressions.quadtree import kinds_by_intervals
from tileattn.kernels.launch.block_sparse import once, tile_kinds
from tileattn.kernels.launch.function_blocks import decidable, undecided
from tileattn.problem import Problem

END = np.iinfo(np.int32).max  # behind the last entry of a list

_Make = Callable[["TileLists", BlockMask | None], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TileLists:
    """What the lists of a pass are made of, besides a block mask."""

    tile: tuple[int, int]  # queries and keys of a tile
    shape: tuple[int, int, int, int]  # B, Hq, Nq, Nk
    visible: Node | None  # the caller's own mask, without the values of arrays
    undecided: bool  # whether that mask is left to the kernel, as one of too many blocks
    group: int  # query heads of a key head, whose list is one; 1 in the forward pass
    backward: bool

    def kinds(self, mask: BlockMask | None) -> NDArray[Any]:
        """Say of each tile whether it is empty, partial or full.

        An array of shape (B or 1, heads or 1, query tiles, key tiles).
        """
        kinds: NDArray[Any] = self._once(mask, TileLists.make_kinds)
        return kinds

    def lists(self, mask: BlockMask | None) -> NDArray[np.int32]:
        """List the key tiles of each query tile, or backward the query tiles of each key tile.

        An array of int32, shape (B or 1, heads or 1, blocks, entries): of each tile twice its
        number, plus one where it is partial; `END` behind the last. Backward each is followed by
        how many blocks of keys before this one the tile is left to.
        """
        lists: NDArray[np.int32] = self._once(mask, TileLists.make_lists)
        return lists

    def lists_shape(self, mask: BlockMask | None) -> tuple[int, ...]:
        """Give the shape of the lists."""
        *lead, rows, columns = self.kinds(mask).shape
        return (*lead, columns, 2 * (rows + 1)) if self.backward else (*lead, rows, columns + 1)

    def tiles_before(self, mask: BlockMask | None) -> NDArray[Any]:
        """Count the key tiles that each query tile attends to before each of them.

        An array of shape (B or 1, heads or 1, query tiles, key tiles + 1); the last of a row are
        all.
        """
        counts: NDArray[Any] = self._once(mask, TileLists.make_tiles_before)
        return counts

    def _once(self, mask: BlockMask | None, make: _Make) -> Any:
        """Make something, or give what was made before."""
        if mask is None:
            return _without_block_mask(self, make)
        return once(mask, (self, make), lambda: make(self, mask))

    def make_lists(self, mask: BlockMask | None) -> NDArray[np.int32]:
        return (query_tile_lists if self.backward else key_tile_lists)(self.kinds(mask))

    def make_tiles_before(self, mask: BlockMask | None) -> NDArray[Any]:
        attended = self.kinds(mask) != EMPTY
        return np.pad(np.cumsum(attended, axis=-1), [(0, 0)] * 3 + [(1, 0)])

    def make_kinds(self, mask: BlockMask | None) -> NDArray[Any]:
        sides = zip(self.shape[2:], self.tile, strict=True)
        rows, columns = (-(-n // side) for n, side in sides)
        kinds: Any = np.full((1, 1, rows, columns), PARTIAL if self.undecided else FULL, np.int8)
        if mask is not None:
            kinds = np.minimum(kinds, tile_kinds(mask, self.tile)[..., :rows, :columns])
        if self.visible is not None:
            kinds = np.minimum(kinds, kinds_by_intervals(self.visible, self.shape, self.tile))
        if kinds.shape[1] > 1 and self.group > 1:
            heads = kinds.reshape(len(kinds), -1, self.group, rows, columns)
            least, most = heads.min(axis=2), heads.max(axis=2)
            kinds = np.where(most == EMPTY, EMPTY, np.where(least == FULL, FULL, PARTIAL))
        return np.asarray(kinds)


def tile_lists(
    P: Problem, mask: BlockMask | None, tile: tuple[int, int], direction: str
) -> TileLists | None:
    """Say what lists a pass reads; None where it goes through all tiles.

    Backward a left limit leaves few tiles by itself, and their ranks would depend on it.
    """
    backward = direction == "backward"
    own = undecided(P, mask)
    visible = decidable(P) if own else None
    if (visible is None and mask is None) or (backward and P.window[0] is not None):
        return None
    shape, group = (P.B, P.Hq, P.Nq, P.Nk), P.group if backward else 1
    return TileLists(tile, shape, visible, own and visible is None, group, backward)


def key_tile_lists(kinds: NDArray[Any]) -> NDArray[np.int32]:
    """List the key tiles of each query tile."""
    entries = 2 * np.arange(kinds.shape[-1], dtype=np.int32) + (kinds != FULL)
    lists = np.full((*kinds.shape[:-1], kinds.shape[-1] + 1), END, np.int32)
    lists[..., :-1] = np.sort(np.where(kinds == EMPTY, END, entries), axis=-1)
    return lists


def query_tile_lists(kinds: NDArray[Any]) -> NDArray[np.int32]:
    """List the query tiles of each key tile, each with its rank."""
    attended = kinds != EMPTY
    ranks = (np.cumsum(attended, axis=-1) - attended).swapaxes(2, 3)
    entries = key_tile_lists(kinds.swapaxes(2, 3))
    tiles = np.minimum(entries[..., :-1] // 2, ranks.shape[-1] - 1)
    found = np.zeros_like(entries)
    found[..., :-1] = np.take_along_axis(ranks, tiles, axis=-1)
    return np.stack([entries, found], axis=-1).reshape(*entries.shape[:-1], -1)


@lru_cache(maxsize=64)
def _without_block_mask(lists: TileLists, make: _Make) -> NDArray[Any]:
    return make(lists, None)
