"""The differentiation rule that calls on one device and on a ring share."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tileattn.call.descale import refuse_descales
from tileattn.call.options import ARRAYS, DESCALES, DIFFERENTIABLE
from tileattn.errors import UnsupportedError
from tileattn.jax.arrays import Arrays
from tileattn.jax.partition import sharded_as

_WITHOUT_GRADIENT = {*ARRAYS, *DESCALES} - {*DIFFERENTIABLE}


class Passes(Protocol):
    """Both passes of a call; hashable, and equal if they may share a compiled program."""

    def forward(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Compute the output and the logsumexp."""

    def backward(
        self, arrays: Arrays, out: Any, lse: Any, dout: Any, dlse: Any, wanted: frozenset[str]
    ) -> Mapping[str, Any]:
        """Compute the wanted gradients; return them by the names of their arrays."""


def differentiable(passes: Passes, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Compute the output and the logsumexp; both have gradients.

    JAX's rule for gradients takes longer than a short call, so calls on plain arrays go without.
    """
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))
    return _with_rule(passes, arrays) if is_traced else passes.forward(arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_rule(passes: Passes, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    return passes.forward(arrays)


def _forward(passes: Passes, primals: Any) -> Any:
    """Run the forward pass; ``perturbed`` of a primal is True if its gradient is wanted."""
    for name in primals.keys() & _WITHOUT_GRADIENT:
        if primals[name].perturbed:
            raise UnsupportedError(
                f"{name} must not be differentiated: it has no gradient; "
                f"jax.lax.stop_gradient({name}) treats it as a constant"
            )
    arrays = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
    wanted = {
        name
        for name in primals.keys() & DIFFERENTIABLE
        if any(x.perturbed for x in jax.tree.leaves(primals[name], is_leaf=_is_primal))
    }
    if wanted:
        refuse_descales("jax.grad", arrays)
    out, lse = passes.forward(arrays)
    return (out, lse), (arrays, out, lse, _Static(frozenset(wanted)))


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(passes: Passes, residuals: Any, cotangents: Any) -> tuple[Mapping[str, Any]]:
    arrays, out, lse, static = residuals
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jax.numpy.zeros_like(out)
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    found = passes.backward(arrays, out, lse, dout, dlse, static.names)
    return (
        {
            name: tuple(map(_gradient, x, found.get(name, (None,) * len(x))))
            if name == "aux"
            else _gradient(x, found.get(name))
            for name, x in arrays.items()
        },
    )


def _gradient(x: jax.Array, found: Any) -> Any:
    """Return a gradient in JAX's form: zeros if there is none, float0 for integers."""
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jax.numpy.zeros_like(x) if found is None else sharded_as(x, found)


@jax.tree_util.register_static
class _Static:
    """Names among the residuals, which must be arrays or static."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


_with_rule.defvjp(_forward, _backward, symbolic_zeros=True)
