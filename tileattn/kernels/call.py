"""One call on the GPU: its arrays, what they need to be read by a kernel, and the launches."""

import math
import weakref
from typing import Any

import numpy as np

from tileattn.block_mask import FULL, PARTIAL, SKIP, BlockMask
from tileattn.kernels import compile as compiler
from tileattn.kernels.key import KernelKey
from tileattn.kernels.params import template, with_addresses
from tileattn.kernels.select import Choice, choose
from tileattn.problem import Operands, Problem

_WIDEST = 16  # bytes of the widest copy


class Call:
    """The arrays of one call by the names of the parameter block.

    Parameters
    ----------
    problem : Problem
        What is asked.
    operands : Operands
        The arrays, on CuPy's current device.
    """

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem = problem
        self.arrays: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        self.bias = operands.bias
        self.values = _facts(problem)
        for name in ("q", "k", "v"):
            self.add_rows(name, getattr(operands, name))
        self._add_positions(operands)
        self._add_options(operands)

    def add(self, name: str, x: Any) -> Any:
        """Pass a contiguous array."""
        self.arrays[name] = x
        return x

    def add_rows(self, name: str, x: Any) -> Any:
        """Pass an array of rows of any strides; rows that are not contiguous are copied."""
        import cupy

        if x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
            x = cupy.ascontiguousarray(x)
        self.values[f"{name}_at"] = _strides(x)[:3]
        self.rows[name] = x
        return self.add(name, x)

    def add_pairs(self, name: str, x: Any) -> Any:
        """Pass an array that is broadcast over pairs of queries and keys."""
        self.values[f"{name}_at"] = _strides(x)
        return self.add(name, x)

    def _add_positions(self, operands: Operands) -> None:
        """Pass lengths and offsets: as numbers where the host knows that all entries agree."""
        import cupy

        for name, one, x in (
            ("lengths", "length", operands.kv_lengths),
            ("offsets", "offset", operands.q_offset),
        ):
            if isinstance(x, np.ndarray) and (x == x[:1]).all():
                self.values[one] = int(x[0]) if x.size else 0
            else:
                self.add(name, cupy.ascontiguousarray(cupy.asarray(x)))

    def _add_options(self, operands: Operands) -> None:
        import cupy

        sums = self.problem.sum_dtype
        if operands.alibi_slopes is not None:
            slopes = self.add("slopes", cupy.ascontiguousarray(operands.alibi_slopes, sums))
            self.values["slopes_b"] = slopes.shape[1] if slopes.shape[0] > 1 else 0
        if operands.sinks is not None:
            self.add("sinks", cupy.ascontiguousarray(operands.sinks, sums))
        if operands.mask is not None:
            self.add_pairs("mask", operands.mask)
        if operands.bias is not None:
            self.add_pairs("bias", operands.bias)
            sizes = zip(("B", "H", "Nq", "Nk"), operands.bias.shape, strict=True)
            self.values |= {f"bias_{axis}": n for axis, n in sizes}
        if operands.block_mask is not None:
            kinds, bits = cells_of(operands.block_mask)
            self.add_pairs("kinds", kinds)
            self.add("bits", bits)
            block_q, block_k = operands.block_mask.block_size
            self.values |= {"mask_block_q": block_q, "mask_block_k": block_k}

    @property
    def vector(self) -> int:
        """Bytes at whose multiples every row of every array starts."""
        found = _WIDEST
        for x in self.rows.values():
            bits = x.data.ptr
            for n, stride in zip(x.shape[:-1], x.strides, strict=False):
                if n > 1:
                    bits |= stride
            found = min(found, math.gcd(bits, _WIDEST))
        return found

    def choice(self, kernel: str) -> Choice:
        """Choose the variant of a tiled kernel for this call."""
        import cupy

        limit = _shared_limit(cupy.cuda.runtime.getDevice())
        bias = "" if self.bias is None else self.bias.dtype.name
        return choose(kernel, self.problem, self.vector, bias, limit)

    def launch(self, key: KernelKey, blocks: int, shared: int = 0) -> None:
        """Start a kernel on CuPy's current stream."""
        kernel = compiler.load(key)
        if shared:
            kernel.allow_shared(shared)
        addresses = {name: x.data.ptr for name, x in self.arrays.items()}
        params = with_addresses(template(self.values), addresses)
        kernel.function((blocks,), (key.threads,), (params,), shared)


_cells: "weakref.WeakKeyDictionary[BlockMask, dict[int, tuple[Any, Any]]]" = (
    weakref.WeakKeyDictionary()
)


def cells_of(mask: BlockMask) -> tuple[Any, Any]:
    """Bring a block mask to CuPy's current device, once.

    Parameters
    ----------
    mask : BlockMask
        The mask.

    Returns
    -------
    kinds : cupy array of int32, shape (B or 1, Hq or 1, blocks of queries, blocks of keys)
        For each block -2 where it is seen, -1 where it is skipped, else the number of its bits.
    bits : cupy array of bool, shape (partly seen blocks, queries, keys of a block)
        The pairs of the blocks that are partly seen.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    known = _cells.setdefault(mask, {})
    if device not in known:
        kinds = np.where(mask.kinds == FULL, -FULL, SKIP - 1).astype(np.int32)
        partly = np.argwhere(mask.kinds == PARTIAL)
        kinds[tuple(partly.T)] = np.arange(len(partly))
        bits = np.zeros((len(partly), *mask.block_size), np.bool_)
        for n, (b, h, *block) in enumerate(partly):
            # Only masks made for one pair of lengths have blocks that are partly seen.
            spans = zip(block, mask.block_size, mask.lengths or (), strict=True)
            i, j = (np.arange(r * size, min(r * size + size, end)) for r, size, end in spans)
            bits[n, : i.size, : j.size] = mask.visible(b, h, i[:, None], j)
        known[device] = cupy.asarray(kinds), cupy.asarray(bits)
    return known[device]


def _facts(P: Problem) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in P.window)
    return {
        **{name: getattr(P, name) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv")},
        "left": left,
        "right": right,
        "scale": P.scale,
        "softcap": P.softcap or 0.0,
        "gain": 1.0 / (1.0 - P.dropout_p),
        "seed": P.seed,
        "threshold": int(P.dropout_p * 2**32),
    }


def _strides(x: Any) -> tuple[int, ...]:
    """Strides in elements, 0 along axes of length 1."""
    return tuple(s // x.itemsize if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True))


def _shared_limit(device: int) -> int:
    from cupy.cuda import runtime

    limit: int = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
    return limit
