"""How the arrays of a call lie in memory: all that a plan needs to know of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.call.block_mask import BlockMask
from tileattn.call.options import options_with
from tileattn.call.problem import Problem

MAX_ALIGNMENT = 16  # bytes of the widest copy: kernels know of no stricter alignment
MIN_ALIGNMENT = 4  # bytes of the narrowest copy that does not go through registers

# Integers that kernels read with 4 or 8 bytes each, in the order of these sizes in the parameters.
INTEGERS = options_with(value="integers", host_only=False, lowered=False)

# Arrays of any strides in which a row is contiguous; those that are contiguous, in the accumulation
# dtype; and in another.
ROWS = frozenset({"q", "k", "v", "out", "dout", "dq", "dk", "dv"})
_ACCUMULATED = frozenset({*options_with(value="array", broadcasts=False, lowered=False), "dsinks"})
_CONTIGUOUS = frozenset({"lse", *INTEGERS})


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """One array; its strides are in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = MAX_ALIGNMENT  # largest power of two that divides its address, up to this

    @property
    def itemsize(self) -> int:
        return _itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def elements(self) -> tuple[int, ...]:
        """Strides in elements, 0 along axes of length 1."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(stride // self.itemsize if n > 1 else 0 for n, stride in pairs)

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Strides in bytes between rows, along axes that have more than one entry."""
        pairs = zip(self.shape[:-1], self.strides, strict=False)
        return tuple(stride for n, stride in pairs if n > 1)

    @property
    def row_alignment(self) -> int:
        """Bytes that every row starts and ends aligned to; 0 where a row is not contiguous."""
        if self.shape[-1] < 2 or self.strides[-1] != self.itemsize:
            return 0
        return math.gcd(self.alignment, self.shape[-1] * self.itemsize, *self.row_strides)

    @property
    def is_contiguous(self) -> bool:
        """Whether it lies in C order without gaps."""
        step = self.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n > 1 and stride != step:
                return False
            step *= n
        return True


@dataclass(frozen=True, slots=True)
class Constant:
    """An array that a plan brings to the device, in C order: equal ones are equal values."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, x: NDArray[Any]) -> "Constant":
        return cls(x.dtype.name, x.shape, x.tobytes())

    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The arrays of one pass that are on the device, by their names in the parameter block."""

    arrays: tuple[tuple[str, ArrayLayout], ...]
    kv_lengths: tuple[int, ...] | None  # one a batch entry; None where they are on the device
    q_offset: tuple[int, ...] | None
    block_mask: BlockMask | None = None
    evaluated_mask: BlockMask | None = None  # a block mask of which kernels read no pairs
    cu_seqlens: tuple[tuple[str, tuple[int, ...]], ...] = ()  # offsets that are on the host
    host_aux: tuple[tuple[str, Constant], ...] = ()  # values of aux that are on the host
    origin: Constant | None = None  # from which dropout counts
    near_origin: int | None = None  # number in aux of one that is near, from which functions count
    v_is_k: bool = False  # whether v is a view of the first columns of k

    @property
    def listed_mask(self) -> BlockMask | None:
        """The block mask whose kinds say which tiles are computed."""
        return self.evaluated_mask if self.block_mask is None else self.block_mask

    def get(self, name: str) -> ArrayLayout | None:
        """Look up an array; None where the call has none of the name."""
        return next((x for each, x in self.arrays if each == name), None)

    @property
    def aux(self) -> tuple[ArrayLayout, ...]:
        """What the caller's own functions read."""
        return tuple(self.aux_by_name.values())

    @property
    def aux_by_name(self) -> dict[str, ArrayLayout]:
        """The same by their names."""
        known = {name: x for name, x in self.arrays if name.startswith("aux[")}
        known |= {name: contiguous(x.shape, x.dtype) for name, x in self.host_aux}
        return dict(sorted(known.items(), key=lambda item: int(item[0][len("aux[") : -1])))

    def with_arrays(self, **more: ArrayLayout) -> "CallLayout":
        """Add arrays, or replace those of the same name."""
        return replace(self, arrays=tuple((dict(self.arrays) | more).items()))

    def with_contiguous_results(self, problem: Problem, direction: str) -> "CallLayout":
        """Add what a pass reads or writes besides the inputs, as `forward` and `backward` do."""
        P, dtype, accum = problem, problem.dtype.name, problem.accum_dtype.name
        more = {"out": contiguous((P.B, P.Hq, P.Nq, P.Dv), dtype)}
        more["lse"] = contiguous((P.B, P.Hq, P.Nq), accum)
        if direction == "backward":
            more["dout"] = more["out"]
            more["dq"] = contiguous((P.B, P.Hq, P.Nq, P.D), dtype)
            more["dk"] = contiguous((P.B, P.Hkv, P.Nk, P.D), dtype)
            more["dv"] = contiguous((P.B, P.Hkv, P.Nk, P.Dv), dtype)
            for name in options_with(value="array", gradient=True):
                x = self.get(name)
                if x is not None:
                    more[f"d{name}"] = contiguous(x.shape, x.dtype)
        return self.with_arrays(**more)


def contiguous(shape: tuple[int, ...], dtype: str) -> ArrayLayout:
    """Describe a contiguous array with memory of its own."""
    step, strides = _itemsize(dtype), []
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return ArrayLayout(shape, tuple(reversed(strides)), dtype)


def contiguous_inputs(problem: Problem) -> CallLayout:
    """Describe a call of contiguous q, k and v and full lengths, aligned at the bottom right."""
    P, dtype = problem, problem.dtype.name
    shapes = {
        "q": (P.B, P.Hq, P.Nq, P.D),
        "k": (P.B, P.Hkv, P.Nk, P.D),
        "v": (P.B, P.Hkv, P.Nk, P.Dv),
    }
    arrays = tuple((name, contiguous(shape, dtype)) for name, shape in shapes.items())
    return CallLayout(arrays, (P.Nk,) * P.B, (P.Nk - P.Nq,) * P.B)


def copies(problem: Problem, layout: CallLayout) -> Iterator[tuple[str, ArrayLayout]]:
    """Yield the contiguous arrays that kernels use in place of those that they cannot address."""
    for name, x in layout.arrays:
        dtype = x.dtype
        if name in ROWS:
            needed = x.strides[-1] != x.itemsize and x.shape[-1] > 1
        elif name in _ACCUMULATED or name in _CONTIGUOUS:
            dtype = _read_as(problem, name, dtype)
            needed = not (x.is_contiguous and x.dtype == dtype)
        else:
            needed = False
        if needed and 0 not in x.shape:
            yield name, contiguous(x.shape, dtype)


@cache
def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _read_as(problem: Problem, name: str, dtype: str) -> str:
    """Say in which dtype kernels read an array."""
    if name in INTEGERS:
        return "int32" if dtype == "int32" else "int64"
    return problem.accum_dtype.name if name in _ACCUMULATED else dtype


def alignment_of(address: int) -> int:
    """Give the largest power of two, up to `MAX_ALIGNMENT`, that divides an address."""
    bits = address | MAX_ALIGNMENT
    return bits & -bits


def array_layout(x: Any, address: int) -> ArrayLayout:
    """Describe an array of any library."""
    return ArrayLayout(x.shape, x.strides, x.dtype.name, alignment_of(address))
