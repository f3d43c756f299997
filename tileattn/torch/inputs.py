"""Check a call on tensors; make the arguments of an operator."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from tileattn.call.descale import descale_number
from tileattn.call.options import DIFFERENTIABLE, INTEGERS, OPTIONS, ROWS, SEEDS, options_with
from tileattn.call.parse import aux_arrays, check_names
from tileattn.call.scalars import number_of, seed_of
from tileattn.call.window import window_of
from tileattn.errors import UnsupportedError
from tileattn.expressions.parameters import Expression
from tileattn.messages import called, must_be
from tileattn.torch.block_mask_names import name_of
from tileattn.torch.operators import INPUTS, TENSORS
from tileattn.torch.tensors import check_integers, check_tensor
from tileattn.validation import check_flags, refuse_masked

_NEVER_NONE = {*options_with(value="flag"), *options_with(role="dropout")}
_REMEDIES = {  # for tensors that require a gradient that attention does not compute
    "alibi_slopes": "score_mod= with aux=(slopes,) does: "
    "lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i - j)",
    "scale": "attention(q * scale, ..., scale=1.0) does",
}
_DEFAULTS = dict.fromkeys(INPUTS) | {"aux": (), "invariant": False}


def inputs_of(
    rows: Sequence[Any], backend: Any, deterministic: bool, options: Mapping[str, Any]
) -> Sequence[Any]:
    """Check a call; return the arguments of the operator, `INPUTS`."""
    check_names(options)
    if not isinstance(backend, str):
        raise TypeError(must_be("backend", "a name or 'auto'", backend))
    optional = {name: x for name, x in options.items() if x is not None or name in _NEVER_NONE}
    given = {**dict(zip(ROWS, rows, strict=True)), **optional}
    given |= {name: _input(name, x, given["q"]) for name, x in optional.items()}
    given["aux"] = [*aux_arrays(given).values()]
    _check(given)
    refuse_gradients({x: given[x] for x in TENSORS if x in given and x not in DIFFERENTIABLE})
    window, causal = given.pop("window", None), given.pop("causal", False)
    given["left"], given["right"] = window_of(window, causal)
    given |= {"backend": backend, "deterministic": deterministic}
    return [*(_DEFAULTS | given).values()]


def _input(name: str, x: Any, q: Any) -> Any:
    """Convert an option to what the operators take."""
    match OPTIONS[name].value:
        case "integers" | "integer":
            return integer_tensor(name, x)
        case "number":
            return number(name, x)
        case "flag":
            check_flags(**{name: x})
        case "descale":
            return descale_tensor(name, x, q)
        case "block mask":
            return name_of(x)
        case "function":
            return x.to_text() if isinstance(x, Expression) else x
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


def descale_tensor(name: str, x: Any, like: Any) -> Any:
    """Make a tensor of a number on the device of ``like``; return tensors as they are."""
    if isinstance(x, torch.Tensor) or not isinstance(like, torch.Tensor):
        return x
    if not torch.compiler.is_compiling():
        x = descale_number(name, x)
    return torch.full((), x, dtype=torch.float32, device=like.device)


def number(name: str, x: Any) -> float:
    """Make a float of a number for an operator; compiled calls check the value as they run."""
    if isinstance(x, torch.Tensor):
        refuse_gradients({name: x})
    if isinstance(x, torch.Tensor | np.ndarray) and x.ndim == 0:
        x = x.item()
    if torch.compiler.is_compiling() and isinstance(x, Real | torch.SymFloat):
        return x if isinstance(x, torch.SymFloat) else float(x)
    return number_of(name, x)


def refuse_gradients(tensors: Mapping[str, Any], function: str = "attention") -> None:
    """Raise UnsupportedError if a tensor requires a gradient: it would silently stay None."""
    for name, x in tensors.items():
        if torch.is_grad_enabled() and x.requires_grad:
            remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
            raise UnsupportedError(
                f"{called(name)} requires a gradient, which {function} does not compute; pass "
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
