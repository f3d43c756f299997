"""``tileattn.torch.rope``: rotary position embedding of tensors."""

from typing import Any

import torch

import tileattn
from tileattn.torch import library
from tileattn.torch.inputs import integer_tensor, refuse_gradients
from tileattn.torch.tensors import array_of, check_integers, check_tensor, on, tensor_of
from tileattn.validation import check_flags

_INPUTS = {
    **dict.fromkeys(("x", "cos", "sin"), "Tensor"),
    "positions": "Tensor?",
    **dict.fromkeys(("interleaved", "inverse"), "bool"),
}


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: Any = None,
    interleaved: bool = False,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate pairs of columns of a tensor, as `tileattn.rope` does; differentiable in x.

    Parameters
    ----------
    x : torch.Tensor, shape (B, H, N, D), (H, N, D) or (N, D)
        Queries or keys; float16, bfloat16, float32 or float64, on the CPU or on an NVIDIA GPU. Any
        strides. Packed sequences are (H, T, D).
    cos, sin : torch.Tensor, shape (M, R / 2)
        Cosine and sine of the angle of each pair, for positions 0 to M - 1, of any of these dtypes,
        on the device of x. The first R columns of x are rotated, the others stay.
    positions : int, torch.Tensor or sequence of int of shape (N,) or (B, N), or None
        Position of each row; an integer is the position of the first row, and None is 0. A tensor
        is on the CPU or on the device of x.
    interleaved : bool
        True if columns 2c and 2c + 1 are a pair (GPT-J); False for c and c + R / 2 (GPT-NeoX,
        Llama).
    inverse : bool
        Rotate back.

    Returns
    -------
    torch.Tensor
        A new tensor of the shape and dtype of x.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it. Positions on a GPU are not
        checked: positions outside the tables use the nearest row.
    UnsupportedError
        If cos or sin requires a gradient, or a tensor is sparse, nested or on another kind of
        device.

    Notes
    -----
    The rotation is linear, so second derivatives are supported, too. ``torch.compile`` compiles
    the call without a graph break. Autocast does not convert x.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch import rope
    >>> angle = torch.arange(6)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    >>> q = torch.ones(2, 6, 8)
    >>> rotated = rope(q, angle.cos(), angle.sin())
    >>> torch.allclose(rope(rotated, angle.cos(), angle.sin(), inverse=True), q)
    True
    """
    check_flags(interleaved=interleaved, inverse=inverse)
    check_tensor("x", x)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, x.device, first="x")
    refuse_gradients({"cos": cos, "sin": sin}, "rope")
    if positions is not None:
        positions = integer_tensor("positions", positions)
        check_integers("positions", positions, x.device, first="x")
    rotated: torch.Tensor
    rotated = library.call("rope", _run, x, cos, sin, positions, bool(interleaved), bool(inverse))
    return rotated


def _run(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> torch.Tensor:
    with on(x.device):
        rows = None if positions is None else array_of(positions)
        how = {"interleaved": interleaved, "inverse": inverse}
        return tensor_of(tileattn.rope(*map(array_of, (x, cos, sin)), positions=rows, **how))


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    del output
    _, *tensors, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    """Rotate back: the rotation is linear, and this is its transpose."""
    inputs = (upstream, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return library.call("rope", _run, *inputs), *[None] * (len(inputs) - 1)


library.define(
    *("rope", _INPUTS, "Tensor", _run),
    fake=lambda x, *_: x.new_empty(x.shape),
    gradient=(_differentiate, _save),
)
