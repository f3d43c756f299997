"""Validation of quantised keys and values: caches of 8 bits, and their descales."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tileattn.call.options import DESCALES
from tileattn.call.sequences import Places
from tileattn.dtypes import CACHE_DTYPES, FLOAT32, QUERY_DTYPES, one_of
from tileattn.errors import UnsupportedError
from tileattn.messages import called, must_be
from tileattn.validation import real, require_array

_LARGEST = float(np.finfo(np.float32).max)
_NUMBER = "a number from 0 to the largest of float32"


def cache_dtype(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> np.dtype[Any] | None:
    """Validate the dtypes of a call with quantised keys and values; return None without these."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_array(name, x)
    given = [name for name in DESCALES if options.get(name) is not None]
    if k.dtype not in CACHE_DTYPES:
        if v.dtype in CACHE_DTYPES:
            raise TypeError(
                f"{called('v')} must have the dtype of {called('k')}, {k.dtype}; got {v.dtype}"
            )
        for name in given:
            raise ValueError(
                f"{called(name)} must be None with {called('k')} of dtype {k.dtype}; it goes with "
                f"{one_of(CACHE_DTYPES)}"
            )
        return None
    if v.dtype != k.dtype:
        raise TypeError(
            f"{called('v')} must have the dtype of {called('k')}, {k.dtype}; got {v.dtype}"
        )
    if q.dtype not in QUERY_DTYPES:
        raise TypeError(
            f"{called('q')} must have dtype {one_of(QUERY_DTYPES)} with {called('k')} of dtype "
            f"{k.dtype}; got {q.dtype}"
        )
    for name in DESCALES:
        if name not in given:
            raise ValueError(
                f"{called(name)} must be given with {called('k')} of dtype {k.dtype}; got None"
            )
    found: np.dtype[Any] = k.dtype
    return found


def descale_arrays(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the descales that are arrays of q's library: all but numbers."""
    given = {name: options[name] for name in DESCALES if options.get(name) is not None}
    return {name: x for name, x in given.items() if not _is_number(x)}


def token_descales(
    k: Any, v: Any, options: Mapping[str, Any], entries: int, *, paged: bool
) -> frozenset[str]:
    """Validate the dtypes and shapes of descales; return the names of those with a number a token.

    A shape that fits both ways has a number for each token.
    """
    found = []
    for name, rows in zip(DESCALES, (k, v), strict=True):
        x = options[name]
        if _is_number(x):
            continue
        require_array(name, x)
        if x.dtype != FLOAT32:
            raise TypeError(f"{called(name)} must have dtype float32; got {x.dtype}")
        heads = rows.shape[-3] if rows.ndim > 2 else 1
        of_tokens = tuple(rows.shape[:-1])
        shapes = {
            "()": (),
            "(Hkv,)": (heads,),
            "(B, Hkv)": (entries, heads),
            "(pages, Hkv, page)" if paged else "one for each token": of_tokens,
        }
        if x.shape not in shapes.values():
            fitting = ", ".join(f"{what} = {shape}" for what, shape in shapes.items() if shape)
            raise ValueError(
                f"{called(name)} must be a number or have shape {fitting}; got {x.shape}"
            )
        if x.shape == of_tokens:
            found.append(name)
    return frozenset(found)


def bring_descale(name: str, x: Any, q: Any, rows: Any, places: Places) -> Any:
    """View a valid descale with three axes, as `tileattn.call.problem.Operands` has it.

    A number becomes an array on the device of q. Descales of heads that are on the host must be
    finite and not negative. Descales of tokens are not read: rows of a cache may be unfilled.
    """
    if x is None:
        return None
    if not _is_number(x) and x.shape == rows.shape[:-1]:
        return x.reshape((1,) * (3 - x.ndim) + x.shape)
    if _is_number(x):
        x = np.asarray(_number(name, x), np.float32, like=q)
    elif isinstance(x, np.ndarray):
        _check_values(name, x)
    heads = rows.shape[-3] if rows.ndim > 2 else 1
    entries = q.shape[0] if q.ndim == 4 else 1
    if places.packing is not None:
        entries = places.packing.sizes[0]
    axes = (*(1,) * (2 - x.ndim), *x.shape, 1)
    return np.broadcast_to(x.reshape(axes), (entries, heads, 1))


def refuse_descales(call: str, options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for quantised keys and values, which have no gradients."""
    for name in DESCALES:
        if options.get(name) is not None:
            raise UnsupportedError(
                f"{call} does not support {called(name)}: caches of 8 bits have no gradients; "
                f"multiply {called('k')} and {called('v')} by their descales, and pass these "
                f"products in the dtype of {called('q')}"
            )


def _is_number(x: Any) -> bool:
    """Return True for a Python number, a NumPy scalar, or an array of NumPy without axes."""
    return isinstance(x, int | float | np.generic) or (isinstance(x, np.ndarray) and not x.shape)


def _number(name: str, x: Any) -> float:
    """Return a valid number for all heads."""
    value = real(name, x, _NUMBER)
    if not 0 <= value <= _LARGEST:
        raise ValueError(must_be(name, _NUMBER, x))
    return value


def _check_values(name: str, x: Any) -> None:
    """Raise ValueError if an array on the host has a number that is negative or not finite."""
    for wrong in x[~((x >= 0) & (x <= _LARGEST))].flat:
        raise ValueError(
            f"{called(name)} must hold finite numbers that are not negative; got {wrong}"
        )
