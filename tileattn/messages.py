"""What a caller calls an argument: messages of the library have the names that its caller gave."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_names: ContextVar[Mapping[str, str] | None] = ContextVar("tileattn_argument_names", default=None)


def called(name: str) -> str:
    """Give the caller's name for an argument of the library."""
    return (_names.get() or {}).get(name, name)


@contextmanager
def calling(names: Mapping[str, str]) -> Iterator[None]:
    """Have messages name arguments as a caller does, in a block of this thread."""
    token = _names.set({**(_names.get() or {}), **names})
    try:
        yield
    finally:
        _names.reset(token)
