"""The numbers in the options of a call, as an argument of its program.

So calls that differ in numbers only share a program. A zero outside of functions stays an option
of the program: it turns an option off.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from tileattn.expressions.nodes import Kind
from tileattn.expressions.parameters import Expression, cell_of, number_of

_WIDTH = 16  # bytes of a number; a seed has 64 bits and no sign

NUMBERS = "numbers"
"""The name of the numbers among the arrays of a call."""


def split(options: Any) -> tuple[Any, bytes]:
    """Return options with ones in place of their numbers, and the numbers."""
    numbers = list(_numbers(options))
    ones = (type(x)(1) for x in numbers)
    cells = (cell_of(x).to_bytes(_WIDTH, "little", signed=True) for x in numbers)
    return _replaced(options, ones), b"".join(cells)


def joined(options: Any, numbers: bytes) -> Any:
    """Return options with numbers in place of the ones that `split` has put there."""
    starts = range(0, len(numbers), _WIDTH)
    cells = [int.from_bytes(numbers[n : n + _WIDTH], "little", signed=True) for n in starts]
    found = (
        number_of(Kind.FLOAT, cell) if isinstance(one, float) else cell
        for one, cell in zip(_numbers(options), cells, strict=True)
    )
    return _replaced(options, found)


@dataclass(frozen=True, eq=False)
class _Copied:
    """Numbers, and their copy in the memory of a device."""

    numbers: bytes
    array: jax.Array


_copied_to: WeakValueDictionary[int, _Copied] = WeakValueDictionary()  # by address


def array_of(numbers: bytes) -> jax.Array:
    """Copy numbers to JAX's default device; equal numbers share an array."""
    known = _copied(numbers)
    if known.array.is_deleted():  # a caller has deleted all of JAX's arrays
        _copied.cache_clear()
        known = _copied(numbers)
    return known.array


def bytes_of(array: Any) -> bytes:
    """Return the numbers that a program was given, as an array of NumPy or CuPy.

    An array that is not of `array_of` is read. If it is on a GPU, the host waits for it.
    """
    on_gpu = getattr(array, "__cuda_array_interface__", None)
    address, _ = (on_gpu or array.__array_interface__)["data"]
    known = _copied_to.get(address)
    if known is None or known.array.is_deleted():
        data: bytes = array.tobytes()
        return data
    return known.numbers


@lru_cache(maxsize=256)
def _copied(numbers: bytes) -> _Copied:
    array = jax.device_put(np.array([*numbers], np.uint8))
    made = _Copied(numbers, array)
    _copied_to[array.unsafe_buffer_pointer()] = made
    return made


def _numbers(x: Any) -> Iterator[int | float]:
    """Yield the numbers in an option, or in a tuple of options."""
    if type(x) is Expression:
        yield from x.constants
    elif isinstance(x, tuple):
        for y in x:
            yield from _numbers(y)
    elif _is_number(x):
        yield x


def _replaced(x: Any, numbers: Iterator[Any]) -> Any:
    """Return an option with other numbers, or a tuple of options."""
    if type(x) is Expression:
        return Expression(x.node, tuple(islice(numbers, len(x.constants))))
    if isinstance(x, tuple):
        return tuple([_replaced(y, numbers) for y in x])
    return next(numbers) if _is_number(x) else x


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and bool(x)
