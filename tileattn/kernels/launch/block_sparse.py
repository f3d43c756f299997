"""Block masks as kernels read them."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tileattn.algorithm.block_mask import EMPTY, FULL, PARTIAL, BlockMask
from tileattn.kernels.launch.streams import outlive_readers, stream_name

_made: "weakref.WeakKeyDictionary[BlockMask, dict[Any, Any]]" = weakref.WeakKeyDictionary()
"""What was made of masks that are still there, on the host and on devices."""

BEYOND = np.iinfo(np.int32).max
"""What stands behind the last tile of a list."""


def cells_of(mask: BlockMask, device: int) -> tuple[Any, Any]:
    """Bring a block mask to CuPy's current device, once.

    Parameters
    ----------
    mask : BlockMask
        The mask.
    device : int
        The number of the device.

    Returns
    -------
    kinds : cupy array of int32, shape (B or 1, Hq or 1, blocks of queries, blocks of keys)
        For each block -2 where it is seen, -1 where it is skipped, else the number of its bits.
    bits : cupy array of bool, shape (partly seen blocks, queries, keys of a block)
        The pairs of the blocks that are partly seen.
    """
    kinds, bits = _brought(mask, device, lambda: host_cells(mask))
    return kinds, bits


def visits_of(mask: BlockMask, device: int, tile: tuple[int, int]) -> Any:
    """Bring the lists of tiles that blocks of queries visit to CuPy's current device, once.

    Parameters
    ----------
    mask : BlockMask
        The mask.
    device : int
        The number of the device.
    tile : (int, int)
        Queries and keys of a tile.

    Returns
    -------
    cupy array of int32, shape (B or 1, Hq or 1, blocks of queries, tiles of keys + 1)
        As ``BlockSparseList`` in ``src/tile_scheduler_sm90.cuh`` reads them.
    """
    (visits,) = _brought(mask, (device, tile), lambda: (host_visits(mask, tile),))
    return visits


def visits_before(mask: BlockMask, tile: tuple[int, int]) -> Any:
    """Count the tiles of keys that blocks of queries visit before each of them, once.

    Parameters
    ----------
    mask : BlockMask
        The mask.
    tile : (int, int)
        Queries and keys of a tile.

    Returns
    -------
    array of int, shape (B or 1, Hq or 1, blocks of queries, tiles of keys + 1)
        The last of a row are all.
    """

    def counted() -> Any:
        visited = tile_kinds(mask, tile) != EMPTY
        return np.pad(np.cumsum(visited, axis=-1), [(0, 0)] * 3 + [(1, 0)])

    return _once(mask, tile, counted)


def _once(mask: BlockMask, key: Any, make: Callable[[], Any]) -> Any:
    """Make something of a mask, or give what was made the last time."""
    known = _made.setdefault(mask, {})
    if key not in known:
        known[key] = make()
    return known[key]


class _Brought(NamedTuple):
    """Arrays on a device, and the stream that their memory was taken on."""

    arrays: tuple[Any, ...]
    stream: tuple[int, int]


def _brought(mask: BlockMask, key: Any, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Copy something that is made of a mask to CuPy's current device, once.

    The copy is complete before any stream may read it, for all read it; and it outlives the mask
    where the current stream may not have read it by then.
    """
    import cupy

    def copied() -> _Brought:
        return _Brought(tuple(cupy.asarray(x, blocking=True) for x in make()), stream_name())

    there: _Brought = _once(mask, key, copied)
    outlive_readers(there, there.stream)
    return there.arrays


def host_cells(mask: BlockMask) -> tuple[Any, Any]:
    """Write a block mask down as `cells_of` gives it, in NumPy arrays."""
    kinds = np.where(mask.kinds == FULL, -FULL, EMPTY - 1).astype(np.int32)
    partly = np.argwhere(mask.kinds == PARTIAL)
    kinds[tuple(partly.T)] = np.arange(len(partly))
    bits = np.zeros((len(partly), *mask.block_size), np.bool_)
    for n, (b, h, *block) in enumerate(partly):
        # Only masks made for one pair of lengths have blocks that are partly seen.
        spans = zip(block, mask.block_size, mask.lengths or (), strict=True)
        i, j = (np.arange(r * size, min(r * size + size, end)) for r, size, end in spans)
        bits[n, : i.size, : j.size] = mask.visible(b, h, i[:, None], j)
    return kinds, bits


def host_visits(mask: BlockMask, tile: tuple[int, int]) -> Any:
    """Write the lists down as `visits_of` gives them, in a NumPy array."""
    kinds = tile_kinds(mask, tile)
    entries = 2 * np.arange(kinds.shape[-1], dtype=np.int32) + (kinds != FULL)
    lists = np.full((*kinds.shape[:-1], kinds.shape[-1] + 1), BEYOND, np.int32)
    lists[..., :-1] = np.sort(np.where(kinds == EMPTY, BEYOND, entries), axis=-1)
    return lists


def tile_kinds(mask: BlockMask, tile: tuple[int, int]) -> Any:
    """Say of each tile what a mask shows of it.

    Parameters
    ----------
    mask : BlockMask
        The mask.
    tile : (int, int)
        Queries and keys of a tile.

    Returns
    -------
    array of int, shape (B or 1, Hq or 1, blocks of queries, tiles of keys)
        EMPTY, PARTIAL or FULL; tiles as far as the blocks of the mask reach.
    """
    least = most = mask.kinds
    for axis, side, block in zip((2, 3), tile, mask.block_size, strict=True):
        starts = np.arange(0, mask.kinds.shape[axis] * block, side)
        first, last = starts // block, (starts + side - 1) // block
        last = np.minimum(last, mask.kinds.shape[axis] - 1)
        lie = [np.minimum(first + n, last) for n in range((last - first).max(initial=0) + 1)]
        least = np.minimum.reduce([least.take(places, axis) for places in lie])
        most = np.maximum.reduce([most.take(places, axis) for places in lie])
    return np.where(most == EMPTY, EMPTY, np.where(least == FULL, FULL, PARTIAL))
