"""Dual numbers on arrays: values with their derivatives in several directions, for the oracle.

A function that is written with operators and NumPy's functions is called with them as it is. They
share nothing with ``tileattn.expressions``, which makes derivatives from the function's text.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

Array = NDArray[Any]
Direction = tuple[Any, ...]


class Dual(NDArrayOperatorsMixin):
    """An array ``value + sum of tangent * epsilon``, one epsilon for each direction.

    Parameters
    ----------
    value : array
        The values.
    tangents : dict
        The derivative in each direction, of a shape that broadcasts with that of the values.
    """

    def __init__(self, value: Any, tangents: dict[Direction, Any]) -> None:
        self.value = np.asarray(value)
        self.tangents = tangents

    def astype(self, dtype: Any) -> Any:
        """Convert; an integer or boolean has no derivative."""
        value = self.value.astype(dtype)
        return Dual(value, self.tangents) if value.dtype.kind == "f" else value

    def __getitem__(self, _: tuple[()]) -> "Dual":
        """Give an array without axes, of which there are all indices."""
        return self

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any) -> Any:
        values = [value_of(x) for x in given]
        value = getattr(ufunc, method)(*values)
        if value.dtype.kind != "f" or ufunc in (np.floor, np.sign):
            return value
        if ufunc in (np.minimum, np.maximum):
            first = (ufunc(*values) == values[0]) + 0.0 - 0.5 * (values[0] == values[1])
            return _selected(value, given, (first, 1 - first))
        factors = _FACTORS[ufunc.__name__](value, *values)
        tangents: dict[Direction, Any] = {}
        for x, factor in zip(given, factors, strict=True):
            for direction, tangent in tangents_of(x).items():
                tangents[direction] = tangents.get(direction, 0) + factor * tangent
        return Dual(value, tangents)

    def __array_function__(self, function: Any, _types: Any, given: Any, _options: Any) -> Any:
        if function is np.clip:
            return np.minimum(np.maximum(given[0], given[1]), given[2])
        condition, *values = (value_of(x) for x in given)
        chosen = condition != 0
        return _selected(np.where(chosen, *values), given[1:], (chosen + 0.0, ~chosen + 0.0))


def value_of(x: Any) -> Any:
    """Give the values of a dual number, or of any other."""
    return x.value if isinstance(x, Dual) else x


def tangents_of(x: Any) -> dict[Direction, Any]:
    """Give the derivatives of a dual number; another has none."""
    return x.tangents if isinstance(x, Dual) else {}


def _selected(value: Any, given: Any, shares: Any) -> Dual:
    """Give each input its share of the derivative; what is not chosen has none, even of a NaN."""
    tangents: dict[Direction, Any] = {}
    for x, share in zip(given, shares, strict=True):
        for direction, tangent in tangents_of(x).items():
            part = np.where(share != 0, share * tangent, 0)
            tangents[direction] = tangents.get(direction, 0) + part
    return Dual(value, tangents)


def _power(value: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return y * np.power(x, y - 1.0), np.where(value == 0, 0, value * np.log(x))


_FACTORS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "add": lambda _, _x, _y: (1, 1),
    "subtract": lambda _, _x, _y: (1, -1),
    "multiply": lambda _, x, y: (y, x),
    "divide": lambda value, _, y: (1 / y, -value / y),
    "power": _power,
    "float_power": _power,
    "positive": lambda _, _x: (1,),
    "negative": lambda _, _x: (-1,),
    "absolute": lambda _, x: (np.sign(x),),
    "fabs": lambda _, x: (np.sign(x),),
    "square": lambda _, x: (2 * x,),
    "sqrt": lambda value, _: (0.5 / value,),
    "exp": lambda value, _: (value,),
    "exp2": lambda value, _: (value * np.log(2),),
    "log": lambda _, x: (1 / x,),
    "log2": lambda _, x: (1 / (x * np.log(2)),),
    "tanh": lambda value, _: (1 - value * value,),
    "sin": lambda _, x: (np.cos(x),),
    "cos": lambda _, x: (-np.sin(x),),
}
"""By the name of a function: its derivatives by each input, from its value and the inputs."""


class Clamped:
    """An array whose indices are moved to its ends where they are past them; -1 is the last.

    Every read of an element gives a dual number with a direction of its own: the number of the
    array and the indices, which are kept as arrays in ``reads``.

    Parameters
    ----------
    array : array
        The elements.
    number : int
        Of the array among all.
    reads : dict
        Where the indices of each direction are kept.
    """

    def __init__(self, array: Array, number: int, reads: dict[Direction, tuple[Any, ...]]) -> None:
        self._array, self._number, self._reads = array, number, reads

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) < self._array.ndim:
            return _Part(self, keys)
        place = tuple(
            np.clip(value_of(index), -n, n - 1)
            for index, n in zip(keys, self._array.shape, strict=True)
        )
        value = self._array[place]
        if value.dtype.kind != "f":
            return value
        direction = self._number, len(self._reads)
        self._reads[direction] = place
        return Dual(value, {direction: np.ones((), value.dtype)})


class _Part:
    """An array of which the first axes are indexed."""

    def __init__(self, array: Clamped, keys: tuple[Any, ...]) -> None:
        self._array, self._keys = array, keys

    def __getitem__(self, key: Any) -> Any:
        return self._array[(*self._keys, *(key if isinstance(key, tuple) else (key,)))]
