"""What a function reads besides its parameters: where that changes, it is traced again."""

from collections.abc import Callable, Hashable
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import ref

import numpy as np

_PLAIN = (bool, int, str, bytes, type(None))
_FIXED = (ModuleType, BuiltinFunctionType, np.ufunc, type, np.ndarray)  # arrays are refused


class _UnknownStateError(Exception):
    """A function reads an object that may change unseen."""


class _Same:
    """An object, by its identity; it is not kept alive where it can be helped."""

    def __init__(self, x: Any) -> None:
        self._hash = id(x)
        try:
            self._get: Callable[[], Any] = ref(x)
        except TypeError:
            self._get = lambda: x

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return isinstance(other, _Same) and mine is not None and mine is other._get()


def state_of(function: Any) -> Hashable:
    """Give all that a function reads besides its parameters; None where that cannot be told.

    A function is its code, its default arguments, and the values of the variables around it and of
    the globals that it names: one of them that changes makes another function. Of a module nothing
    is thought to change, of other objects everything.
    """
    try:
        return _state(function, ())
    except _UnknownStateError:
        return None


def _state(x: Any, around: tuple[Any, ...]) -> Hashable:
    if isinstance(x, float):  # also NumPy's
        return float, x.hex()
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, np.generic):
        return x.dtype, x.tobytes()
    if isinstance(x, tuple):
        return tuple(_state(y, around) for y in x)
    if isinstance(x, partial):
        return tuple(_state(y, around) for y in (x.func, x.args, *sorted(x.keywords.items())))
    if isinstance(x, _FIXED):
        return _Same(x)
    if not isinstance(x, FunctionType):
        raise _UnknownStateError
    if any(x is y for y in around):
        return "itself"
    names = [n for n in _names(x.__code__) if n in x.__globals__]
    cells = [_content(cell) for cell in x.__closure__ or ()]
    keywords = sorted((x.__kwdefaults__ or {}).items())
    parts = (*(x.__defaults__ or ()), *keywords, *cells, *(x.__globals__[n] for n in names))
    return (x.__code__, tuple(names), *(_state(y, (*around, x)) for y in parts))


def _names(code: CodeType) -> list[str]:
    """List the names that code looks up, that of the functions inside it too."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return sorted({*code.co_names, *(name for x in inner for name in _names(x))})


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
