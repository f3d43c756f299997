"""Arrays and integers of a call as validation and planning see them, without their memory.

Their numbers may take note of operations: see `tileattn.call.straight_line`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.problem import Operands, Problem

_NONE = 1 << 62  # more queries than any sequence has
_ALIGNED = 16  # bytes; the stride along an axis of length 1 that an array lacks


class Described:
    """The layout of an array.

    Parameters
    ----------
    shape, strides : tuple of int
        Its sizes, and its strides in bytes.
    dtype : numpy.dtype
        The type of its elements.
    address : int
        Where it starts.
    """

    __slots__ = ("address", "dtype", "shape", "strides")

    def __init__(
        self,
        shape: tuple[Any, ...],
        strides: tuple[Any, ...],
        dtype: np.dtype[Any],
        address: Any = 0,
    ) -> None:
        self.shape, self.strides, self.dtype, self.address = shape, strides, dtype, address

    @classmethod
    def dense(cls, shape: tuple[Any, ...], dtype: np.dtype[Any]) -> "Described":
        """Describe an array in C order without gaps."""
        strides, step = [], dtype.itemsize
        for n in reversed(shape):
            strides.append(step)
            step = step * n
        return cls(shape, tuple(reversed(strides)), dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def reshape(self, shape: tuple[Any, ...]) -> "Described":
        """Return the array with axes of length 1 before its own."""
        lead = len(shape) - self.ndim
        return Described(shape, (_ALIGNED,) * lead + self.strides, self.dtype, self.address)

    @property
    def is_contiguous(self) -> bool:
        """True if the array lies in C order without gaps."""
        step = self.dtype.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n > 1 and stride != step:
                return False
            step = step * n
        return True


class HostIntegers(NamedTuple):
    """An option that the host knows: one integer, or one for each sequence."""

    low: Any
    high: Any
    count: Any  # of the sequences; None for one integer
    values: Sequence[int] = ()

    @classmethod
    def of(cls, x: Any) -> "HostIntegers | None":
        """Describe an option; None if it is unusual, or wrong."""
        if type(x) is np.ndarray and x.ndim == 1 and x.dtype.kind == "i":
            x = x.tolist()
        if type(x) is int:
            return cls(x, x, None)
        plain = (type(x) is list or type(x) is tuple) and x and {*map(type, x)} == {int}
        return cls(min(x), max(x), len(x), x) if plain else None


class Offsets(NamedTuple):
    """Offsets of packed sequences; each sequence has ``low`` to ``high`` tokens."""

    low: Any
    high: Any
    count: Any  # of the offsets
    first: Any
    last: Any
    values: Sequence[int] = ()

    @classmethod
    def of(cls, x: Any) -> "Offsets | None":
        """Describe an option; None if it is unusual, wrong, or has no sequences."""
        known = HostIntegers.of(x)
        if known is None or known.count is None or known.count < 2:
            return None
        values = known.values
        tokens = steps(values)
        return cls(min(tokens), max(tokens), len(values), values[0], values[-1], values)


def steps(offsets: Sequence[int]) -> list[int]:
    """Return the tokens of each sequence."""
    return [after - before for before, after in pairwise(offsets)]


class Lengths(NamedTuple):
    """What planning reads of the lengths of a call's sequences."""

    fewest: int  # queries of a sequence
    most: int  # queries of a sequence
    keys: int  # most keys of a sequence in memory
    longest: int  # most keys that a sequence has

    @classmethod
    def of(cls, P: Problem, x: Operands) -> "Lengths":
        """Read the lengths of a call."""
        longest = max(x.kv_lengths.tolist(), default=0)
        if x.packing is None:
            return cls(P.Nq, P.Nq, P.Nk, longest)
        fewest = int(x.packing.sizes[1].min(initial=_NONE))
        return cls(fewest, *x.packing.longest(P.Nq, P.Nk), longest)

    def batch(self, P: Problem) -> Problem:
        """Return the problem with packed sequences as batch entries of the greatest length."""
        return replace(P, B=P.entries, Nq=self.most, Nk=self.keys) if P.is_packed else P
