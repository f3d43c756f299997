"""Dual numbers on arrays: values with their derivatives in several directions, for the oracle.

A function that is written with operators and NumPy's functions is called with them as it is. They
share nothing with ``tileattn.expressions``, which makes derivatives from the function's text.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from tileattn.array_functions import ArrayFunctions, kind_name

Array = NDArray[Any]
Direction = tuple[Any, ...]


class Dual(ArrayFunctions, NDArrayOperatorsMixin):
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
        kind = kind_name(dtype) or kind_name(np.dtype(dtype))
        if kind == "float" and self.value.dtype.kind == "f":
            return self
        return Dual(self.value.astype({"int": np.int64}.get(str(kind), kind)), {})

    def named(self, name: str, *given: Any) -> Any:
        """Call a function by its name in NumPy."""
        if name == "where":
            return self.__array_function__(np.where, (), given, {})
        if name in _VALUES:
            return self._made(name, _VALUES[name], given)
        return self.__array_ufunc__(getattr(np, name), "__call__", *given)

    def refused(self, what: str) -> TypeError:
        """Return the TypeError for an unsupported operation."""
        return TypeError(f"the function {what}")

    def __bool__(self) -> bool:
        raise self.refused("asks whether an array is true; numpy.where must take the place of if")

    def __abs__(self) -> Any:
        return self.named("absolute", self)

    def __getitem__(self, _: tuple[()]) -> "Dual":
        """Return the element of an array without axes."""
        return self

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any) -> Any:
        values = [value_of(x) for x in given]
        value = getattr(ufunc, method)(*values)
        if value.dtype.kind != "f" or ufunc in (np.floor, np.ceil, np.rint, np.sign):
            return Dual(value, {})
        if ufunc in (np.minimum, np.maximum):
            first = (ufunc(*values) == values[0]) + 0.0 - 0.5 * (values[0] == values[1])
            return _selected(value, given, (first, 1 - first))
        return self._made(ufunc.__name__, ufunc, given)

    def _made(self, name: str, function: Callable[..., Any], given: Any) -> "Dual":
        values = [value_of(x) for x in given]
        value = function(*values)
        factors = _FACTORS[name](value, *values)
        tangents: dict[Direction, Any] = {}
        for x, factor in zip(given, factors, strict=True):
            for direction, tangent in tangents_of(x).items():
                tangents[direction] = tangents.get(direction, 0) + factor * tangent
        return Dual(value, tangents)

    def __array_function__(self, function: Any, _types: Any, given: Any, options: Any) -> Any:
        if function is not np.where:
            return self.called(function.__name__, given, options)
        condition, *values = (value_of(x) for x in given)
        chosen = np.asarray(condition) != 0
        return _selected(np.where(chosen, *values), given[1:], (chosen + 0.0, ~chosen + 0.0))


def value_of(x: Any) -> Any:
    """Return the values of a dual number; other numbers are their own value."""
    if isinstance(x, Dual):
        return x.value
    return x.item() if getattr(x, "shape", None) == () and hasattr(x, "item") else x


def tangents_of(x: Any) -> dict[Direction, Any]:
    """Return the derivatives of a dual number; other numbers have none."""
    return x.tangents if isinstance(x, Dual) else {}


def _selected(value: Any, given: Any, shares: Any) -> Dual:
    """Select the derivative of the chosen input; the other one contributes none, even a NaN."""
    tangents: dict[Direction, Any] = {}
    for x, share in zip(given, shares, strict=True):
        for direction, tangent in tangents_of(x).items():
            part = np.where(share != 0, share * tangent, 0)
            tangents[direction] = tangents.get(direction, 0) + part
    return Dual(value, tangents)


def _share(x: Any, y: Any) -> Any:
    """Return ``exp(x) / (exp(x) + exp(y))``; a half for equal inputs, infinite ones too."""
    return np.where(x == y, 0.5, 1 / (1 + np.exp(y - x)))


def _power(value: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return y * np.power(x, y - 1.0), np.where(value == 0, 0, value * np.log(x))


def _of_floats(function: Callable[[float], float]) -> Callable[[Any], Any]:
    return lambda x: np.vectorize(function, otypes=[np.float64])(x).astype(np.result_type(x))


_VALUES: dict[str, Callable[[Any], Any]] = {
    "erf": _of_floats(math.erf),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
"""Functions that NumPy does not have."""

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
    "remainder": lambda _, x, y: (1, -np.floor_divide(x, y)),
    "logaddexp": lambda _, x, y: (_share(x, y), _share(y, x)),
    "exp": lambda value, _: (value,),
    "expm1": lambda value, _: (value + 1,),
    "log1p": lambda _, x: (1 / (1 + x),),
    "arctan": lambda _, x: (1 / (1 + x * x),),
    "erf": lambda _, x: (2 / np.sqrt(np.pi) * np.exp(-x * x),),
    "sigmoid": lambda value, _: (value * (1 - value),),
    "expit": lambda value, _: (value * (1 - value),),
    "exp2": lambda value, _: (value * np.log(2),),
    "log": lambda _, x: (1 / x,),
    "log2": lambda _, x: (1 / (x * np.log(2)),),
    "tanh": lambda value, _: (1 - value * value,),
    "sin": lambda _, x: (np.cos(x),),
    "cos": lambda _, x: (-np.sin(x),),
}
"""Derivatives of each function by its inputs, computed from its value and the inputs."""


class Clamped:
    """An array that clamps indices past its ends; -1 is the last element.

    Every read of an element returns a dual number with a direction of its own: the number of the
    array and the indices, kept in ``reads``.

    Parameters
    ----------
    array : array
        The elements.
    number : int
        Number of the array.
    reads : dict
        Filled with the indices of each direction.
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
            return Dual(value, {})
        direction = self._number, len(self._reads)
        self._reads[direction] = place
        return Dual(value, {direction: np.ones((), value.dtype)})


class _Part:
    """An array of which the first axes are indexed."""

    def __init__(self, array: Clamped, keys: tuple[Any, ...]) -> None:
        self._array, self._keys = array, keys

    def __getitem__(self, key: Any) -> Any:
        return self._array[(*self._keys, *(key if isinstance(key, tuple) else (key,)))]
