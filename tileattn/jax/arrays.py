"""Check the arrays of a call, and convert them to JAX arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tileattn.call.descale import descale_number
from tileattn.call.options import ARRAYS, DESCALES, INTEGERS, ROWS, SEEDS, options_with
from tileattn.call.parse import aux_arrays
from tileattn.call.sequences import as_integers
from tileattn.messages import must_be
from tileattn.validation import refuse_masked

Arrays = dict[str, Any]
"""Arrays by name; ``aux`` is a tuple of arrays."""

TRACED = frozenset((*ARRAYS, *DESCALES, *INTEGERS, *options_with(value="arrays")))
"""Options that may be traced; a seed may be, too, if it is an array of JAX."""

_INTEGERS = "an integer, or a sequence or JAX or NumPy array of integers"
_ARRAY = "a JAX or NumPy array"
_NUMPY = np.ndarray | np.generic


def arrays_of(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Arrays:
    """Convert the arrays of a call to JAX arrays; return them by name."""
    given = dict(zip(ROWS, (q, k, v), strict=True))
    given |= {name: x for name, x in options.items() if name in TRACED and x is not None}
    given |= {name: options[name] for name in SEEDS if holds_arrays_of_jax(options.get(name))}
    numbers = ((name, given.get(name)) for name in DESCALES)
    given |= {
        name: np.float32(descale_number(name, x)) for name, x in numbers if type(x) in (int, float)
    }
    return {
        name: tuple(array_of(*named) for named in aux_arrays(options).items())
        if name == "aux"
        else (integers_of if name in INTEGERS else array_of)(name, x)
        for name, x in given.items()
    }


def holds_arrays_of_jax(x: Any) -> bool:
    """Return True for a JAX array, traced or not, and for a sequence that contains one."""
    if isinstance(x, list | tuple):
        return any(map(holds_arrays_of_jax, x))
    return isinstance(x, jax.Array) or (
        hasattr(type(x), "__jax_array__") and not isinstance(x, type)
    )


def integers_of(name: str, x: Any) -> jax.Array:
    """Convert integers to a JAX array."""
    found = x if holds_arrays_of_jax(x) else integers_on_host(name, x)
    return _converted(name, found, _INTEGERS)


def integers_on_host(name: str, x: Any) -> Any:
    """Convert integers that are no JAX array to a NumPy array."""
    found = as_integers(name, x, _INTEGERS)
    if not isinstance(found, _NUMPY):
        raise TypeError(must_be(name, _INTEGERS, x))
    return found


def array_of(name: str, x: Any) -> jax.Array:
    """Convert an array to a JAX array."""
    refuse_masked(name, x)
    of_numpy = isinstance(x, _NUMPY) and not isinstance(x, np.matrix)
    if isinstance(x, list | tuple) or not (of_numpy or holds_arrays_of_jax(x)):
        raise TypeError(must_be(name, _ARRAY, x, f"jax.numpy.asarray({name}) makes one"))
    return _converted(name, x, _ARRAY)


def _converted(name: str, x: Any, what: str) -> jax.Array:
    """Make a JAX array; JAX cuts 64-bit integers to 32 bits by default, so they must fit."""
    if isinstance(x, jax.Array) and isinstance(x.dtype, np.dtype):
        return x
    try:
        # For NumPy arrays, jax.numpy.asarray compiles a program for each shape. device_put compiles
        # none, but may use the memory of its argument, which callers may overwrite.
        found = jax.device_put(np.array(x)) if isinstance(x, _NUMPY) else jax.numpy.asarray(x)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(must_be(name, what, x)) from None
    if not isinstance(found.dtype, np.dtype):  # JAX's keys of random numbers
        raise TypeError(must_be(name, what, x))
    if isinstance(x, _NUMPY) and x.dtype.kind in "iu" and x.dtype != found.dtype:
        values, limits = np.asarray(x), np.iinfo(found.dtype)
        for wrong in values[(values < limits.min) | (values > limits.max)].flat:
            raise ValueError(
                f"{name} must hold integers that fit in {found.dtype}, to which JAX converts "
                f"{x.dtype}; got {wrong} (jax.config.update('jax_enable_x64', True) keeps 64 bits)"
            )
    return found
