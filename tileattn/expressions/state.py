"""The state of a function: everything that it reads besides its parameters.

A function with known state is traced once for each state. Any other function is traced at each
call, because what it reads may have changed.
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
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

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


class Reads(NamedTuple):
    """The global names and the attributes that code looks up."""

    names: tuple[str, ...]
    attributes: frozenset[str]
    is_opaque: bool  # True if the code may look up more than that
    digest: bytes  # of the code


_reads: dict[int, tuple[Callable[[], CodeType | None], Reads]] = {}  # by ``id`` of living code


def state_of(function: Any) -> Hashable:
    """Return everything that a function reads besides its parameters; None if that is unknown.

    It is known of functions, and of partial functions, whose closure, globals and defaults hold
    numbers, strings, tuples of them, NumPy's functions, and functions of known state.
    """
    try:
        return _state(function, ())
    except _UnknownStateError:
        return None


def _state(x: Any, around: tuple[Any, ...]) -> Hashable:
    kind = type(x)
    if kind is float:
        return kind, x.hex()
    if kind in _PLAIN:
        return kind, x
    if kind is FunctionType:
        return _state_of_function(x, around)
    if kind is tuple:
        return tuple(_state(y, around) for y in x)
    if kind is partial and not x.__dict__:
        return kind, *(_state(y, around) for y in (x.func, x.args, *sorted(x.keywords.items())))
    if isinstance(x, np.generic) and x.dtype.type is kind and kind is not np.void:
        return x.dtype, x.tobytes()
    if is_fixed(x):
        return kind, x
    raise _UnknownStateError


def _state_of_function(x: FunctionType, around: tuple[Any, ...]) -> Hashable:
    for n, outer in enumerate(around):
        if x is outer:
            return "around", n
    found = reads(x.__code__)
    if found.is_opaque or x.__dict__:
        raise _UnknownStateError
    around = (*around, x)
    parts: list[Any] = [found.digest]
    for name in found.names:
        if name in x.__globals__:
            parts += (name, _state_of_variable(x.__globals__[name], around, found.attributes))
        elif name not in _BUILTINS or vars(builtins).get(name) is not _BUILTINS[name]:
            raise _UnknownStateError
    for cell in x.__closure__ or ():
        try:
            contents = cell.cell_contents
        except ValueError:  # not assigned yet
            raise _UnknownStateError from None
        parts.append(_state_of_variable(contents, around, found.attributes))
    if x.__defaults__ or x.__kwdefaults__:
        keywords = tuple(sorted((x.__kwdefaults__ or {}).items()))
        parts += (_state(x.__defaults__, around), _state(keywords, around))
    return tuple(parts)


def _state_of_variable(x: Any, around: tuple[Any, ...], attributes: frozenset[str]) -> Hashable:
    """Return the state of a variable of a function, which may be a module."""
    if type(x) is ModuleType and _has_fixed(x, attributes):
        return x
    return _state(x, around)


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
        return Reads((), frozenset(), True, b"")
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
    return Reads(tuple(sorted(names)), attributes, is_opaque, digest)
