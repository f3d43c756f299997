"""The arrays of a call as the kernels for CPUs read and write them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.kernels.launch.block_sparse import once, partial_blocks
from tileattn.kernels.llvm.params import DBIAS_OF_KEYS, DBIAS_OF_ROWS, DBIAS_OF_TILES
from tileattn.problem import Operands, Problem

Array = NDArray[Any]


def as_inputs(P: Problem, x: Operands) -> dict[str, Array]:
    """Give the arrays that both passes read, by the name of their field."""
    arrays = {name: contiguous(getattr(x, name)) for name in ("q", "k", "v")}
    for name in ("kv_lengths", "q_offset"):
        arrays[name] = np.ascontiguousarray(getattr(x, name), np.int64)
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


def splits(P: Problem, x: Operands, keys: int) -> int:
    """Count the splits of so many keys that the keys of one block of rows reach, at most."""
    longest = int(x.kv_lengths.max(initial=0))
    left, right = P.window
    if left is None:
        return max(1, -(-longest // keys))
    reach = longest if right is None else min(longest, P.Nq + left + right)
    return max(1, (reach + keys - 2) // keys + 1)


def block_sizes(x: Operands) -> dict[str, int]:
    """Give the block size of the block mask, if there is one."""
    size = () if x.block_mask is None else x.block_mask.block_size
    return dict(zip(("block_q", "block_k"), size, strict=False))


def contiguous(x: Array) -> Array:
    """Return the array, or a copy of it if its last axis is not contiguous, or nothing aligned."""
    if (x.strides[-1] == x.itemsize or x.shape[-1] <= 1) and x.flags.aligned:
        return x
    return x.copy("C")


def bias_sums(P: Problem, bias: Array | None) -> tuple[Array | None, dict[str, int]]:
    """Make what dbias is summed in; say how, and which key heads share a task."""
    alone = {"sharing": 1, "sharing_step": 0, "group_step": 1, "dbias_kind": 0}
    if bias is None:
        return None, alone
    b, h, n, m = bias.shape
    if m == 1:
        sums = np.zeros((P.B, P.Hq, P.Nq, 1), P.accum_dtype)
        return sums, alone | {"dbias_kind": DBIAS_OF_ROWS}
    if n == 1:
        sums = np.zeros((P.B, P.Hq, 1, P.Nk), P.accum_dtype)
        return sums, alone | {"dbias_kind": DBIAS_OF_KEYS}
    shared = alone | {"dbias_kind": DBIAS_OF_TILES}
    over_batch, over_heads = b < P.B, h < P.Hq
    if over_heads:
        shared |= {"sharing": P.Hkv, "sharing_step": 1, "group_step": P.Hkv}
    if over_batch:
        shared |= {"sharing": P.B, "sharing_step": P.Hkv, "group_step": 1}
    if over_batch and over_heads:
        shared |= {"sharing": P.B * P.Hkv, "sharing_step": 1}
    return np.zeros((b, h, n, m), P.accum_dtype), shared


def bias_gradient(bias: Array, sums: Array) -> Array:
    """Sum over the axes along which the bias is broadcast."""
    axes = tuple(axis for axis in range(4) if bias.shape[axis] != sums.shape[axis])
    total = sums.sum(axis=axes, keepdims=True) if axes else sums
    return total.astype(bias.dtype, copy=False)
