"""The lists of tiles by which Hopper kernels skip tiles that masks leave empty."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.call.block_mask import EMPTY, FULL, PARTIAL, BlockMask
from tileattn.call.problem import Problem
from tileattn.expressions.nodes import Node, elements
from tileattn.kernels.cuda.families.context import ROW_WARPS, KernelLaunch
from tileattn.kernels.cuda.families.grid import Grid, Over
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.block_sparse import once_for_mask
from tileattn.kernels.cuda.plan.layout import Constant
from tileattn.kernels.cuda.plan.tile_kinds import TileKinds

END = np.iinfo(np.int32).max  # minus the number of entries: stands after the last entry

# Kernels that classify the tiles of a ``mask_mod``, and list them.
CLASSIFY = "classify_tiles"
LISTS = {"forward": ("list_key_tiles",), "backward": ("rank_key_tiles", "list_query_tiles")}
KERNELS = (CLASSIFY, *LISTS["forward"], *LISTS["backward"])
_ARRAY_WARPS, _CLASSIFY_WARPS = 16, 4  # of a thread block: a warp for each tile, or a thread


class TileLists(NamedTuple):
    """How the lists of a pass are made, given its block mask if it has one."""

    of: TileKinds
    group: int  # query heads that share a list: all of a key head backward, 1 forward
    backward: bool

    @property
    def on_device(self) -> bool:
        """True if kernels write the lists."""
        return self.of.on_device

    @property
    def direction(self) -> str:
        """The pass that reads the lists."""
        return "backward" if self.backward else "forward"

    def workspace(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the bytes that kernels write for lists of a shape, by workspace part."""
        *_, rows, columns = self.of.device_shape()
        ranks = {"tile_ranks": shape[0] * shape[1] * rows * columns * 8} if self.backward else {}
        return ranks | {"tile_list": math.prod(shape) * 4}

    @once_for_mask
    def kinds(self, mask: BlockMask | None) -> NDArray[Any]:
        """Classify each tile as empty, partial or full.

        An array of shape (B or 1, heads or 1, query tiles, key tiles).
        """
        kinds = self.of.kinds(mask)
        if kinds.shape[1] > 1 and self.group > 1:
            b, _, rows, columns = kinds.shape
            heads = kinds.reshape(b, -1, self.group, rows, columns)
            least, most = heads.min(axis=2), heads.max(axis=2)
            kinds = np.where(most == EMPTY, EMPTY, np.where(least == FULL, FULL, PARTIAL))
        return np.asarray(kinds)

    @once_for_mask
    def lists(self, mask: BlockMask | None) -> NDArray[np.int32]:
        """List the key tiles of each query tile, or backward the query tiles of each key tile.

        An int32 array of shape (B or 1, heads or 1, blocks, entries). An entry is twice the tile
        number, plus one if the tile is partial. After the last entry stands `END` minus their
        number. Backward each entry is followed by its rank: how many earlier key blocks attend to
        the same query tile.
        """
        return (query_tile_lists if self.backward else key_tile_lists)(self.kinds(mask))

    @once_for_mask
    def constant(self, mask: BlockMask | None) -> Constant:
        """Return the lists as an array that a plan uploads."""
        return Constant.of(self.lists(mask))

    @once_for_mask
    def tiles_before(self, mask: BlockMask | None) -> NDArray[Any]:
        """Count the key tiles that each query tile attends to before each of them.

        An array of shape (B or 1, heads or 1, query tiles, key tiles + 1); the last entry counts
        all.
        """
        attended = self.kinds(mask) != EMPTY
        return np.pad(np.cumsum(attended, axis=-1), [(0, 0)] * 3 + [(1, 0)])

    def shape(self, mask: BlockMask | None) -> tuple[int, ...]:
        """Return the shape of the lists."""
        if self.on_device:
            b, heads, rows, columns = self.of.device_shape()
            heads = max(1, heads // self.group)
        else:
            b, heads, rows, columns = self.kinds(mask).shape
        last = (columns, 2 * (rows + 1)) if self.backward else (rows, columns + 1)
        return (b, heads, *last)


def tile_lists(
    P: Problem, kinds: TileKinds, mask: BlockMask | None, *, backward: bool
) -> TileLists | None:
    """Describe the lists that a pass reads; None if it goes through all tiles.

    In the backward pass a left limit already leaves few tiles, and ranks would depend on it.
    """
    unknown = mask is None and not kinds.decided
    if unknown or (backward and P.window[0] is not None):
        return None
    return TileLists(kinds, P.group if backward else 1, backward)


def key_tile_lists(kinds: NDArray[Any]) -> NDArray[np.int32]:
    """List the key tiles of each query tile."""
    listed, entries = kinds != EMPTY, 2 * np.arange(kinds.shape[-1], dtype=np.int32)
    end = END - np.count_nonzero(listed, axis=-1, keepdims=True).astype(np.int32)
    entries = np.sort(np.where(listed, entries + (kinds != FULL), end), axis=-1)
    return np.concatenate([entries, end], axis=-1)


def query_tile_lists(kinds: NDArray[Any]) -> NDArray[np.int32]:
    """List the query tiles of each key tile, each with its rank."""
    attended = kinds != EMPTY
    ranks = (np.cumsum(attended, axis=-1) - attended).swapaxes(2, 3)
    entries = key_tile_lists(kinds.swapaxes(2, 3))
    tiles = np.minimum(entries[..., :-1] // 2, ranks.shape[-1] - 1)
    found = np.zeros_like(entries)
    found[..., :-1] = np.take_along_axis(ranks, tiles, axis=-1)
    return np.stack([entries, found], axis=-1).reshape(*entries.shape[:-1], -1)


def classify_launch(
    dtype: str, tile: tuple[int, int], functions: str, mask_mod: Node
) -> KernelLaunch:
    """Launch the kernel that marks each tile as empty, partial or full."""
    reads = bool(elements(mask_mod))
    key = KernelKey(
        *(CLASSIFY, dtype),
        block_q=tile[0],
        block_k=tile[1],
        warps_m=_ARRAY_WARPS if reads else _CLASSIFY_WARPS,
        mask_mod=True,
        functions=functions,
    )
    what = "reads arrays, whose values" if reads else "has bounds, which"
    why = f"mask_mod {what} decide which tiles are computed"
    return KernelLaunch(key, Grid("tile rows"), why=why)


def list_launches(dtype: str, tile: tuple[int, int], direction: str) -> tuple[KernelLaunch, ...]:
    """Launch the kernels that list the tiles that are not empty."""
    launches = []
    for name in LISTS[direction]:
        key = KernelKey(name, dtype, block_q=tile[0], block_k=tile[1], warps_m=ROW_WARPS)
        over: Over = "listed columns" if name == "list_query_tiles" else "listed rows"
        grid = Grid(over, together=ROW_WARPS)
        launches.append(KernelLaunch(key, grid, why="one warp for each line of tiles"))
    return tuple(launches)
