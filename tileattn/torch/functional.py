"""``tileattn.torch.attention``: check a call on tensors, and hand it on."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from tileattn.call.options import DIFFERENTIABLE, INTEGERS, OPTIONS, SEEDS, options_with
from tileattn.call.parse import aux_arrays, check_names
from tileattn.call.prepared import CALLS
from tileattn.call.scalars import number_of, seed_of
from tileattn.call.window import window_of
from tileattn.errors import UnsupportedError
from tileattn.messages import called, calling, must_be
from tileattn.results import Attention
from tileattn.torch import eager
from tileattn.torch.block_mask_names import name_of
from tileattn.torch.functions import read_functions
from tileattn.torch.operators import INPUTS, TENSORS
from tileattn.torch.tensors import autocast, check_integers, check_tensor
from tileattn.validation import check_flags, refuse_masked

_NEVER_NONE = {*options_with(value="flag"), *options_with(role="dropout")}
_REMEDIES = {  # for tensors that require a gradient that attention does not compute
    "alibi_slopes": "score_mod= with aux=(slopes,) does: "
    "lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i - j)",
    "scale": "attention(q * scale, ..., scale=1.0) does",
}
_DEFAULTS = dict.fromkeys(INPUTS) | {"aux": ()}


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
        Keys.
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
        ``seed`` may be a tensor of one integer on the CPU.

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
    q, k, v = autocast(*rows)
    key = eager.signature((q, k, v), backend, deterministic, options)
    call = None if key is None else CALLS.get(key)  # None under a compiler
    if call is None:
        given = {"q": q, "k": k, "v": v, "backend": backend, "deterministic": deterministic}
        out, lse = eager.forward(_inputs(given, options), key)
    else:
        out, lse = call(q, k, v, *map(options.get, call.options))
    return Attention(out, lse) if return_lse else out


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


def _inputs(rows: Mapping[str, Any], options: Mapping[str, Any]) -> Sequence[Any]:
    """Check a call; return the arguments of the operator, `INPUTS`."""
    check_names(options)
    if not isinstance(rows["backend"], str):
        raise TypeError(must_be("backend", "a name or 'auto'", rows["backend"]))
    optional = {name: x for name, x in options.items() if x is not None or name in _NEVER_NONE}
    given = {**rows, **optional}
    given |= {name: _input(name, x) for name, x in optional.items()}
    given["aux"] = [*aux_arrays(given).values()]
    _check(given)
    refuse_gradients({x: given[x] for x in TENSORS if x in given and x not in DIFFERENTIABLE})
    window, causal = given.pop("window", None), given.pop("causal", False)
    given["left"], given["right"] = window_of(window, causal)
    return [*(_DEFAULTS | given).values()]


def _input(name: str, x: Any) -> Any:
    """Convert an option to what the operators take."""
    match OPTIONS[name].value:
        case "integers" | "integer":
            return integer_tensor(name, x)
        case "number":
            return number(name, x)
        case "block mask":
            return name_of(x)
    return x


def integer_tensor(name: str, x: Any) -> torch.Tensor:
    """Make a tensor of integers: a compiled program takes new values without recompiling."""
    if isinstance(x, torch.Tensor):
        return x
    if not torch.compiler.is_compiling():
        refuse_masked(name, x)
    if name in SEEDS:
        x = seed_of(x)
        return torch.full((), x, dtype=torch.int64 if x < 1 << 63 else torch.uint64, device="cpu")
    try:
        if isinstance(x, int) and not isinstance(x, bool):
            return torch.full((), x, dtype=torch.int64, device="cpu")
        # Dynamo keeps the elements of a list symbolic for torch.tensor, not for torch.as_tensor.
        make = torch.tensor if isinstance(x, list | tuple) else torch.as_tensor
        return make(x, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(must_be(name, "integers", x)) from None


def number(name: str, x: Any) -> float:
    """Make a float of a number for an operator; compiled calls check the value as they run."""
    if isinstance(x, torch.Tensor):
        refuse_gradients({name: x})
    if isinstance(x, torch.Tensor | np.ndarray) and x.ndim == 0:
        x = x.item()
    if torch.compiler.is_compiling() and isinstance(x, Real | torch.SymFloat):
        return x if isinstance(x, torch.SymFloat) else float(x)
    return number_of(name, x)


def refuse_gradients(tensors: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if a tensor requires a gradient: it would silently stay None."""
    for name, x in tensors.items():
        if torch.is_grad_enabled() and x.requires_grad:
            remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
            raise UnsupportedError(
                f"{called(name)} requires a gradient, which attention does not compute; pass "
                f"{called(name)}.detach(){remedy}"
            )


def _check(given: Mapping[str, Any]) -> None:
    """Check types, dtypes and devices of the tensors; the library checks the rest."""
    check_tensor("q", given["q"])
    device = given["q"].device
    for name, x in given.items():
        if name == "aux":
            for n, y in enumerate(x):
                check_tensor(f"aux[{n}]", y, device)
        elif name in TENSORS:
            check = check_integers if name in (*INTEGERS, *SEEDS) else check_tensor
            check(name, x, device)
    seed = given.get("seed")
    if seed is not None and seed.numel() != 1:
        raise ValueError(f"seed must be one integer; got shape {tuple(seed.shape)}")
