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
        call = self.call

        def on_host(given: Any) -> Any:
            q, k, v, others = _numpy(given)
            return tuple(
                tileattn.forward(q, k, v, backend=call.backend, **dict(call.options), **others)
            )

        shapes = tuple(jax.ShapeDtypeStruct(*x) for x in (call.out, call.lse))
        return called(on_host, shapes, arrays)  # type: ignore[no-any-return,unused-ignore]  # JAX is untyped here

    def backward(
        self, arrays: Arrays, out: Any, lse: Any, dout: Any, dlse: Any, wanted: frozenset[str]
    ) -> Mapping[str, Any]:
        """Compute the gradients that are wanted, by the names of their arrays."""
        call, names = self.call, sorted(wanted)
        if not names:
            return {}

        def on_host(given: Any, *rest: Any) -> Any:
            q, k, v, others = _numpy(given)
            out, lse, dout, *dlse = map(np.asarray, rest)
            more: dict[str, Any] = {
                "dlse": dlse[0] if dlse else None,
                "wrt": tuple(names),
                "backend": call.backend,
            }
            options = more | dict(call.options) | others
            grads = tileattn.backward(dout, q, k, v, out, lse, **options)
            return {name: _whole(given[name], getattr(grads, f"d{name}")) for name in names}

        shapes = {
            name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays[name])
            for name in names
        }
        rest = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
        result: Mapping[str, Any] = called(on_host, shapes, arrays, *rest)
        return result


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
