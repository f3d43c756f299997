"""Exact attention on JAX arrays, differentiable, under ``jit``, ``grad``, ``vmap`` and ``scan``.

``pip install 'tileattn[jax]'`` brings it. ``import tileattn`` does not load JAX.
"""

try:
    import jax as _jax  # noqa: F401 - to say what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("tileattn.jax needs JAX: pip install jax") from error

from tileattn.jax.functional import attention

__all__ = ["attention"]
