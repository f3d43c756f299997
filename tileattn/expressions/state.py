"""The state of a function: everything that it reads besides its parameters.

The state is a structure and the numbers in it. A function with known state is traced once for each
structure, if all of its numbers can be parameters. Any other function is traced at each call,
because what it reads may have changed.
"""

import builtins
import dis
import hashlib
import marshal
import math
import operator
import sys
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

_CELL = 8  # bytes of the largest number that may be a parameter
_PLAIN = frozenset({bool, int, str, bytes, type(None)})
_MODULES = (np, math, operator)  # with pure functions; attributes are assumed constant
_ARRAY_FUNCTION = type(np.where)
_HEAP_TYPE = 1 << 9  # CPython's flag of a class with mutable attributes
_PURE = """
abs all any bool divmod enumerate float int isinstance len list map max min pow range reversed
round sorted sum tuple zip
"""
_BUILTINS = {name: getattr(builtins, name) for name in _PURE.split()}
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("_ATTR", "_METHOD", "IMPORT_FROM")
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_WRITES_CELLS = ("STORE_DEREF", "DELETE_DEREF")


class _UnknownStateError(Exception):
    """A function reads an object that may change unseen."""


class State(NamedTuple):
    """What a function reads besides its parameters."""

    structure: Hashable  # everything but the values of numbers
    numbers: tuple[Any, ...]
    places: dict[Hashable, int]  # of the numbers: index by variable, while the function lives

    @property
    def key(self) -> Hashable:
        """The structure with the values of the numbers."""
        return self.structure, tuple(map(exact, self.numbers))


class Reads(NamedTuple):
    """The global names and the attributes that code looks up."""

    names: tuple[str, ...]
    attributes: frozenset[str]
    is_opaque: bool  # True if the code may look up more than that
    digest: bytes  # of the code
    literals: frozenset[Any]  # numbers


_reads: dict[int, tuple[Callable[[], CodeType | None], Reads]] = {}  # by ``id`` of living code


def state_of(function: Any) -> State | None:
    """Return everything that a function reads besides its parameters; None if that is unknown.

    It is known of functions, and of partial functions, whose closure, globals and defaults hold
    numbers, strings, tuples of them, NumPy's functions, and functions of known state.
    """
    reader = _Reader()
    try:
        structure = reader.structure(function, ())
    except _UnknownStateError:
        return None
    return State(structure, tuple(reader.numbers), reader.places)


class _Reader:
    """Reads the state of a function."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []
        self.places: dict[Hashable, int] = {}
        self._functions: dict[int, int] = {}

    def structure(self, x: Any, place: tuple[Hashable, ...]) -> Hashable:
        """Return the structure of an object; ``place`` tells the variable that holds it."""
        kind = type(x)
        if kind is float or kind is int:
            return kind, self._number(x, place)
        if kind in _PLAIN:
            return kind, x
        if kind is FunctionType:
            return self._of_function(x)
        if kind is tuple:
            return tuple(self.structure(y, (*place, n)) for n, y in enumerate(x))
        if kind is partial and not x.__dict__:
            parts = x.func, x.args, *sorted(x.keywords.items())
            return kind, *(self.structure(y, (id(x), n)) for n, y in enumerate(parts))
        if isinstance(x, np.generic) and x.dtype.type is kind and kind is not np.void:
            is_number = x.dtype.kind in "iuf" and x.dtype.itemsize <= _CELL
            return x.dtype, self._number(x, place) if is_number else x.tobytes()
        if is_fixed(x):
            return kind, x
        raise _UnknownStateError

    def _number(self, x: Any, place: tuple[Hashable, ...]) -> int:
        """Return the index of a number: functions that share a variable share it."""
        if place not in self.places:
            self.places[place] = len(self.numbers)
            self.numbers.append(x)
        return self.places[place]

    def _of_function(self, x: FunctionType) -> Hashable:
        if id(x) in self._functions:
            return "function", self._functions[id(x)]
        self._functions[id(x)] = len(self._functions)
        found = reads(x.__code__)
        if found.is_opaque or x.__dict__:
            raise _UnknownStateError
        parts: list[Any] = [found.digest]
        for name in found.names:
            if name in x.__globals__:
                place = id(x.__globals__), name
                parts += (name, self._of_variable(x.__globals__[name], place, found.attributes))
            elif name not in _BUILTINS or vars(builtins).get(name) is not _BUILTINS[name]:
                raise _UnknownStateError
        for cell in x.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # not assigned yet
                raise _UnknownStateError from None
            parts.append(self._of_variable(contents, (id(cell),), found.attributes))
        if x.__defaults__ or x.__kwdefaults__:
            parts.append(self.structure(x.__defaults__, (id(x),)))
            keywords = sorted((x.__kwdefaults__ or {}).items())
            parts += ((name, self.structure(y, (id(x), name))) for name, y in keywords)
        return tuple(parts)

    def _of_variable(
        self, x: Any, place: tuple[Hashable, ...], attributes: frozenset[str]
    ) -> Hashable:
        """Return the structure of a variable of a function, which may be a module."""
        if type(x) is ModuleType and _has_fixed(x, attributes):
            return x
        return self.structure(x, place)


def is_fixed(x: Any) -> bool:
    """Return True if an object is always the same: a function of NumPy, a built-in one or type.

    Others may read something that changes, as a generator of random numbers does.
    """
    if isinstance(x, np.ufunc):
        return getattr(np, x.__name__, None) is x
    if isinstance(x, BuiltinFunctionType):
        owner = x.__self__  # may be an array, which has no one answer to ==
        return owner is math or owner is operator or _BUILTINS.get(x.__name__) is x
    return type(x) is _ARRAY_FUNCTION or (type(x) is type and not x.__flags__ & _HEAP_TYPE)


def _has_fixed(module: Any, attributes: frozenset[str]) -> bool:
    """Return True for a known module whose given attributes are constant."""
    return module in _MODULES and _are_fixed(module, attributes)


@lru_cache(maxsize=1024)
def _are_fixed(module: ModuleType, attributes: frozenset[str]) -> bool:
    found = [getattr(module, name, None) for name in attributes]
    plain = {*_PLAIN, float}
    return all(type(x) in plain or is_fixed(x) for x in found)


def exact(x: Any) -> Hashable:
    """Return the type and the value of a number: -0.0 differs from 0.0, and NaN equals itself."""
    kind = type(x)
    if kind is float:
        return kind, x.hex()
    return (kind, x) if kind in (bool, int) else (x.dtype, x.tobytes())


def literals_of(function: Any) -> frozenset[Any] | None:
    """Return the numbers in the code of a function; None for other callables."""
    function = function.func if type(function) is partial else function
    known = isinstance(function, FunctionType | MethodType)
    return reads(function.__code__).literals if known else None


def names_of(code: CodeType) -> tuple[str, ...] | None:
    """List the global names that code looks up; None if it may do more than that."""
    found = reads(code)
    return None if found.is_opaque else found.names


def reads(code: CodeType) -> Reads:
    """List the names that code looks up, including nested functions; once while the code lives."""
    number = id(code)
    known = _reads.get(number)
    if known is not None and known[0]() is code:
        return known[1]
    found = _read(code)
    _reads[number] = ref(code, lambda _: _reads.pop(number, None)), found
    return found


def _read(code: CodeType) -> Reads:
    try:
        written = marshal.dumps(code)
    except ValueError:  # a constant is an object of the caller
        return Reads((), frozenset(), True, b"", frozenset())
    inner = [reads(x) for x in code.co_consts if isinstance(x, CodeType)]
    found = [(x.opname, x.argval) for x in dis.get_instructions(code)]
    names = {x for op, x in found if op in _LOADS}.union(*(x.names for x in inner))
    attributes = frozenset(x for op, x in found if op.endswith(_ATTRIBUTES))
    attributes = attributes.union(*(x.attributes for x in inner))
    imported = [sys.modules.get(x) for op, x in found if op == "IMPORT_NAME"]
    is_opaque = (
        any(x.is_opaque for x in inner)
        or any(not _has_fixed(x, attributes) for x in imported)
        or any(name.startswith("__") for name in attributes)
        or any(op in _WRITES for op, _ in found)
        or any(op in _WRITES_CELLS and x in code.co_freevars for op, x in found)
    )
    digest = hashlib.sha256(written).digest()
    loaded = (x for op, x in found if op.startswith("LOAD_"))
    literals = frozenset(y for x in loaded for y in (x if type(x) is tuple else (x,)))
    numbers = frozenset(x for x in literals if type(x) in (int, float))
    numbers = numbers.union(*(x.literals for x in inner))
    return Reads(tuple(sorted(names)), attributes, is_opaque, digest, numbers)
