"""Calls of the library from a compiled program of the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import tileattn
from tileattn.jax.call import Arrays, Call
from tileattn.jax.host_call import called


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Both passes of a call, by one callback each."""

    call: Call

    def forward(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Compute the output and the logsumexp."""
        shapes = tuple(jax.ShapeDtypeStruct(*x) for x in (self.call.out, self.call.lse))
        out, lse = called(_Forward(self.call), shapes, arrays)
        return out, lse

    def backward(
        self, arrays: Arrays, out: Any, lse: Any, dout: Any, dlse: Any, wanted: frozenset[str]
    ) -> Mapping[str, Any]:
        """Compute the gradients that are wanted, by the names of their arrays."""
        names = tuple(sorted(wanted))
        if not names:
            return {}
        shapes = {
            name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays[name])
            for name in names
        }
        rest = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
        result: Mapping[str, Any] = called(_Backward(self.call, names), shapes, arrays, *rest)
        return result


@dataclass(frozen=True, slots=True)
class _Forward:
    call: Call

    def __call__(self, given: Any) -> Any:
        q, k, v, others = _numpy(given)
        options = dict(self.call.options) | others
        return tuple(tileattn.forward(q, k, v, backend=self.call.backend, **options))


@dataclass(frozen=True, slots=True)
class _Backward:
    call: Call
    names: tuple[str, ...]

    def __call__(self, given: Any, *rest: Any) -> Any:
        q, k, v, others = _numpy(given)
        out, lse, dout, *dlse = map(np.asarray, rest)
        more: dict[str, Any] = {
            "dlse": dlse[0] if dlse else None,
            "wrt": self.names,
            "backend": self.call.backend,
        }
        options = more | dict(self.call.options) | others
        grads = tileattn.backward(dout, q, k, v, out, lse, **options)
        return {name: _whole(given[name], getattr(grads, f"d{name}")) for name in self.names}


def _numpy(given: Arrays) -> tuple[Any, Any, Any, dict[str, Any]]:
    """View the arrays of a call as NumPy's: q, k, v and the options."""
    arrays = jax.tree.map(np.asarray, given)
    q, k, v = (arrays.pop(name) for name in "qkv")
    return q, k, v, arrays


def _whole(x: Any, found: Any) -> Any:
    """Fill in zeros where arrays of ``aux`` have no gradient."""
    if isinstance(x, tuple):
        return tuple(
            np.zeros(y.shape, y.dtype) if dy is None else dy for y, dy in zip(x, found, strict=True)
        )
    return found
