"""The form of error messages, with the argument names of the caller's library."""

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

_names: ContextVar[Mapping[str, str] | None] = ContextVar("tileattn_argument_names", default=None)

_LONGEST = 200  # bits of an integer that a message writes out
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 80


def called(name: str) -> str:
    """Return the caller's name for an argument of the library."""
    return (_names.get() or {}).get(name, name)


@contextmanager
def calling(names: Mapping[str, str]) -> Iterator[None]:
    """Translate argument names in the messages of a ``with`` block, in this thread."""
    token = _names.set({**(_names.get() or {}), **names})
    try:
        yield
    finally:
        _names.reset(token)


def must_be(name: str, what: str, x: Any, remedy: str = "") -> str:
    """Write the message for an argument that is not what it must be."""
    return f"{called(name)} must be {what}; got {shown(x)}" + (f" ({remedy})" if remedy else "")


def shown(x: Any) -> str:
    """Describe an argument: a plain value by itself, an array by its dtype and shape."""
    if isinstance(x, int) and x.bit_length() > _LONGEST:
        return f"an integer of {x.bit_length()} bits"
    if isinstance(x, bool | int | float | complex | str | bytes | np.generic | None):
        return _brief.repr(x)
    if isinstance(x, tuple | list | dict | set | frozenset):
        return " ".join(_brief.repr(x).split())
    kind = x if isinstance(x, type) else type(x)
    named = kind.__qualname__
    if kind.__module__ != "builtins":
        named = f"{kind.__module__}.{named}"
    if kind is x:
        return f"the class {named}"
    nested = getattr(x, "is_nested", False)  # PyTorch's nested tensors have no shape
    if hasattr(x, "dtype") and not nested and hasattr(x, "shape"):
        shape = tuple(x.shape) if isinstance(x.shape, tuple) else x.shape  # also of PyTorch
        return f"{named} of dtype {x.dtype} and shape {shape}"
    return f"an object of type {named}"
