"""The arrays of a call as the kernels for CPUs read and write them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.block_mask import FULL as WHOLE
from tileattn.algorithm.function_mask import BLOCK, FunctionMask
from tileattn.algorithm.mask import SlidingWindow
from tileattn.backends.addresses import address_of
from tileattn.kernels.launch.block_sparse import once, partial_blocks
from tileattn.kernels.llvm.blocks import EMPTY, FULL, UNKNOWN
from tileattn.problem import Operands, Problem

Array = NDArray[Any]

_MOST_BLOCKS = 1 << 24  # of a function, of which more are not listed


def as_inputs(P: Problem, x: Operands) -> dict[str, Array]:
    """Give the arrays that both passes read, by the name of their field."""
    arrays = {name: contiguous(getattr(x, name)) for name in ("q", "k", "v")}
    for name in ("kv_lengths", "q_offset"):
        arrays[name] = contiguous(getattr(x, name))
    if x.bias is not None:
        arrays["bias"] = x.bias if x.bias.flags.aligned else x.bias.copy()
    if x.mask is not None:
        arrays["mask"] = x.mask
    arrays |= _blocks(P, x)
    if x.aux:
        arrays["aux"] = _table(x.aux)
    for name in ("alibi_slopes", "sinks"):
        if getattr(x, name) is not None:
            arrays[name] = contiguous(np.asarray(getattr(x, name), P.accum_dtype))
    return arrays


def block_size(P: Problem, x: Operands) -> tuple[int, ...]:
    """Give the queries and keys of a block, where there are blocks."""
    if x.block_mask is not None:
        return x.block_mask.block_size
    if P.mask_mod is None:
        return ()
    many = P.B * P.Hq * -(-P.Nq // BLOCK) * -(-P.Nk // BLOCK) > _MOST_BLOCKS
    return (max(1, P.Nq), max(1, P.Nk)) if many else (BLOCK, BLOCK)


def _blocks(P: Problem, x: Operands) -> dict[str, Array]:
    """Give the blocks of the block mask, or of the function; of both, what the first knows."""
    mask = x.block_mask
    if mask is not None:
        kinds, bits = once(mask, "partial", lambda: partial_blocks(mask))
        if P.mask_mod is not None:
            kinds = np.where(kinds == FULL, np.int32(UNKNOWN), kinds)
        return {"block_kinds": kinds, "block_bits": bits}
    if P.mask_mod is None:
        return {}
    function, window = FunctionMask(P.mask_mod, x.aux), SlidingWindow(P.Nq, P.Nk, 0, None, None)
    q, k = block_size(P, x)
    counts = -(-P.Nq // q), -(-P.Nk // k)
    B, H = P.B if function.over_batch else 1, P.Hq if function.over_heads else 1
    if (q, k) != (BLOCK, BLOCK):
        return {"block_kinds": np.full((1, 1, *counts), UNKNOWN, np.int32)}
    kinds = np.full((B, H, *counts), EMPTY, np.int32)
    for b, h in np.ndindex(B, H):
        heads = slice(h, h + 1) if function.over_heads else slice(0, P.Hq)
        for row, first, stop, kind in function.blocks(window, P.Nk, b, heads).runs():
            kinds[b, h, row, first:stop] = FULL if kind == WHOLE else UNKNOWN
    return {"block_kinds": kinds}


def _table(aux: Sequence[Array]) -> Array:
    """Write down the address of each array, and the length and the stride of each axis."""
    numbers: list[int] = []
    for x in aux:
        numbers += [address_of(x), *itertools.chain(*zip(x.shape, x.strides, strict=True))]
    return np.array(numbers, np.int64)


def contiguous(x: Array) -> Array:
    """Return the array, or a copy of it if its last axis is not contiguous, or nothing aligned."""
    if (x.strides[-1] == x.itemsize or x.shape[-1] <= 1) and x.flags.aligned:
        return x
    return x.copy("C")


def bias_sums(P: Problem, bias: Array | None) -> Array | None:
    """Make what dbias is summed in."""
    if bias is None:
        return None
    b, h, n, m = bias.shape
    if m == 1:
        return np.zeros((P.B, P.Hq, P.Nq, 1), P.accum_dtype)
    if n == 1:
        return np.zeros((P.B, P.Hq, 1, P.Nk), P.accum_dtype)
    return np.zeros((b, h, n, m), P.accum_dtype)


def bias_gradient(bias: Array, sums: Array) -> Array:
    """Sum over the axes along which the bias is broadcast."""
    axes = tuple(axis for axis in range(4) if bias.shape[axis] != sums.shape[axis])
    total = sums.sum(axis=axes, keepdims=True) if axes else sums
    return total.astype(bias.dtype, copy=False)
