"""Tensors as arrays and arrays as tensors, which share their memory."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.autograd import forward_ad

from tileattn.errors import UnsupportedError


def array_of(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a tensor on the CPU as an array."""
    x = x.detach()
    if x.dtype is torch.bfloat16:  # which NumPy does not know
        viewed: np.ndarray[Any, Any] = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return viewed
    array: np.ndarray[Any, Any] = x.numpy()
    return array


def tensor_of(x: np.ndarray[Any, Any]) -> torch.Tensor:
    """View an array as a tensor."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def check_tensor(name: str, x: Any, device: torch.device | None = None) -> None:
    """Raise an error if an argument is no dense tensor on the CPU, where all of a call must be."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} is {type(x).__name__}; a torch.Tensor is accepted "
            f"(torch.as_tensor({name}) makes one)"
        )
    if not torch.compiler.is_compiling() and _is_transformed(x):
        raise UnsupportedError(
            f"{name} is a tensor of torch.func or of forward-mode differentiation; gradients by "
            "backward() and torch.autograd.grad are accepted"
        )
    if x.is_nested:
        raise UnsupportedError(
            f"{name} is a nested tensor; {name}.values() with cu_seqlens_q= is accepted"
        )
    if x.layout is not torch.strided:
        raise UnsupportedError(
            f"{name} has layout {x.layout}; dense tensors are accepted ({name}.to_dense() is one)"
        )
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}; it must be on the device of q, {device}")
    if x.device.type not in ("cpu", "meta"):
        raise UnsupportedError(
            f"{name} is on {x.device}; tensors on the CPU are accepted ({name}.cpu() is one; "
            "CuPy arrays run on a GPU)"
        )


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert to the dtype of autocast, where it is enabled, as PyTorch's own operators do."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    narrow = (x.is_floating_point() and x.dtype is not torch.float64 for x in tensors)
    return tuple(x.to(dtype) if n else x for x, n in zip(tensors, narrow, strict=True))


def _is_transformed(x: torch.Tensor) -> bool:
    """Whether derivatives are taken that pass by the operators' own."""
    if torch._C._are_functorch_transforms_active() and torch._C._functorch.is_gradtrackingtensor(x):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
