"""Tensors as arrays and arrays as tensors, which share their memory."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.autograd import forward_ad

from tileattn.call.options import DESCALES, INTEGERS, SEEDS, options_with
from tileattn.call.prepared import KnownKind, PreparedCall
from tileattn.errors import UnsupportedError
from tileattn.messages import called
from tileattn.torch import cuda

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors whose memory holds their elements, unless they are lazy views."""

torch.compiler.assume_constant_result(called)  # Dynamo cannot trace it
_ON_CPU = nullcontext()
_FLOATS = "float16, bfloat16, float32 or float64"
_DTYPES = frozenset(  # the dtypes that NumPy arrays have, too
    {torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}
    | {torch.complex128, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)
_QUANTISED = frozenset({"k", "v", "k_cache", "v_cache"})
"""Names of the tensors that may also have the dtype float8_e4m3fn."""

_EXPECTED = {
    **dict.fromkeys(DESCALES, "float32"),
    **dict.fromkeys(options_with(value="array", role="mask"), "bool"),
    **dict.fromkeys((*INTEGERS, *SEEDS), "int32 or int64"),
    **dict.fromkeys(("attn_mask", *options_with(value="arrays")), f"bool, {_FLOATS}"),
}
# Subclasses that the operators cannot read: module, class, and what to pass instead.
_WITHOUT_MEMORY = (
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
    """Make the library compute on a device; on a GPU, on PyTorch's current stream."""
    return cuda.on_device(device) if device.type == "cuda" else _ON_CPU


def array_of(x: torch.Tensor) -> Any:
    """View a tensor as a NumPy array or, on a GPU, as a CuPy array."""
    if not x.data_ptr() and x.numel():
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} must have memory; its storage has been freed"
        )
    if x.is_cuda:
        return cuda.array_of(x)
    if x.dtype is torch.bfloat16:  # NumPy has no bfloat16 of its own
        return x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if x.dtype is torch.float8_e4m3fn:
        return x.detach().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return x.numpy(force=True)  # also of a tensor that requires a gradient


def tensor_of(x: Any) -> torch.Tensor:
    """View an array as a tensor; a CuPy array must come from a call within `on`."""
    if not isinstance(x, np.ndarray):
        return cuda.tensor_of(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def first_run(
    known: KnownKind, names: Sequence[str], tensors: Sequence[torch.Tensor], values: Any, *_: Any
) -> Any:
    """Run the forward pass of a known kind on the CPU, as `tileattn.torch.cuda.first_run`."""
    call: PreparedCall | None = known.call
    if call is None or call.backend is not known.able[0]:
        return None  # the preferred backend may support these numbers
    arrays = [array_of(x) for x in tensors]
    options = {**values, **dict(zip(names[3:], arrays[3:], strict=True))}
    found = call.first(known.kind, arrays[:3], options, None)
    return found and map(tensor_of, found)


def check_tensor(
    name: str,
    x: Any,
    device: torch.device | None = None,
    kinds: Sequence[str] = ("cpu", "cuda", "meta"),
    first: str = "q",
) -> None:
    """Raise an error unless an argument is a dense tensor on such a device, or on this one.

    ``first`` is the argument whose device this is.
    """
    own = called(name)
    if not isinstance(x, torch.Tensor):
        remedy = f"torch.as_tensor({own}) makes one"
        raise TypeError(_message(name, "a torch.Tensor", type(x).__name__, remedy))
    if type(x) not in PLAIN:
        _check_subclass(name, x)
    if not torch.compiler.is_compiling() and _is_transformed(x):
        got = "one of torch.func or of forward-mode differentiation"
        remedy = "backward() and torch.autograd.grad differentiate the call"
        raise UnsupportedError(_message(name, "a plain torch.Tensor", got, remedy))
    if x.is_nested:
        remedy = f"{own}.values() with cu_seqlens_q= is the same"
        raise UnsupportedError(_message(name, "a dense tensor", "a nested tensor", remedy))
    if x.layout is not torch.strided:
        remedy = f"{own}.to_dense() is one"
        raise UnsupportedError(_message(name, "a dense tensor", f"layout {x.layout}", remedy))
    if x.dtype not in _DTYPES and not (x.dtype is torch.float8_e4m3fn and name in _QUANTISED):
        expected = _EXPECTED.get(name.partition("[")[0], _FLOATS)
        raise TypeError(f"{own} must have dtype {expected}; got {x.dtype}")
    if device is not None and x.device != device:
        where = f"on the device of {called(first)}, {device}"
        raise ValueError(_message(name, where, f"a tensor on {x.device}"))
    if x.device.type not in kinds:
        where = "on the CPU or on an NVIDIA GPU" if "cuda" in kinds else "on the CPU"
        raise UnsupportedError(_wrong_place(name, where, x))


def check_memory(name: str, x: torch.Tensor) -> None:
    """Raise UnsupportedError unless a tensor's memory holds its elements.

    Calls through PyTorch's operators need no such check.
    """
    if type(x) not in PLAIN:
        plain = f"{called(name)}.as_subclass(torch.Tensor)"
        raise UnsupportedError(
            _message(
                name,
                "a plain torch.Tensor",
                type(x).__name__,
                f"{plain} is one, if its memory holds its elements",
            )
        )
    check_elements(name, x)


def check_elements(name: str, x: torch.Tensor) -> None:
    """Raise UnsupportedError if a tensor is a lazy view, whose elements are computed on reading."""
    if x.is_neg() or x._is_zerotensor():
        raise UnsupportedError(
            f"{called(name)} must hold its elements in memory; got a lazy negation or zero tensor "
            f"({called(name)} + 0 holds them)"
        )


def check_integers(name: str, x: Any, device: torch.device, first: str = "q") -> None:
    """Raise an error unless integers are a dense tensor on the CPU or, but for a seed, near q.

    ``first`` is the argument whose device is given, if that is not q.
    """
    check_tensor(name, x)
    on_cpu_only = name in SEEDS or device.type == "cpu"
    if x.device.type != "cpu" and (on_cpu_only or x.device != device):
        too = "" if on_cpu_only else f" or on the device of {called(first)}, {device}"
        raise ValueError(_wrong_place(name, f"on the CPU{too}", x))


def _wrong_place(name: str, where: str, x: torch.Tensor) -> str:
    remedy = f"{called(name)}.cpu() is a copy on the CPU"
    return _message(name, where, f"a tensor on {x.device}", remedy)


def _message(name: str, what: str, got: str, remedy: str = "") -> str:
    return f"{called(name)} must be {what}; got {got}" + (f" ({remedy})" if remedy else "")


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert to the dtype of autocast if it is enabled, as PyTorch's own operators do.

    Arguments that are not tensors are left as they are; later checks name them.
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
    for module, kind, remedy in _WITHOUT_MEMORY:
        if is_kind(x, module, kind):
            raise UnsupportedError(_message(name, "a plain torch.Tensor", kind, remedy))


def _is_transformed(x: torch.Tensor) -> bool:
    """Return True for tensors of torch.func or of forward-mode differentiation."""
    if torch._C._are_functorch_transforms_active() and torch._C._functorch.is_gradtrackingtensor(x):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
