"""Kernels that belong to no attention call: one launch each, on the current stream."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tileattn.backends.cupy.describe import addresses_of
from tileattn.kernels.cuda.jit.load import load
from tileattn.kernels.cuda.plan.layout import ArrayLayout, alignment_of
from tileattn.kernels.cuda.plan.single_launch import SingleLaunch


def run(
    plan: Callable[..., SingleLaunch],
    pointers: Sequence[str],
    arrays: Mapping[str, Any],
    numbers: Sequence[int],
    *options: Any,
) -> None:
    """Plan a launch and start it.

    The parameter block has the addresses of ``pointers``, 0 for an array that the call lacks, the
    ``numbers`` and the cells of the plan. A plan depends only on layouts and ``options``.
    """
    from cupy.cuda import runtime
    from cupy.cuda.function import CPointer

    device = runtime.getDevice()
    addresses = addresses_of(arrays, device)
    layouts = tuple(
        (name, x.shape, x.strides, x.dtype, alignment_of(addresses[name]))
        for name, x in arrays.items()
    )
    function, grid, threads, cells = _prepared(device, plan, layouts, *options)
    values = *(addresses.get(name, 0) for name in pointers), *numbers, *cells
    # The launch copies the block.
    block = (ctypes.c_int64 * len(values))(*values)
    function(grid, (threads,), (CPointer(ctypes.addressof(block)),), 0)


@lru_cache(maxsize=256)
def _prepared(
    device: int, plan: Callable[..., SingleLaunch], layouts: Any, *options: Any
) -> tuple[Any, tuple[int, int, int], int, tuple[int, ...]]:
    """Plan a launch, and load its kernel."""
    described = tuple(
        (name, ArrayLayout(shape, strides, dtype.name, alignment))
        for name, shape, strides, dtype, alignment in layouts
    )
    made = plan(described, *options)
    return load(made.key, device).function, made.grid, made.key.threads, made.cells


def on_device(integers: Mapping[str, Any]) -> dict[str, Any]:
    """Upload host integers in one copy; kernels read 4 or 8 bytes each."""
    import cupy

    found = {
        name: x if x.dtype in (np.int32, np.int64) else x.astype(np.int64)
        for name, x in integers.items()
    }
    sent = {name: x for name, x in found.items() if type(x) is np.ndarray and x.size}
    if sent:
        flat = cupy.asarray(np.concatenate([x.ravel() for x in sent.values()], dtype=np.int64))
        end = 0
        for name, x in sent.items():
            start, end = end, end + x.size
            found[name] = flat[start:end].reshape(x.shape)
    return {name: x for name, x in found.items() if type(x) is not np.ndarray}
