"""Exact attention on JAX arrays, differentiable, under ``jit``, ``grad``, ``vmap``, ``shard_map``.

The extra ``jax`` installs what it needs. ``import tileattn`` does not load JAX.
"""

try:
    import jax as _jax  # noqa: F401 - to say what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("tileattn.jax needs JAX: pip install jax") from error

from tileattn.jax.cascading import cascade
from tileattn.jax.distributed import ring_attention
from tileattn.jax.functional import attention

__all__ = ["attention", "cascade", "ring_attention"]
