"""Tensors as arrays and arrays as tensors, which share their memory."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.autograd import forward_ad

from tileattn.call.options import INTEGERS, SEEDS, options_with
from tileattn.errors import UnsupportedError
from tileattn.messages import called
from tileattn.torch import cuda

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors whose elements are their memory, unless a bit of theirs says otherwise."""

torch.compiler.assume_constant_result(called)  # which compilers cannot look into
_ON_CPU = nullcontext()
_FLOATS = "float16, bfloat16, float32 or float64"
_DTYPES = frozenset(  # those that arrays have, too
    {torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}
    | {torch.complex128, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)
_EXPECTED = {
    **dict.fromkeys(options_with(value="array", role="mask"), "bool"),
    **dict.fromkeys((*INTEGERS, *SEEDS), "int32 or int64"),
    **dict.fromkeys(("attn_mask", *options_with(value="arrays")), f"bool, {_FLOATS}"),
}
# Where it is defined, and what to do: subclasses that are no tensors for the operators here.
_NO_MEMORY = (
    (
        *("torch.nn.attention.bias", "CausalBias"),
        "scaled_dot_product_attention takes one as attn_mask, and causal=True is the same "
        "(q_offset=0 aligns it at the upper left)",
    ),
    (
        *("torch.distributed.tensor", "DTensor"),
        "to_local() is the part of this rank, and distributed_attention takes the parts",
    ),
    (
        *("torch.nn.parameter", "UninitializedTensorMixin"),
        "materialize() or a first call of its module gives it memory",
    ),
)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Have the library compute where PyTorch would: on a GPU on its current stream."""
    return cuda.on_device(device) if device.type == "cuda" else _ON_CPU


def array_of(x: torch.Tensor) -> Any:
    """View a tensor as an array of NumPy's or, on a GPU, of CuPy's."""
    if not x.data_ptr() and x.numel():
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} must have memory; its storage has been freed"
        )
    if x.is_cuda:
        return cuda.array_of(x)
    x = x.detach()
    if x.dtype is torch.bfloat16:  # which NumPy does not know
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def tensor_of(x: Any) -> torch.Tensor:
    """View an array as a tensor; one of CuPy's comes from a call within `on`."""
    if not isinstance(x, np.ndarray):
        return cuda.tensor_of(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def check_tensor(
    name: str,
    x: Any,
    device: torch.device | None = None,
    kinds: Sequence[str] = ("cpu", "cuda", "meta"),
) -> None:
    """Raise an error if an argument is no dense tensor on such a device, or not on the one of q."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{called(name)} must be a torch.Tensor; got {type(x).__name__} "
            f"(torch.as_tensor({called(name)}) makes one)"
        )
    if type(x) not in PLAIN:
        _check_subclass(name, x)
    if not torch.compiler.is_compiling() and _is_transformed(x):
        raise UnsupportedError(
            f"{called(name)} is a tensor of torch.func or of forward-mode differentiation; "
            "gradients by "
            "backward() and torch.autograd.grad are accepted"
        )
    if x.is_nested:
        raise UnsupportedError(
            f"{called(name)} is a nested tensor; {called(name)}.values() with cu_seqlens_q= is "
            "accepted"
        )
    if x.layout is not torch.strided:
        raise UnsupportedError(
            f"{called(name)} must be a dense tensor; got layout {x.layout} "
            f"({called(name)}.to_dense() is one)"
        )
    if x.dtype not in _DTYPES:
        expected = _EXPECTED.get(name.partition("[")[0], _FLOATS)
        raise TypeError(f"{called(name)} must have dtype {expected}; got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(
            f"{called(name)} is on {x.device}; it must be on the device of {called('q')}, {device}"
        )
    if x.device.type not in kinds:
        on_gpu = " and on NVIDIA GPUs" if "cuda" in kinds else ""
        raise UnsupportedError(
            f"{called(name)} is on {x.device}; tensors on the CPU{on_gpu} are accepted "
            f"({called(name)}.cpu() is one)"
        )


def check_memory(name: str, x: torch.Tensor) -> None:
    """Raise UnsupportedError if a tensor is more than its memory, which alone will be read.

    PyTorch's operators see to what else there is.
    """
    if type(x) not in PLAIN:
        plain = f"{called(name)}.as_subclass(torch.Tensor)"
        raise UnsupportedError(
            f"{called(name)} must be a plain torch.Tensor; got {type(x).__name__} ({plain} is one, "
            "if "
            "its memory holds its elements)"
        )
    check_elements(name, x)


def check_elements(name: str, x: torch.Tensor) -> None:
    """Raise UnsupportedError if a tensor is a view whose elements are computed when it is read."""
    if x.is_neg() or x._is_zerotensor():
        raise UnsupportedError(
            f"{called(name)} must hold its elements in memory; got a view that negates or leaves "
            "out zeros "
            f"({called(name)} + 0 holds them)"
        )


def check_integers(name: str, x: Any, device: torch.device) -> None:
    """Raise an error if an argument is no dense tensor on the CPU or, a seed apart, where q is."""
    check_tensor(name, x)
    if x.device.type == "cpu" or (x.device == device and name not in SEEDS):
        return
    too = (
        ""
        if name in SEEDS or device.type == "cpu"
        else f" and on the device of {called('q')}, {device},"
    )
    raise ValueError(
        f"{called(name)} is on {x.device}; integers on the CPU{too} are accepted "
        f"({called(name)}.cpu() is a copy)"
    )


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert to the dtype of autocast, where it is enabled, as PyTorch's own operators do.

    What is no tensor stays as it is: who checks it names it.
    """
    enabled = torch._C._is_any_autocast_enabled()
    if not enabled or not all(isinstance(x, torch.Tensor) for x in tensors):
        return tensors
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    narrow = (x.is_floating_point() and x.dtype is not torch.float64 for x in tensors)
    return tuple(x.to(dtype) if n else x for x, n in zip(tensors, narrow, strict=True))


def is_kind(x: Any, module: str, name: str) -> bool:
    """Return True for an instance of a class; False if its module is not loaded."""
    return isinstance(x, getattr(sys.modules.get(module), name, ()))


def _check_subclass(name: str, x: Any) -> None:
    for module, kind, remedy in _NO_MEMORY:
        if is_kind(x, module, kind):
            raise UnsupportedError(
                f"{called(name)} must be a plain torch.Tensor; got {kind} ({remedy})"
            )


def _is_transformed(x: torch.Tensor) -> bool:
    """Return True for tensors of torch.func or of forward-mode differentiation."""
    if torch._C._are_functorch_transforms_active() and torch._C._functorch.is_gradtrackingtensor(x):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
