"""``tileattn.torch.merge``: join partial results, which are tensors."""

from collections.abc import Sequence
from typing import Any

import torch

import tileattn
from tileattn.merging import parts_of
from tileattn.results import Attention
from tileattn.torch import library
from tileattn.torch.tensors import array_of, check_tensor, on, tensor_of


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> Attention:
    """Join results over disjoint sets of keys, as `tileattn.merge` does; differentiable.

    Parameters
    ----------
    outs : sequence of torch.Tensor, shape (..., N, Dv) each
        Outputs of the same queries over different keys, on the CPU or on an NVIDIA GPU.
    lses : sequence of torch.Tensor, shape (..., N) each
        Their logsumexps, float32, or float64 where the outputs are.

    Returns
    -------
    Attention
        The tensors ``(out, lse)``, as `attention` over all the keys would return them, up to
        rounding.

    Raises
    ------
    TypeError, ValueError
        If the sequences are empty or differ in length, or tensors in shape, dtype or device.
    UnsupportedError
        If a tensor is sparse, nested or on another kind of device.

    Notes
    -----
    With ``w_t = exp(lse_t - lse)`` the gradients are ``dout_t = w_t * dout`` and
    ``dlse_t = w_t * (dlse + sum(dout * (out_t - out)))``. They are 0 for a row with
    ``lse_t = -inf``.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch import attention, merge
    >>> q, k, v = torch.randn(3, 2, 7, 8).unbind()
    >>> left = attention(q, k[:, :3], v[:, :3], return_lse=True)
    >>> right = attention(q, k[:, 3:], v[:, 3:], return_lse=True)
    >>> whole = merge([left.out, right.out], [left.lse, right.lse])
    >>> torch.allclose(whole.out, attention(q, k, v), atol=1e-5)
    True
    """
    outs, lses = parts_of(outs, lses, "tensors")
    for name, tensors in (("outs", outs), ("lses", lses)):
        for n, x in enumerate(tensors):
            device = None if x is outs[0] else outs[0].device
            check_tensor(f"{name}[{n}]", x, device, first="outs[0]")
    return Attention(*library.call("merge", _run, outs, lses))


def _run(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    with on(outs[0].device):
        found = tileattn.merge([*map(array_of, outs)], [*map(array_of, lses)])
        return tensor_of(found.out), tensor_of(found.lse)


def _fake(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output, *inputs[0], *inputs[1])


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, Any]:
    out, lse, *parts = ctx.saved_tensors
    dout, whole = dout.to(lse.dtype), out.to(lse.dtype)
    half, zero = len(parts) // 2, lse.new_zeros(())
    douts, dlses = [], []
    for part, part_lse in zip(parts[:half], parts[half:], strict=True):
        # torch.where hides what rows without keys hold, NaN included.
        seen = part_lse != -torch.inf
        weight = torch.where(seen, torch.where(seen, part_lse - lse, zero).exp(), zero)
        apart = torch.where(seen[..., None], part.to(lse.dtype) - whole, zero)
        douts.append((weight[..., None] * dout).to(out.dtype))
        dlses.append(weight * (dlse + (dout * apart).sum(-1)))
    return douts, dlses


library.define(
    *("merge", dict.fromkeys(("outs", "lses"), "Tensor[]"), "(Tensor, Tensor)", _run, _fake),
    gradient=(_differentiate, _save),
)
