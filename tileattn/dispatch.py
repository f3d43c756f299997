"""What was worked out for one call and holds for the next of the same signature."""

import os
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import numpy as np

from tileattn.algorithm.block_mask import BlockMask

MOST = 1024  # entries; a program has few shapes, or so many that none comes back

_VARIABLE = os.environ.encodekey("TILEATTN_BACKEND")
_PLAIN = frozenset({bool, int, float, str, type(None)})


class Memo(dict[Any, Any]):
    """A dictionary that is emptied when it is full; its single steps are safe among threads."""

    def keep(self, key: Any, value: Any) -> Any:
        """Enter a value, and return it."""
        if len(self) >= MOST:
            self.clear()
        self[key] = value
        return value


def _default() -> Any:
    """Look up ``TILEATTN_BACKEND``, which `get` takes a microsecond for where it is absent."""
    try:
        return os.environ._data.get(_VARIABLE)  # type: ignore[attr-defined]  # CPython's own
    except AttributeError:
        return os.environ.get("TILEATTN_BACKEND")


def signature(
    arrays: Iterable[Any], backend: Any, options: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Write down all that the validation of a call looks at, and the layout of its arrays.

    Parameters
    ----------
    arrays : iterable of array or None
        As many for each pass as it takes, absent ones as None.
    backend : str
        As the caller gave it.
    options : mapping
        As the caller gave them.

    Returns
    -------
    tuple or None
        Equal for calls of which both are valid or none is, and whose arrays have the same layout.
        None for arrays on the host, whose values are looked at, and for unusual arguments.
    """
    if type(backend) is not str:
        return None
    key: list[Any] = [backend, _default() if backend == "auto" else None]
    for x in arrays:
        kind = type(x)
        if isinstance(x, np.ndarray):
            return None
        try:
            key += (kind, x.dtype, x.shape, x.strides)
        except AttributeError:
            if x is not None:
                return None
            key.append(None)
    if not options:
        return tuple(key)
    for name, x in options.items():
        kind = type(x)
        key += (name, kind)
        if kind in _PLAIN or isinstance(x, np.generic):
            key.append(x)
        elif kind is tuple or kind is list:
            kinds = tuple(map(type, x))
            if not _PLAIN.issuperset(kinds):
                return None
            key += (kinds, *x)
        elif kind is BlockMask:
            key.append(ref(x))
        elif kind is np.ndarray and x.dtype.kind in "iu":
            key += (x.dtype, x.shape, x.tobytes())
        elif kind is np.ndarray or not getattr(x, "shape", None):
            return None  # a value without axes may be looked at, too
        else:
            key += (x.dtype, x.shape, getattr(x, "strides", None))
    return tuple(key)
