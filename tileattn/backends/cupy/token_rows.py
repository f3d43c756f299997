"""``append_kv`` and ``rope`` on CuPy arrays: one launch each, on the current stream."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tileattn.backends.cupy.single_launch import on_device, run
from tileattn.call.sequences import Paging
from tileattn.kernels.cuda.plan.token_rows import POINTERS, plan_append, plan_rope


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
    given = arrays | on_device(integers)
    run(plan_append, POINTERS, given, (position,), B, width, interleaved, of_tokens)
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
        arrays |= on_device({"positions": positions})
    if arrays["k"].shape[0] > 1 and positions.ndim == 1:
        rows = arrays["positions"]
        arrays["positions"] = cupy.broadcast_to(rows, (x.shape[0], len(rows)))
    elif positions.ndim == 1:
        arrays["positions"] = arrays["positions"][np.newaxis]
    run(plan_rope, POINTERS, arrays, (position,), interleaved, inverse)
    return out
