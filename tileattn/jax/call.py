"""What of a call is part of the compiled program, checked when it is traced."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from tileattn.expressions.functions import read_functions
from tileattn.problem import Problem, check_names, parse

Arrays = dict[str, Any]
"""Arrays by their names; ``aux`` is a tuple of them."""

ARRAYS = frozenset(
    (
        *("alibi_slopes", "bias", "mask", "tree_mask", "sinks", "aux"),
        *("kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "block_table", "origin"),
    )
)
"""Options that may be traced."""

GRADIENTS = frozenset(("q", "k", "v", "bias", "sinks", "aux"))
"""Arrays that have a gradient."""


@dataclass(frozen=True, slots=True)
class Call:
    """The options that are not arrays: equal ones share a compiled program.

    Functions among them are expressions, so that nothing of the caller's lives on in a program.
    """

    backend: str
    options: tuple[tuple[str, Any], ...]
    out: tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype
    lse: tuple[tuple[int, ...], np.dtype[Any]]


def arrays_of(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Arrays:
    """Give the arrays of a call by their names, as JAX's."""
    arrays: Arrays = {"q": q, "k": k, "v": v}
    arrays |= {name: options[name] for name in ARRAYS & options.keys() if options[name] is not None}
    for name, x in arrays.items():
        arrays[name] = tuple(map(jax.numpy.asarray, x)) if name == "aux" else jax.numpy.asarray(x)
    return arrays


def call_of(arrays: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> Call:
    """Check a call by what is known of its arrays: shapes and dtypes."""
    check_names(options)
    for name, x in options.items():
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{name} is traced, and it is part of the compiled program; a value of Python is "
                f"accepted: close over it, or name it in static_argnames of jax.jit"
            )
    fixed = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    known = dict(arrays)
    known["aux"] = tuple(map(_stand_in, known.get("aux", ())))
    known = {name: x if name == "aux" else _array(name, x, arrays) for name, x in known.items()}
    fixed = read_functions(fixed, known["aux"])
    q, k, v = (known.pop(name) for name in "qkv")
    problem: Problem = parse(q, k, v, fixed | known)[0]
    rows = arrays["q"].shape[:-1]
    given = tuple(sorted(fixed.items()))
    try:
        hash(given)
    except TypeError:
        unusual = next(name for name, x in given if getattr(x, "__hash__", None) is None)
        raise TypeError(
            f"{unusual} is {type(fixed[unusual]).__name__}, which cannot be hashed"
        ) from None
    out = (*rows, arrays["v"].shape[-1]), problem.dtype
    return Call(backend, given, out, (rows, problem.accum_dtype))


def _stand_in(x: Any) -> NDArray[Any]:
    """Make an array of the same shape and dtype, without memory of its own."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _array(name: str, x: Any, arrays: Mapping[str, Any]) -> Any:
    """Stand in for an array; integers whose values are checked have some that are right."""
    if name.startswith("cu_seqlens") and x.ndim == 1 and x.size:
        total = arrays["q" if name.endswith("q") else "k"].shape[-2]
        return np.append(np.zeros(x.size - 1, x.dtype), np.array([total], x.dtype))
    return _stand_in(x)
