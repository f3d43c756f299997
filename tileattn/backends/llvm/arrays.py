"""The arrays of a call as the kernels for CPUs read and write them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.kernels.launch.block_sparse import once, partial_blocks
from tileattn.problem import Operands, Problem

Array = NDArray[Any]


def as_inputs(P: Problem, x: Operands) -> dict[str, Array]:
    """Give the arrays that both passes read, by the name of their field."""
    arrays = {name: contiguous(getattr(x, name)) for name in ("q", "k", "v")}
    for name in ("kv_lengths", "q_offset"):
        arrays[name] = contiguous(getattr(x, name))
    if x.bias is not None:
        arrays["bias"] = x.bias if x.bias.flags.aligned else x.bias.copy()
    if x.mask is not None:
        arrays["mask"] = x.mask
    mask = x.block_mask
    if mask is not None:
        arrays["block_kinds"], arrays["block_bits"] = once(
            mask, "partial", lambda: partial_blocks(mask)
        )
    for name in ("alibi_slopes", "sinks"):
        if getattr(x, name) is not None:
            arrays[name] = contiguous(np.asarray(getattr(x, name), P.accum_dtype))
    return arrays


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
