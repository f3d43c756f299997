"""PyTorch's own call, computed here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tileattn.torch.functional import attend, new_seed
from tileattn.torch.tensors import check_tensor

NAMES = ("query", "key", "value")


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Do what ``torch.nn.functional.scaled_dot_product_attention`` does.

    Parameters
    ----------
    query : torch.Tensor, shape (..., Hq, Nq, D)
        Queries.
    key : torch.Tensor, shape (..., H, Nk, D)
        Keys.
    value : torch.Tensor, shape (..., H, Nk, Dv)
        Values.
    attn_mask : torch.Tensor, broadcastable to (..., Hq, Nq, Nk), or None
        Booleans, True = attended, or numbers that are added to the scores; these have a gradient.
    dropout_p : float
        Probability of dropping an entry. The seed comes from PyTorch's generator on the CPU.
    is_causal : bool
        Query i attends to keys ``j <= i``: aligned at the top left.
    scale : float or None
        Multiplies the products; None is ``1 / sqrt(D)``.
    enable_gqa : bool
        Let groups of query heads share a head of keys and values.

    Returns
    -------
    torch.Tensor, shape (..., Hq, Nq, Dv)
        The output. A query that attends to no key has output 0.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    UnsupportedError
        As `attention`.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch import scaled_dot_product_attention
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)
    >>> ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-6)
    True
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal are given; one of them is accepted")
    options: dict[str, Any] = {"scale": scale, "causal": is_causal}
    if is_causal:
        options["q_offset"] = 0
    if dropout_p:
        options |= {"dropout_p": dropout_p, "seed": new_seed()}
    rows = query, key, value
    for name, x in zip(NAMES, rows, strict=True):
        # What else there is to check is checked once for all calls like this one.
        if not isinstance(x, torch.Tensor) or x.is_nested:
            check_tensor(name, x)
        if x.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; (..., N, D) is accepted")
    q, k, v = _broadcast(rows, 3 if enable_gqa else 2)
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask)
        of_pairs = _expanded(attn_mask, q.shape[:-2]) if q.ndim > 4 else attn_mask
        options[option_of(attn_mask)] = of_pairs if q.ndim <= 4 else of_pairs.flatten(0, -4)
    if q.ndim <= 4:
        return attend((q, k, v), options, names=NAMES)
    folded = [x.flatten(0, -4) for x in (q, k, v)]
    return attend(folded, options, names=NAMES).reshape(*q.shape[:-1], v.shape[-1])


def _broadcast(tensors: Sequence[torch.Tensor], own: int) -> Sequence[torch.Tensor]:
    """Broadcast tensors against each other, but for their last axes."""
    leads = [x.shape[:-own] for x in tensors]
    if leads[0] == leads[1] == leads[2]:
        return tensors
    try:
        batch = torch.broadcast_shapes(*leads)
    except RuntimeError:
        pairs = zip(NAMES, tensors, strict=True)
        of_each = ", ".join(f"{name} has shape {tuple(x.shape)}" for name, x in pairs)
        hint = "" if own == 3 else " (enable_gqa=True lets query heads share a head of keys)"
        raise ValueError(f"{of_each}; axes that broadcast are accepted{hint}") from None
    return [x.expand(*batch, *x.shape[-own:]) for x in tensors]


def _expanded(mask: torch.Tensor, batch: Sequence[int]) -> torch.Tensor:
    """Give a mask the leading axes of a batch."""
    return mask.expand(*batch, *(1, 1, *mask.shape)[-2:])


def option_of(mask: torch.Tensor) -> str:
    """Say which option takes a mask."""
    if mask.dtype is torch.bool:
        return "mask"
    if mask.is_floating_point():
        return "bias"
    raise TypeError(f"attn_mask has dtype {mask.dtype}; torch.bool and floating ones are accepted")


@contextmanager
def sdpa() -> Iterator[None]:
    """Let ``torch.nn.functional.scaled_dot_product_attention`` be the one here, inside a block.

    Yields
    ------
    None
        Nothing.

    Notes
    -----
    It holds for all threads. What has taken PyTorch's function before, as by ``from ... import``,
    keeps it, and so does ``torch.nn.TransformerEncoder``'s fast path.
    """
    functional = torch.nn.functional
    theirs = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = theirs
