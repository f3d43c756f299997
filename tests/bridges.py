"""Calls of the bridges to PyTorch and JAX with NumPy arrays."""

from typing import Any

import numpy as np


def on_jax(**call: Any) -> Any:
    from tileattn.jax import attention  # JAX takes long to import

    return attention(**call)


def on_jax_traced(**call: Any) -> Any:
    """Trace a call, without running it: arrays among the options stay NumPy's."""
    import jax

    rows = [call.pop(name) for name in "qkv"]
    return jax.eval_shape(lambda *x: on_jax(**dict(zip("qkv", x, strict=True)), **call), *rows)


def on_torch(**call: Any) -> Any:
    """Make a call on tensors; arrays that cannot be tensors stay NumPy's."""
    from tileattn.torch import attention  # PyTorch takes long to import

    return attention(**{name: _tensors(x) for name, x in call.items()})


def cascade_on_torch(**call: Any) -> Any:
    """Make a call of ``cascade`` on tensors, as `on_torch`."""
    from tileattn.torch import cascade

    return cascade(**{name: _tensors(x) for name, x in call.items()})


def cascade_on_jax(**call: Any) -> Any:
    from tileattn.jax import cascade

    return cascade(**call)


def _tensors(x: Any) -> Any:
    import torch

    if type(x) is tuple and any(isinstance(y, np.ndarray) for y in x):
        return tuple(map(_tensors, x))
    try:
        return torch.from_numpy(x.copy()) if type(x) is np.ndarray else x
    except (TypeError, ValueError):  # objects, or bytes in another order
        return x
