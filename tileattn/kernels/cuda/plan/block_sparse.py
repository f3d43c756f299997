"""Block masks in the form that kernels read, made on the host."""

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tileattn.call.block_mask import EMPTY, FULL, PARTIAL, BlockMask
from tileattn.lru import Lru

MAX_ENTRIES = 96  # for a mask; a call of a new size adds up to ten

_made: "weakref.WeakKeyDictionary[BlockMask, Lru]" = weakref.WeakKeyDictionary()


def once(mask: BlockMask, key: Any, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns for a mask and a key; keep it, at most while the mask lives."""
    known = _made.get(mask)
    if known is None:
        known = _made.setdefault(mask, Lru(MAX_ENTRIES))
    found = known.get(key)
    if found is None:
        known.keep(key, found := make())
    return found


def once_for_mask(make: Callable[[Any, BlockMask | None], Any]) -> Callable[..., Any]:
    """Compute the result of a method once for each block mask, or without one.

    A plan needs a few results without a mask, which are large: no more of them are kept.
    """
    without = lru_cache(maxsize=4)(lambda x: make(x, None))

    def found(x: Any, mask: BlockMask | None) -> Any:
        return without(x) if mask is None else once(mask, (x, make), lambda: make(x, mask))

    return found


def partial_blocks(mask: BlockMask) -> tuple[Any, Any]:
    """Return the blocks of a mask, and the pairs of its partial blocks.

    ``kinds`` (int32, shape of the mask's kinds) is -2 for a full block, -1 for an empty one, else
    the index of the block in ``bits``: booleans (partial blocks, queries, keys of a block).
    """
    kinds = np.where(mask.kinds == FULL, -FULL, EMPTY - 1).astype(np.int32)
    partial = np.argwhere(mask.kinds == PARTIAL)
    kinds[tuple(partial.T)] = np.arange(len(partial))
    bits = np.zeros((len(partial), *mask.block_size), np.bool_)
    for n, (b, h, *block) in enumerate(partial):
        # Only masks made for one pair of lengths have partial blocks.
        spans = zip(block, mask.block_size, mask.lengths or (), strict=True)
        i, j = (np.arange(r * size, min(r * size + size, end)) for r, size, end in spans)
        bits[n, : i.size, : j.size] = mask.visible(b, h, i[:, None], j)
    return kinds, bits


def tile_kinds(mask: BlockMask, tile: tuple[int, int]) -> Any:
    """Classify each tile that the blocks reach as empty, partial or full."""
    least = most = mask.kinds
    for axis, side, block in zip((2, 3), tile, mask.block_size, strict=True):
        starts = np.arange(0, mask.kinds.shape[axis] * block, side)
        first, last = starts // block, (starts + side - 1) // block
        last = np.minimum(last, mask.kinds.shape[axis] - 1)
        lie = [np.minimum(first + n, last) for n in range((last - first).max(initial=0) + 1)]
        least = np.minimum.reduce([least.take(places, axis) for places in lie])
        most = np.maximum.reduce([most.take(places, axis) for places in lie])
    return np.where(most == EMPTY, EMPTY, np.where(least == FULL, FULL, PARTIAL))
