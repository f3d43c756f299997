"""Layouts of a call's arrays: everything that a plan needs to know about them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.call.block_mask import BlockMask
from tileattn.call.options import options_with
from tileattn.call.problem import Problem
from tileattn.dtypes import NAMED

MAX_ALIGNMENT = 16  # bytes of the widest copy: kernels use no stricter alignment
MIN_ALIGNMENT = 4  # bytes of the narrowest copy that does not go through registers

# Integers of 4 or 8 bytes, in the order of their sizes in the parameter block.
INTEGERS = options_with(value="integers", host_only=False, lowered=False)

# Arrays of any strides with contiguous rows; contiguous arrays in the accumulation dtype; other
# contiguous arrays.
ROWS = frozenset({"q", "k", "v", "out", "dout", "dq", "dk", "dv"})
_ACCUMULATED = frozenset({*options_with(value="array", broadcasts=False, lowered=False), "dsinks"})
_CONTIGUOUS = frozenset({"lse", *INTEGERS})


class ArrayLayout(NamedTuple):
    """One array; its strides are in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = MAX_ALIGNMENT  # of its address: see `alignment_of`

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def elements(self) -> tuple[int, ...]:
        """Strides in elements, 0 along axes of length 1."""
        size = ITEMSIZES[self.dtype]
        return tuple(
            [s // size if n > 1 else 0 for n, s in zip(self.shape, self.strides, strict=False)]
        )

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Strides in bytes between rows, along axes longer than 1."""
        pairs = zip(self.shape[:-1], self.strides, strict=False)
        return tuple(stride for n, stride in pairs if n > 1)

    @property
    def row_alignment(self) -> int:
        """Alignment in bytes of both ends of every row; 0 if rows are not contiguous."""
        if self.shape[-1] < 2 or self.strides[-1] != self.itemsize:
            return 0
        bits = reduce(or_, self.row_strides, self.alignment | self.shape[-1] * self.itemsize)
        return bits & -bits

    @property
    def is_contiguous(self) -> bool:
        """True if the array lies in C order without gaps."""
        step = self.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n > 1 and stride != step:
                return False
            step *= n
        return True


@dataclass(frozen=True, slots=True)
class Constant:
    """A host array that a plan uploads, in C order; equal constants have equal values."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, x: NDArray[Any]) -> "Constant":
        return cls(x.dtype.name, x.shape, x.tobytes())

    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class CallLayout(NamedTuple):
    """The arrays of one pass on the device, by their names in the parameter block."""

    arrays: tuple[tuple[str, ArrayLayout], ...]
    kv_lengths: tuple[int, ...] | None  # of each batch entry; None if they are on the device
    q_offset: tuple[int, ...] | None
    block_mask: BlockMask | None = None
    evaluated_mask: BlockMask | None = None  # a block mask that kernels evaluate pair by pair
    cu_seqlens: tuple[tuple[str, tuple[int, ...]], ...] = ()  # offsets on the host
    host_aux: tuple[tuple[str, Constant], ...] = ()  # arrays of aux on the host
    origin: Constant | None = None  # indices from which dropout counts
    near_origin: int | None = None  # number in aux of an origin that fits in 32 bits
    v_is_k: bool = False  # True: v is a view of the first columns of k

    @property
    def listed_mask(self) -> BlockMask | None:
        """The block mask whose kinds decide which tiles are computed."""
        return self.evaluated_mask if self.block_mask is None else self.block_mask

    def get(self, name: str) -> ArrayLayout | None:
        """Return an array by name; None if the call has none."""
        return next((x for each, x in self.arrays if each == name), None)

    @property
    def aux(self) -> tuple[ArrayLayout, ...]:
        """The arrays that the caller's own functions read."""
        return tuple(self.aux_by_name.values())

    @property
    def aux_by_name(self) -> dict[str, ArrayLayout]:
        """The arrays that the caller's own functions read, by name."""
        known = {name: x for name, x in self.arrays if name.startswith("aux[")}
        known |= {name: contiguous(x.shape, x.dtype) for name, x in self.host_aux}
        return dict(sorted(known.items(), key=lambda item: int(item[0][len("aux[") : -1])))

    def with_arrays(self, **more: ArrayLayout) -> "CallLayout":
        """Add arrays, or replace arrays of the same name."""
        return self._replace(arrays=tuple((dict(self.arrays) | more).items()))

    def with_contiguous_results(self, problem: Problem, direction: str) -> "CallLayout":
        """Add the other arrays of a pass, all contiguous."""
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
    step, strides = ITEMSIZES[dtype], []
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return ArrayLayout(shape, tuple(reversed(strides)), dtype)


def contiguous_inputs(problem: Problem) -> CallLayout:
    """Describe contiguous q, k and v, full lengths, and bottom-right alignment."""
    P, dtype = problem, problem.dtype.name
    shapes = {
        "q": (P.B, P.Hq, P.Nq, P.D),
        "k": (P.B, P.Hkv, P.Nk, P.D),
        "v": (P.B, P.Hkv, P.Nk, P.Dv),
    }
    arrays = tuple((name, contiguous(shape, dtype)) for name, shape in shapes.items())
    return CallLayout(arrays, (P.Nk,) * P.B, (P.Nk - P.Nq,) * P.B)


def copies(problem: Problem, layout: CallLayout) -> Iterator[tuple[str, ArrayLayout]]:
    """Yield the contiguous copies that replace arrays which kernels cannot address."""
    for name, x in layout.arrays:
        dtype = x.dtype
        if name in ROWS:
            needed = x.strides[-1] != ITEMSIZES[dtype] and x.shape[-1] > 1
        elif name in _ACCUMULATED or name in _CONTIGUOUS:
            dtype = _read_as(problem, name, dtype)
            needed = not (x.is_contiguous and x.dtype == dtype)
        else:
            needed = False
        if needed and 0 not in x.shape:
            yield name, contiguous(x.shape, dtype)


class _ItemSizes(dict[str, int]):
    """Bytes of an element by the name of its dtype."""

    def __missing__(self, dtype: str) -> int:
        size = self[dtype] = np.dtype(dtype).itemsize
        return size


ITEMSIZES = _ItemSizes()
_NAMES = {
    dtype: name for name, dtype in NAMED.items()
}  # a dtype takes a microsecond to name itself


def _read_as(problem: Problem, name: str, dtype: str) -> str:
    """Return the dtype in which kernels read an array."""
    if name in INTEGERS:
        return "int32" if dtype == "int32" else "int64"
    return problem.accum_dtype.name if name in _ACCUMULATED else dtype


def alignment_of(address: int) -> int:
    """Return the largest power of two, up to `MAX_ALIGNMENT`, that divides an address."""
    bits = address | MAX_ALIGNMENT
    return bits & -bits


def array_layout(x: Any, address: int) -> ArrayLayout:
    """Describe an array of any library."""
    dtype = _NAMES.get(x.dtype) or x.dtype.name
    return ArrayLayout(x.shape, x.strides, dtype, alignment_of(address))
