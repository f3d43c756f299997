"""Validation of quantised keys and values: caches of 8 bits, and their descales."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.call.options import DESCALES
from tileattn.call.sequences import Places
from tileattn.dtypes import CACHE_DTYPES, FLOAT32, QUERY_DTYPES, one_of
from tileattn.errors import UnsupportedError
from tileattn.messages import called, must_be
from tileattn.validation import real, require_array

DESCALE_AXES = 2
"""Most axes of a descale with a number for each head."""

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
    """Validate the descales of a call; return the names that have a number for each token."""
    of_tokens = []
    for name, own, rows in zip(DESCALES, "kv", (k, v), strict=True):
        layout = "(pages, Hkv, page)" if paged else f"{called(own)}.shape[:-1]"
        if is_of_tokens(name, options[name], rows.shape, entries, layout):
            of_tokens.append(name)
    return frozenset(of_tokens)


def is_of_tokens(name: str, x: Any, rows: Sequence[int], entries: int, layout: str) -> bool:
    """Validate the dtype and shape of a descale; return True if it has a number for each token.

    ``rows`` is the shape of k or v, and ``layout`` names its leading axes. A shape that fits heads
    and tokens has a number for each token.
    """
    if _is_number(x):
        return False
    require_array(name, x)
    if x.dtype != FLOAT32:
        raise TypeError(f"{called(name)} must have dtype float32; got {x.dtype}")
    heads, tokens = _heads(rows), tuple(rows[:-1])
    if x.shape not in ((), (heads,), (entries, heads), tokens):
        raise ValueError(
            f"{called(name)} must be a number, or have shape (Hkv,) = {(heads,)}, (B, Hkv) = "
            f"{(entries, heads)} or {layout} = {tokens}; got {x.shape}"
        )
    return bool(x.shape == tokens)


def descale_of_heads(name: str, x: Any, entries: int, heads: int, like: Any) -> Any:
    """View a valid descale as (entries, Hkv, 1), on the device of ``like``.

    Numbers on the host must be finite and not negative.
    """
    if _is_number(x):
        # A graph of a GPU replays kernels, but not a copy from the host.
        number = descale_number(name, x)
        x = np.empty_like(like, np.float32, shape=1)
        x.fill(number)
    elif isinstance(x, np.ndarray):
        _check_values(name, x)
    axes = (*(1,) * (2 - x.ndim), *x.shape, 1)
    return np.broadcast_to(x.reshape(axes), (entries, heads, 1))


def bring_descale(name: str, x: Any, q: Any, rows: Any, places: Places) -> Any:
    """View a valid descale with three axes, as `tileattn.call.problem.Operands` has it.

    The values of descales of tokens are not validated: rows of a cache may be unfilled.
    """
    if x is None:
        return None
    if not _is_number(x) and x.shape == rows.shape[:-1]:
        return x.reshape((1,) * (3 - x.ndim) + x.shape)
    entries = q.shape[0] if q.ndim == 4 else 1
    if places.packing is not None:
        entries = places.packing.sizes[0]
    return descale_of_heads(name, x, entries, _heads(rows.shape), q)


def refuse_descales(call: str, options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for quantised keys and values, which have no gradients."""
    given = [called(name) for name in DESCALES if options.get(name) is not None]
    if given:
        raise UnsupportedError(
            f"{call} does not support {' and '.join(given)}: caches of 8 bits have no gradients; "
            f"multiply {called('k')} and {called('v')} by their descales, and pass the products "
            f"in the dtype of {called('q')}"
        )


def _is_number(x: Any) -> bool:
    """Return True for a Python number, a NumPy scalar, or an array of NumPy without axes."""
    return isinstance(x, int | float | np.generic) or (isinstance(x, np.ndarray) and not x.shape)


def _heads(rows: Sequence[int]) -> int:
    return rows[-3] if len(rows) > 2 else 1


def descale_number(name: str, x: Any) -> float:
    """Return a valid descale that holds for all heads."""
    value = real(name, x, _NUMBER)
    if not 0 <= value <= _LARGEST:
        raise ValueError(must_be(name, _NUMBER, x))
    return value


def holds_descales(x: NDArray[Any]) -> bool:
    """Return True if all numbers of an array on the host are finite and not negative."""
    return bool(x.dtype == FLOAT32 and ((x >= 0) & (x <= _LARGEST)).all())


def _check_values(name: str, x: NDArray[Any]) -> None:
    """Raise ValueError if an array on the host has a number that is negative or not finite."""
    for wrong in x[~((x >= 0) & (x <= _LARGEST))].flat:
        raise ValueError(
            f"{called(name)} must hold finite numbers that are not negative; got {wrong}"
        )
