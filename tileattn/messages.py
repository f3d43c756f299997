"""Argument names in messages: a bridge's callers see the names of their own arguments."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_names: ContextVar[Mapping[str, str] | None] = ContextVar("tileattn_argument_names", default=None)


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
