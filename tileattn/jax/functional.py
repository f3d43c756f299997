"""The call on JAX arrays, and its rule of differentiation."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tileattn.errors import UnsupportedError
from tileattn.jax import callbacks
from tileattn.jax.call import ARRAYS, GRADIENTS, Arrays, Call, call_of
from tileattn.results import Attention


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Exact attention on JAX arrays, differentiable in q, k, v, bias, sinks and aux.

    Parameters
    ----------
    q : jax.Array, shape (B, Hq, Nq, D), (Hq, Nq, D) or (Nq, D)
        Queries; float16, bfloat16, float32 or float64, on the CPU.
    k : jax.Array, shape (B, Hkv, Nk, D), (Hkv, Nk, D) or (Nk, D)
        Keys.
    v : jax.Array, shape (B, Hkv, Nk, Dv), (Hkv, Nk, Dv) or (Nk, Dv)
        Values.
    return_lse : bool
        Return the logsumexp of each query, too; it is differentiable.
    backend : str
        As for ``tileattn.forward``.
    **options
        Those of ``tileattn.forward``. Arrays, lengths and offsets among them may be traced; the
        others are part of the compiled program.

    Returns
    -------
    jax.Array, shape (B, Hq, Nq, Dv), or Attention
        The output, or with ``return_lse`` the pair ``(out, lse)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it. Where it depends on values that
        are traced, the compiled program raises it.
    UnsupportedError
        If no backend supports the call, an array is on another device than a CPU, or the gradient
        of ``alibi_slopes`` is asked for.

    Notes
    -----
    The CPU's program calls back to the library, which reads and writes NumPy arrays. Only the
    gradients that are needed are computed. Under ``vmap`` there is a call for each element, all
    with the same seed.

    Examples
    --------
    >>> import jax
    >>> from tileattn.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 100, 32))
    >>> attention(q, k, v, causal=True).shape
    (2, 4, 100, 32)
    """
    arrays: Arrays = {"q": q, "k": k, "v": v}
    arrays |= {name: options[name] for name in ARRAYS & options.keys() if options[name] is not None}
    for name, x in arrays.items():
        arrays[name] = tuple(map(jax.numpy.asarray, x)) if name == "aux" else jax.numpy.asarray(x)
    call = call_of(arrays, backend, {n: x for n, x in options.items() if n not in ARRAYS})
    result = Attention(*_attention(call, arrays))
    return result if return_lse else result.out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    return callbacks.forward(call, arrays)


def _forward(call: Call, primals: Any) -> Any:
    """Compute both passes' common part; primals say which of them are differentiated."""
    if primals.get("alibi_slopes") is not None and primals["alibi_slopes"].perturbed:
        raise UnsupportedError(
            "the gradient of alibi_slopes is asked for, and there is none; "
            "jax.lax.stop_gradient(alibi_slopes) leaves it out"
        )
    arrays = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
    wanted = {
        name
        for name in GRADIENTS & primals.keys()
        if any(x.perturbed for x in jax.tree.leaves(primals[name], is_leaf=_is_primal))
    }
    out, lse = callbacks.forward(call, arrays)
    return (out, lse), (arrays, out, lse, _Static(frozenset(wanted)))


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(call: Call, residuals: Any, cotangents: Any) -> tuple[Mapping[str, Any]]:
    arrays, out, lse, static = residuals
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jax.numpy.zeros_like(out)
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    found = callbacks.backward(call, arrays, out, lse, dout, dlse, static.names)
    return (
        {
            name: tuple(map(_gradient, x, found.get(name, (None,) * len(x))))
            if name == "aux"
            else _gradient(x, found.get(name))
            for name, x in arrays.items()
        },
    )


def _gradient(x: jax.Array, found: Any) -> Any:
    """Give what JAX takes for a gradient: zeros where there is none, of no size for integers."""
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jax.numpy.zeros_like(x) if found is None else found


@jax.tree_util.register_static
class _Static:
    """Names that go with residuals."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
