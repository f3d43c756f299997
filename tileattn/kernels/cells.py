"""Block masks as kernels read them."""

import weakref
from typing import Any

import numpy as np

from tileattn.block_mask import FULL, PARTIAL, SKIP, BlockMask

_cells: "weakref.WeakKeyDictionary[BlockMask, dict[int, tuple[Any, Any]]]" = (
    weakref.WeakKeyDictionary()
)


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
    import cupy

    known = _cells.setdefault(mask, {})
    if device not in known:
        # Complete before any stream may read it: the copies serve all of them.
        known[device] = tuple(cupy.asarray(x, blocking=True) for x in host_cells(mask))
    return known[device]


def host_cells(mask: BlockMask) -> tuple[Any, Any]:
    """Write a block mask down as `cells_of` gives it, in NumPy arrays."""
    kinds = np.where(mask.kinds == FULL, -FULL, SKIP - 1).astype(np.int32)
    partly = np.argwhere(mask.kinds == PARTIAL)
    kinds[tuple(partly.T)] = np.arange(len(partly))
    bits = np.zeros((len(partly), *mask.block_size), np.bool_)
    for n, (b, h, *block) in enumerate(partly):
        # Only masks made for one pair of lengths have blocks that are partly seen.
        spans = zip(block, mask.block_size, mask.lengths or (), strict=True)
        i, j = (np.arange(r * size, min(r * size + size, end)) for r, size, end in spans)
        bits[n, : i.size, : j.size] = mask.visible(b, h, i[:, None], j)
    return kinds, bits
