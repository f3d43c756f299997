"""Translate the layouts and arguments of flash_attn's functions to the library's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tileattn.torch.functional import attend, new_dropout
from tileattn.torch.inputs import integer_tensor
from tileattn.torch.tensors import check_tensor
from tileattn.validation import check_flags

Integers = torch.Tensor | Sequence[Any]
Window = Sequence[int | None]

NAMES = {"scale": "softmax_scale", "window": "window_size", "sinks": "learnable_sink"}
"""Argument names of flash_attn, by the library's names; they differ only for these."""


def attend_flash(
    rows: Mapping[str, torch.Tensor],
    dropout_p: float,
    deterministic: bool,
    return_attn_probs: bool,
    given: Sequence[Any],
    names: Mapping[str, str] = NAMES,
    **places: Any,
) -> Any:
    """Attend with flash_attn's layout and arguments; ``given`` are arguments of `to_options`."""
    check_flags(return_attn_probs=return_attn_probs, deterministic=deterministic)
    options = places | new_dropout(dropout_p) | to_options(*given)
    q, k, v = heads_first(rows)
    out, lse = attend((q, k, v), options, True, deterministic, names=names)
    out = out.transpose(-3, -2)
    return (out, lse, None) if return_attn_probs else out


def to_options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
) -> dict[str, Any]:
    """Translate flash_attn's arguments to options of `attention`."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(
            "window_size must be a pair (left, right) of integers, -1 for an open side; "
            f"got {window_size!r}"
        )
    left, right = (None if isinstance(n, int) and n == -1 else n for n in window_size)
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": (left, right),
        "softcap": None if isinstance(softcap, int | float) and softcap == 0 else softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": learnable_sink,
    }


def heads_first(rows: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Transpose tokens and heads, without copies: the library takes heads first."""
    for name, x in check_tensors(rows).items():
        if x.ndim not in (3, 4):
            shapes = "(B, N, H, D), or packed (T, H, D)"
            raise ValueError(f"{name} must have shape {shapes}; got {tuple(x.shape)}")
    return [x.transpose(-3, -2) for x in rows.values()]


def check_tensors(tensors: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """Check tensors; all must be on the device of the first."""
    device = getattr(next(iter(tensors.values())), "device", None)
    for name, x in tensors.items():
        check_tensor(name, x, device)
    return tensors


def unpack(name: str, x: Any, names: str) -> dict[str, torch.Tensor]:
    """Split a tensor of packed queries, keys and values, or of packed keys and values, by name."""
    check_tensor(name, x)
    if x.ndim not in (4, 5) or x.shape[-3] != len(names):
        shapes = "(B, N, {0}, H, D) or (T, {0}, H, D)".format(len(names))
        raise ValueError(f"{name} must have shape {shapes}; got {tuple(x.shape)}")
    return dict(zip(names, x.unbind(-3), strict=True))


def offsets(**given: Any) -> dict[str, torch.Tensor]:
    """Make tensors of the offsets of packed sequences; none may be None."""
    what = "integers of shape (S + 1,)"
    for name, x in given.items():
        if x is None:
            raise TypeError(f"{name} must be {what}; got None")
    found = {name: integer_tensor(name, x) for name, x in given.items()}
    for name, x in found.items():
        if x.is_nested or x.ndim != 1:
            raise ValueError(
                f"{name} must be {what}; got {'a nested tensor' if x.is_nested else tuple(x.shape)}"
            )
    return found
