"""Replace the variables that a function captures by stand-ins, while it is traced.

A captured number becomes a parameter (`captured_numbers`).

A captured array, ``ids`` in ``lambda b, h, i, j: ids[i] == ids[j]``, takes no traced index. Its
stand-in does, and turns the read into an element of ``aux``. PyTorch tensors need no stand-in: they
dispatch to the index. JAX's functions refuse traced values, and are replaced by NumPy's.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from tileattn.array_functions import ArrayFunctions
from tileattn.expressions.aux_arrays import is_array
from tileattn.expressions.captured_numbers import Mathematics, on_numbers
from tileattn.expressions.state import names_of
from tileattn.expressions.trace import Source, TracedArray

_DEPTH = 4  # of functions that call functions
_NO_NUMBERS: Mapping[Hashable, Any] = {}


def with_stand_ins(
    function: Any, source: "Source | _Parameters", numbers: Mapping[Hashable, Any] = _NO_NUMBERS
) -> Any:
    """Return a function that reads stand-ins for captured arrays; itself if there are none.

    ``numbers`` are the stand-ins for captured numbers, by their places in a `State`.
    """
    return _StandIns(source, numbers).of("", function, 0)


class _StandIns:
    """Stand-ins for the variables of a function."""

    def __init__(self, source: "Source | _Parameters", numbers: Mapping[Hashable, Any]) -> None:
        self._source, self._numbers = source, numbers
        self._functions: dict[int, Any] = {}

    def of(self, name: str, x: Any, depth: int, place: tuple[Hashable, ...] = ()) -> Any:
        """Return the stand-in for a variable; the variable itself if it needs none."""
        if place in self._numbers:
            return self._numbers[place]
        if isinstance(x, FunctionType):
            return self._function(x, depth)
        if isinstance(x, MethodType):
            inner = self.of(name, x.__func__, depth)
            return x if inner is x.__func__ else MethodType(inner, x.__self__)
        if type(x) is partial:
            return self._partial(name, x, depth)
        if type(x) in (tuple, list) and (self._numbers or any(map(callable, x))):
            return type(x)(self.of(name, y, depth, (*place, n)) for n, y in enumerate(x))
        if self._numbers and (x is math or getattr(x, "__self__", None) is math):
            return Mathematics() if x is math else on_numbers(x)
        if isinstance(x, ModuleType):
            return _Module(x) if x.__name__.partition(".")[0] == "jax" else x
        if hasattr(type(x), "__torch_function__") or not is_array(x) or not x.shape:
            return x
        if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray | np.matrix):
            array = x.view(_NumpyArray)
            array.source, array.name, array.whole = self._source, name, x
            return array
        return _OtherArray(self._source, name, x)

    def _function(self, x: FunctionType, depth: int) -> Any:
        if id(x) in self._functions:
            found = self._functions[id(x)]
            if found is x and self._numbers:
                raise TypeError("a function that calls itself reads its numbers as they are")
            return found
        if depth >= _DEPTH:
            if self._numbers:
                raise TypeError("functions that call functions are too deep")
            return x
        self._functions[id(x)] = x
        code, scope, defaults = x.__code__, x.__globals__, x.__defaults__ or ()
        names = names_of(code)
        if names is None:
            return x
        variables = {
            name: self.of(name, scope[name], depth + 1, (id(scope), name))
            for name in names
            if name in scope
        }
        cells = zip(code.co_freevars, x.__closure__ or (), strict=True)
        parameters = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        made = FunctionType(
            code,
            {**scope, **variables},
            x.__name__,
            tuple(
                self.of(name, y, depth + 1, (id(x), n))
                for n, (name, y) in enumerate(zip(parameters, defaults, strict=True))
            ),
            tuple(self._cell(name, cell, depth + 1) for name, cell in cells),
        )
        keywords = x.__kwdefaults__ or {}
        made.__dict__.update(x.__dict__)
        made.__kwdefaults__ = {
            name: self.of(name, y, depth + 1, (id(x), name)) for name, y in keywords.items()
        }
        self._functions[id(x)] = made
        return made

    def _partial(self, name: str, x: "partial[Any]", depth: int) -> Any:
        function = self.of(name, x.func, depth)
        if not self._numbers:
            return partial(function, *x.args, **x.keywords)
        args = self.of(name, x.args, depth, (id(x), 1))
        keywords = {
            key: self.of(key, y, depth, (id(x), n, 1))
            for n, (key, y) in enumerate(sorted(x.keywords.items()), 2)
        }
        return partial(function, *args, **keywords)

    def _cell(self, name: str, cell: CellType, depth: int) -> CellType:
        try:
            return CellType(self.of(name, cell.cell_contents, depth, (id(cell),)))
        except ValueError:  # not assigned yet
            return cell


def with_parameters(options: Mapping[str, Any], arrays: Sequence[Any]) -> dict[str, Any]:
    """Return options whose functions take all arrays as parameters, captured ones too.

    ``arrays`` is ``aux`` followed by the captured arrays.
    """
    count, found = len(options.get("aux") or ()), dict(options)
    if len(arrays) == count:
        return found
    for name in ("score_mod", "mask_mod"):
        if found.get(name) is not None:
            found[name] = partial(_with_parameters, found[name], arrays, count)
    return {**found, "aux": tuple(arrays)}


def _with_parameters(function: Any, arrays: Sequence[Any], count: int, *given: Any) -> Any:
    parameters = given[len(given) - len(arrays) :]
    source = _Parameters(arrays, parameters)
    own = given[: len(given) - len(arrays) + count]
    return with_stand_ins(function, source)(*own)


class _Parameters:
    """Maps captured arrays to parameters."""

    def __init__(self, arrays: Sequence[Any], parameters: Sequence[Any]) -> None:
        self._arrays, self._parameters = arrays, parameters

    def captured(self, x: Any, variable: str = "") -> Any:
        """Return the parameter of a captured array, or of a new view of it."""
        place = x.__array_interface__
        for known, given in zip(self._arrays, self._parameters, strict=True):
            if known.__array_interface__ == place:
                return given
        raise TypeError(
            f"a function indexes an array that it computes from `{variable or 'another'}`; it must "
            "be computed outside the function, and captured"
        )


def _is_traced(key: Any) -> bool:
    return any(isinstance(x, ArrayFunctions) for x in (key if isinstance(key, tuple) else (key,)))


class _NumpyArray(np.ndarray[Any, Any]):
    """A view of a captured array that takes traced indices."""

    source: "Source | _Parameters" = Source("")
    name = ""
    whole: Any = None

    def __getitem__(self, key: Any) -> Any:
        if not _is_traced(key):
            return super().__getitem__(key)
        whole = self.view(np.ndarray) if self.whole is None else self.whole
        return self.source.captured(whole, self.name)[key]

    def __array_finalize__(self, other: Any) -> None:
        self.source = getattr(other, "source", self.source)
        self.name = getattr(other, "name", self.name)


class _OtherArray:
    """A captured array of another library, such as JAX, that takes traced indices."""

    def __init__(self, source: "Source | _Parameters", name: str, array: Any) -> None:
        self._source, self._name, self._array = source, name, array

    def __getitem__(self, key: Any) -> Any:
        if not _is_traced(key):
            return self._made(self._array[key])
        return self._source.captured(self._array, self._name)[key]

    def __getattr__(self, name: str) -> Any:
        return self._made(getattr(self._array, name))

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def __jax_array__(self) -> Any:
        return self._array

    def _made(self, x: Any) -> Any:
        """Wrap a part of the array, or a result computed from it, as a captured array."""
        return _OtherArray(self._source, self._name, x) if is_array(x) and x.shape else x


def _itself(x: Any) -> Any:
    return x._array if isinstance(x, _OtherArray) else x


def _delegate(name: str) -> None:
    """Forward an operator, and its reflection, to the array."""
    function = getattr(operator, f"__{name}__")

    def method(self: _OtherArray, *given: Any) -> Any:
        return self._made(function(self._array, *map(_itself, given)))

    def reflected(self: _OtherArray, other: Any) -> Any:
        return self._made(function(_itself(other), self._array))

    setattr(_OtherArray, f"__{name}__", method)
    if name in _REFLECTED.split():
        setattr(_OtherArray, f"__r{name}__", reflected)


_REFLECTED = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHERS = "lt le gt ge eq ne neg pos abs invert index"
for _name in f"{_REFLECTED} {_OTHERS}".split():
    _delegate(_name)
for _type in (bool, int, float, complex):
    setattr(_OtherArray, f"__{_type.__name__}__", lambda self, convert=_type: convert(self._array))


class _Module:
    """A module of JAX, whose functions take traced values."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        x = getattr(self._module, name)
        if isinstance(x, ModuleType):
            return _Module(x)
        return partial(_either, x, name) if callable(x) and not isinstance(x, type) else x


def _either(function: Callable[..., Any], name: str, *given: Any, **options: Any) -> Any:
    """Call a function of JAX, or its NumPy counterpart if a value is traced."""
    for x in (*given, *options.values()):
        if isinstance(x, ArrayFunctions | TracedArray):
            number: Any = x
            return number.called(name, given, options)
    return function(*map(_itself, given), **{key: _itself(x) for key, x in options.items()})
