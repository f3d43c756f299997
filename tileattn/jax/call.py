"""The static part of a call: it is checked while JAX traces, and compiled into the program."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from tileattn.backends.registry import check_name
from tileattn.call.options import DESCALES, INTEGERS, NUMBERS
from tileattn.call.parse import check_names, parse
from tileattn.call.problem import Problem
from tileattn.call.window import window_of
from tileattn.expressions.functions import read_functions
from tileattn.jax import numbers
from tileattn.jax.arrays import TRACED, holds_arrays_of_jax


@dataclass(frozen=True, slots=True)
class Call:
    """The options that are not arrays; equal calls share a compiled program.

    Functions are expressions, so that a compiled program keeps no object of the caller alive.
    """

    backend: str
    options: tuple[tuple[str, Any], ...]
    out: tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype
    lse: tuple[tuple[int, ...], np.dtype[Any]]

    def split(self) -> tuple["Call", bytes]:
        """Return the kind of this call, which is a call with other numbers, and its numbers."""
        options, given = numbers.split(self.options)
        return replace(self, options=options), given

    def at(self, given: bytes) -> "Call":
        """Return the call of this kind with the given numbers."""
        return replace(self, options=numbers.joined(self.options, given))


def call_of(arrays: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> Call:
    """Check a call by the shapes and dtypes of its arrays, and by integers on the host."""
    check_names(options)
    check_name(backend)
    traced = TRACED | arrays.keys()
    fixed = {name: _fixed(name, x) for name, x in options.items() if name not in traced}
    known = dict(arrays)
    known["aux"] = tuple(map(_stand_in, known.get("aux", ())))
    known = {name: x if name == "aux" else _array(name, x, arrays) for name, x in known.items()}
    fixed = read_functions(fixed, known["aux"])
    integers = {name: options[name] for name in arrays.keys() & INTEGERS}
    if not any(map(holds_arrays_of_jax, integers.values())):
        known |= integers
    descales = {name: options[name] for name in arrays.keys() & DESCALES}
    known |= {name: x for name, x in descales.items() if not holds_arrays_of_jax(x)}
    q, k, v = (known.pop(name) for name in "qkv")
    problem: Problem = parse(q, k, v, fixed | known)[0]
    rows = arrays["q"].shape[:-1]
    given = tuple((name, _plain(name, x, problem)) for name, x in sorted(fixed.items()))
    out = (*rows, arrays["v"].shape[-1]), problem.dtype
    return Call(backend, given, out, (rows, problem.accum_dtype))


def _fixed(name: str, x: Any) -> Any:
    """Return an option that is compiled into the program; a number may be a JAX array."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a Python value: it is compiled into the program; got a traced array "
            "(close over the value, or name it in static_argnames of jax.jit)"
        )
    in_array = name in NUMBERS and isinstance(x, jax.Array) and isinstance(x.dtype, np.dtype)
    return np.asarray(x) if in_array else x


def _plain(name: str, x: Any, problem: Problem) -> Any:
    """Convert a valid option to a value that can be hashed."""
    if x is None:
        return None
    if name in NUMBERS:
        return getattr(problem, name)
    return window_of(x, causal=False) if name == "window" else x


def _stand_in(x: Any) -> NDArray[Any]:
    """Make a NumPy array of the same shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _array(name: str, x: Any, arrays: Mapping[str, Any]) -> Any:
    """Stand in for an array; stand-ins of offsets are valid, because their values are checked."""
    rows = arrays["q" if name.endswith("q") else "k"]
    if name.startswith("cu_seqlens") and x.ndim == 1 and x.size and rows.ndim > 1:
        total = rows.shape[-2]
        return np.append(np.zeros(x.size - 1, x.dtype), np.array([total], x.dtype))
    return _stand_in(x)
