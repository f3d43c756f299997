"""``tileattn.torch.attention``: check a call on tensors, and hand it on."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tileattn.errors import UnsupportedError
from tileattn.messages import calling
from tileattn.results import Attention
from tileattn.torch import eager
from tileattn.torch.functions import read_functions
from tileattn.torch.tensors import autocast
from tileattn.validation import check_flags


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Exact attention on tensors, differentiable in q, k, v, bias, sinks and aux.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Hq, Nq, D), (Hq, Nq, D) or (Nq, D)
        Queries; float16, bfloat16, float32 or float64, on the CPU or on an NVIDIA GPU. Any
        strides.
    k : torch.Tensor, shape (B, Hkv, Nk, D), (Hkv, Nk, D) or (Nk, D)
        Keys, of the dtype of q, or with ``k_descale`` of torch.int8 or torch.float8_e4m3fn.
    v : torch.Tensor, shape (B, Hkv, Nk, Dv), (Hkv, Nk, Dv) or (Nk, Dv)
        Values.
    return_lse : bool
        Return the logsumexp of each query, too; it is differentiable.
    deterministic : bool
        Compute bitwise reproducible gradients, as ``torch.use_deterministic_algorithms`` makes all
        calls do. On the CPU gradients always are.
    backend : str
        As for ``tileattn.forward``.
    **options
        The options of ``tileattn.forward``. Arrays are tensors on the device of q. Integers, such
        as ``kv_lengths``, are numbers, sequences, or tensors on the CPU or on the device of q.
        ``seed`` may be a tensor of one integer on the CPU, and descales may be numbers.

    Returns
    -------
    torch.Tensor, shape (B, Hq, Nq, Dv), or Attention
        The output, or with ``return_lse`` the pair ``(out, lse)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    UnsupportedError
        If no backend supports the call, or a tensor is sparse, nested or on another kind of device;
        in double backward.
    BackendUnavailableError
        If tensors are on a GPU, and CuPy is not installed.

    Notes
    -----
    Autocast converts q, k and v to its dtype, unless they are float64. Only the gradients that
    autograd needs are computed. Tensors share their memory with the library: nothing is copied.

    On a GPU the call runs on PyTorch's current stream, in memory of PyTorch's allocator. After the
    first call with some signature no call waits for the GPU, and calls can be captured in a CUDA
    graph.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch import attention
    >>> q, k, v = torch.randn(3, 2, 4, 100, 32, requires_grad=True).unbind()
    >>> out = attention(q, k, v, causal=True)
    >>> out.shape
    torch.Size([2, 4, 100, 32])
    """
    return attend((q, k, v), options, return_lse, deterministic, backend)


def attend(
    rows: Sequence[torch.Tensor],
    options: Mapping[str, Any],
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    names: Mapping[str, str] | None = None,
) -> Any:
    """Compute what `attention` does; ``names`` translates argument names in error messages."""
    try:
        return _attend(rows, options, return_lse, deterministic, backend)
    except (TypeError, ValueError, UnsupportedError):
        if not names or torch.compiler.is_compiling():
            raise
    with calling(names):  # raise the same error with the caller's argument names
        return _attend(rows, options, return_lse, deterministic, backend)


def _attend(
    rows: Sequence[torch.Tensor],
    options: Mapping[str, Any],
    return_lse: bool,
    deterministic: bool,
    backend: str,
) -> Any:
    check_flags(return_lse=return_lse, deterministic=deterministic)
    deterministic = bool(deterministic or torch.are_deterministic_algorithms_enabled())
    options = read_functions(options, getattr(rows[0], "device", None))
    found = eager.attend(autocast(*rows), backend, deterministic, options)
    return Attention(*found) if return_lse else found[0]


def new_dropout(dropout_p: Any) -> dict[str, Any]:
    """Return the options of dropout with a new seed; draw none if nothing is dropped."""
    if dropout_p is None:
        raise TypeError("dropout_p must be a number; got None")
    if isinstance(dropout_p, int | float) and dropout_p == 0:
        return {}
    return {"dropout_p": dropout_p, "seed": new_seed()}


def new_seed() -> torch.Tensor:
    """Draw a dropout seed from PyTorch's generator on the CPU."""
    return torch.randint(1 << 62, (), device="cpu")
