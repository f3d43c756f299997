"""Addresses of arrays, and the ranges of bytes that they span."""

import ctypes
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np


def byte_bounds(x: Any) -> tuple[int, int]:
    """Return the range of bytes that an array spans, relative to its address."""
    return _bounds(x.shape, x.strides, x.itemsize)


@lru_cache(maxsize=1024)
def _bounds(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + itemsize


class Overlap:
    """Test by addresses only whether an output may overlap inputs.

    Parameters
    ----------
    out : array
        An array with the layout of the output.
    inputs : iterable of array
        Arrays with the layouts of the inputs.
    """

    def __init__(self, out: Any, inputs: Iterable[Any]) -> None:
        self._first, self._past = byte_bounds(out)
        self._inputs = [byte_bounds(x) for x in inputs]

    def __call__(self, at_out: int, addresses: Iterable[int]) -> bool:
        """Return True if the byte ranges overlap; the elements may still be disjoint."""
        first, past = at_out + self._first, at_out + self._past
        for at, (lo, hi) in zip(addresses, self._inputs, strict=True):
            if at + lo < past and first < at + hi:
                return True
        return False


def _of_interface(x: Any) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


# The address is the first field of an array, after the object header. NumPy's macro
# PyArray_DATA reads it there, in every extension that was ever compiled; NumPy's own attributes
# take eight times as long.
_HEAD = object.__basicsize__
_word_at = ctypes.c_size_t.from_address


def _of_object(x: Any) -> int:
    return _word_at(id(x) + _HEAD).value


def _fastest() -> Callable[[Any], int]:
    probe = np.empty(1)
    if sys.implementation.name == "cpython" and np.ndarray.__basicsize__ >= _HEAD + 8:
        return _of_object if _of_object(probe) == _of_interface(probe) else _of_interface
    return _of_interface


address_of: Callable[[Any], int] = _fastest()
"""Return the address of a NumPy array's first element."""
