"""``append_kv`` and ``rope`` on CuPy arrays: one launch each, on the current stream."""

import ctypes
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from tileattn.backends.cupy.describe import addresses_of
from tileattn.call.sequences import Paging
from tileattn.kernels.cuda.jit.load import load
from tileattn.kernels.cuda.plan.layout import ArrayLayout, alignment_of
from tileattn.kernels.cuda.plan.token_rows import (
    CELLS,
    POINTERS,
    RowsPlan,
    plan_append,
    plan_rope,
)


def append_kv(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    kv_lengths: Any,
    cu_seqlens: Any,
    paging: Paging | None,
    rotary: tuple[Any, Any] | None,
    interleaved: bool,
    descales: Mapping[str, Any],
    of_tokens: frozenset[str],
) -> Any:
    """Run a validated call; return the new lengths, or None if the host knows them."""
    import cupy

    arrays = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **descales}
    if rotary is not None:
        arrays["cos"], arrays["sin"] = rotary
    B, position, new = len(kv_lengths), 0, None
    counted = [kv_lengths] if cu_seqlens is None else [kv_lengths, cu_seqlens]
    if any(type(x) is not np.ndarray for x in counted):
        arrays["new_lengths"] = new = cupy.ndarray((B,), np.int64)
    integers = {"positions": kv_lengths}
    if type(kv_lengths) is np.ndarray and len(set(kv_lengths.tolist())) <= 1:
        position = int(kv_lengths[0]) if B else 0
        del integers["positions"]
    if cu_seqlens is not None:
        integers["cu_seqlens"] = cu_seqlens
    if paging is not None:
        integers["block_table"] = paging.block_table
    width = None if paging is None else paging.block_table.shape[1]
    _run(plan_append, arrays | _on_device(integers), position, B, width, interleaved, of_tokens)
    return new


def rope(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool, inverse: bool) -> Any:
    """Run a validated call; a single position is the position of the first row."""
    import cupy

    out = cupy.ndarray(x.shape, x.dtype)
    axes = (1,) * (4 - x.ndim)
    arrays = {"k": x.reshape(axes + x.shape), "k_cache": out.reshape(axes + x.shape)}
    arrays |= {"cos": cos, "sin": sin}
    position = 0
    if not positions.shape and type(positions) is np.ndarray:
        position = int(positions)
    else:
        if not positions.shape:
            positions = positions + cupy.arange(x.shape[-2])
        arrays |= _on_device({"positions": positions})
    if arrays["k"].shape[0] > 1 and positions.ndim == 1:
        rows = arrays["positions"]
        arrays["positions"] = cupy.broadcast_to(rows, (x.shape[0], len(rows)))
    elif positions.ndim == 1:
        arrays["positions"] = arrays["positions"][np.newaxis]
    _run(plan_rope, arrays, position, interleaved, inverse)
    return out


def _run(
    plan: Callable[..., RowsPlan], arrays: Mapping[str, Any], position: int, *options: Any
) -> None:
    from cupy.cuda import runtime
    from cupy.cuda.function import CPointer

    device = runtime.getDevice()
    addresses = addresses_of(arrays, device)
    layouts = tuple(
        (name, x.shape, x.strides, x.dtype, alignment_of(addresses[name]))
        for name, x in arrays.items()
    )
    function, grid, threads, cells = _prepared(device, plan, layouts, *options)
    pointers = (addresses.get(name, 0) for name in POINTERS)
    # The launch copies the block.
    block = (ctypes.c_int64 * CELLS)(*pointers, position, *cells)
    function(grid, (threads,), (CPointer(ctypes.addressof(block)),), 0)


@lru_cache(maxsize=256)
def _prepared(
    device: int, plan: Callable[..., RowsPlan], layouts: Any, *options: Any
) -> tuple[Any, tuple[int, int, int], int, tuple[int, ...]]:
    """Plan a launch, and load its kernel."""
    described = tuple(
        (name, ArrayLayout(shape, strides, dtype.name, alignment))
        for name, shape, strides, dtype, alignment in layouts
    )
    made = plan(described, *options)
    return load(made.key, device).function, made.grid, made.key.threads, made.cells


def _on_device(integers: Mapping[str, Any]) -> dict[str, Any]:
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
