"""``torch.nn.functional.scaled_dot_product_attention``, computed by the library."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch.backends import mha
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from tileattn.torch.functional import attend, new_dropout
from tileattn.torch.tensors import check_tensor, is_kind
from tileattn.validation import check_flags

NAMES = {
    **{"q": "query", "k": "key", "v": "value"},
    **{"bias": "attn_mask", "mask": "attn_mask", "causal": "is_causal"},
}
_ROWS = ("query", "key", "value")


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
    rows = query, key, value
    options: dict[str, Any]
    variant = is_kind(attn_mask, "torch.nn.attention.bias", "CausalBias")
    tensors = rows if variant else (*rows, attn_mask)
    if has_torch_function(tensors):
        # Subclasses that override functions know PyTorch's; a mode sees any function.
        theirs = functional.scaled_dot_product_attention
        return handle_torch_function(
            theirs if any(map(_overrides, tensors)) else scaled_dot_product_attention,
            tensors,
            *(*rows, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if torch.jit.is_tracing():  # it would record these shapes as constants: give it one operator
        operator = torch.ops.tileattn.scaled_dot_product_attention
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return operator(*rows, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal must be False with attn_mask")
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    for name, x in zip(_ROWS, rows, strict=True):
        # The other checks run once for all calls with the same signature.
        if not isinstance(x, torch.Tensor) or x.is_nested:
            check_tensor(name, x)
        if x.ndim < 2:
            raise ValueError(f"{name} must have shape (..., N, D); got {tuple(x.shape)}")
    options = {"scale": scale}
    if is_causal:
        options |= causal_options(query, key)
    elif variant:
        options |= _causal_variant(attn_mask, query, key)
    q, k, v = _broadcast(rows, 3 if enable_gqa else 2)
    if enable_gqa:
        k, v = _same_heads(k, v)
    if attn_mask is not None and not variant:
        check_tensor("attn_mask", attn_mask)
        options[option_of(attn_mask)] = attn_mask
    options |= _dropout(dropout_p, q)
    _count()
    return _attend(q, k, v, options)


def _overrides(x: Any) -> bool:
    """Return True if an argument's class has a ``__torch_function__`` of its own."""
    function = getattr(type(x), "__torch_function__", torch._C._disabled_torch_function_impl)
    own = getattr(function, "__func__", function)
    return own not in (
        torch._C._disabled_torch_function_impl,
        torch.Tensor.__torch_function__.__func__,
    )


def causal_options(query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """Return the options of a causal mask that is aligned at the top left."""
    # For as many keys as queries this is the default, and compiled programs need no offset.
    offset = {} if query.shape[-2] == key.shape[-2] else {"q_offset": 0}
    return {"causal": True, **offset}


def _causal_variant(bias: Any, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """Translate a ``torch.nn.attention.bias.CausalBias``."""
    shape, own = (query.shape[-2], key.shape[-2]), (bias.seq_len_q, bias.seq_len_kv)
    if own != shape:
        raise ValueError(f"attn_mask must be a CausalBias of shape {shape}; got one of {own}")
    return {"causal": True} if bias.variant.name == "LOWER_RIGHT" else causal_options(query, key)


def _dropout(dropout_p: Any, q: torch.Tensor) -> dict[str, Any]:
    """Translate the probability of dropping an entry."""
    if isinstance(dropout_p, int | float) and dropout_p == 1:
        # A mask without any pair: the output and all gradients are 0.
        return {"mask": torch.zeros(1, 1, dtype=torch.bool, device=q.device)}
    return new_dropout(dropout_p)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Fold any number of leading axes into a batch and heads, and attend."""
    if q.ndim <= 4:
        result: torch.Tensor = attend((q, k, v), options, names=NAMES)
        return result
    masks = {name: options[name] for name in ("mask", "bias") if name in options}
    at = q.ndim - 3
    for name, x in masks.items():
        if x.ndim > q.ndim:
            raise ValueError(
                f"attn_mask must have at most the {q.ndim} axes of query; got {tuple(x.shape)}"
            )
        masks[name] = x[(None,) * (q.ndim - x.ndim)]
        at = _batch_axes(masks[name].shape[:-2], q.shape[:-2])
    folded = (_folded(x, at) for x in (q, k, v))
    options |= {name: _folded(x, at, q.shape) for name, x in masks.items()}
    out = attend([*folded], options, names=NAMES)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _batch_axes(lead: Sequence[int], whole: Sequence[int]) -> int:
    """Count the leading axes to fold into the batch, so that a mask need not be expanded."""
    sides = ((n, lead[:n], lead[n:], whole[:n], whole[n:]) for n in range(len(whole) - 1, -1, -1))
    for n, batch, heads, all_batch, all_heads in sides:
        if all(a in ((1,) * len(a), b) for a, b in ((batch, all_batch), (heads, all_heads))):
            return n
    return len(whole) - 1


def _folded(x: torch.Tensor, at: int, whole: Sequence[int] | None = None) -> torch.Tensor:
    """Fold the first ``at`` leading axes into one, and the other leading axes into another.

    With ``whole``, the shape that a mask broadcasts to, expand a group of axes unless all are 1.
    """
    for last, first in ((x.ndim - 3, at), (at - 1, 0)):
        if last < first:
            x = x.unsqueeze(first)
        else:
            if whole is not None and {*x.shape[first : last + 1]} != {1}:
                x = x.expand(*x.shape[:first], *whole[first : last + 1], *x.shape[last + 1 :])
            x = x.flatten(first, last)
    return x


def _broadcast(tensors: Sequence[torch.Tensor], own: int) -> Sequence[torch.Tensor]:
    """Broadcast tensors against each other in all but their last ``own`` axes."""
    leads = [x.shape[:-own] for x in tensors]
    if leads[0] == leads[1] == leads[2]:
        return tensors
    try:
        batch = torch.broadcast_shapes(*leads)
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        hint = "" if own == 3 else " (enable_gqa=True lets query heads share a head of keys)"
        message = "query, key and value must have leading axes that broadcast; got shapes"
        raise ValueError(f"{message} {shapes}{hint}") from None
    return [x.expand(*batch, *x.shape[-own:]) for x in tensors]


def _same_heads(k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
    """Repeat heads of k and v to the same number of heads; PyTorch lets these numbers differ."""
    if k.ndim < 3 or v.ndim < 3 or k.shape[-3] == v.shape[-3] or not (k.shape[-3] and v.shape[-3]):
        return k, v
    heads = math.lcm(k.shape[-3], v.shape[-3])
    return [x.repeat_interleave(heads // x.shape[-3], -3) for x in (k, v)]


def option_of(mask: torch.Tensor) -> str:
    """Return the name of the option that takes this mask."""
    if mask.dtype is torch.bool:
        return "mask"
    if mask.is_floating_point():
        return "bias"
    raise TypeError(f"attn_mask must have dtype torch.bool or a floating one; got {mask.dtype}")


@dataclass
class Taken:
    """Count of the calls in a block of `sdpa`.

    Parameters
    ----------
    calls : int
        Calls that the library computed; a call in a compiled function counts when it is compiled.
    """

    calls: int = 0


_lock = Lock()
_blocks: list[Taken] = []  # the open `sdpa` blocks of all threads
_replaced: list[Any] = []  # PyTorch's function and fast-path flag, while a block is open

# TorchScript calls this operator instead of a Python function.
_LIBRARY = torch.library.Library("tileattn", "FRAGMENT")
_LIBRARY.define(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) "
    "-> Tensor"
)
_LIBRARY.impl(
    "scaled_dot_product_attention", scaled_dot_product_attention, "CompositeImplicitAutograd"
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # PyTorch's
def _count() -> None:
    if _blocks:
        with _lock:
            for taken in _blocks:
                taken.calls += 1


@contextmanager
def sdpa() -> Iterator[Taken]:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` inside a ``with`` block.

    Yields
    ------
    Taken
        Its attribute ``calls`` counts the calls that the library computed.

    Notes
    -----
    The block applies to all threads. It switches off the fast path of ``torch.nn`` modules, which
    does not call the function. ``torch.nn.MultiheadAttention`` with ``need_weights=True``, its
    default, does not call it either and stays PyTorch's. Code that imported PyTorch's function
    before, by ``from ... import``, keeps it. TorchScript compiled in a block keeps tileattn's.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch import sdpa
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> with sdpa() as taken:
    ...     out = layer(torch.randn(1, 5, 16))
    >>> taken.calls
    1
    """
    taken = Taken()
    with _lock:
        if not _blocks:
            _replaced[:] = _put(scaled_dot_product_attention, fastpath=False)
        _blocks.append(taken)
    try:
        yield taken
    finally:
        with _lock:
            _blocks[:] = [x for x in _blocks if x is not taken]
            if not _blocks:
                _put(*_replaced)


def _put(function: Any, fastpath: bool) -> tuple[Any, bool]:
    """Replace PyTorch's function and fast-path flag; return the previous ones."""
    before = functional.scaled_dot_product_attention, mha.get_fastpath_enabled()
    functional.scaled_dot_product_attention = function
    mha.set_fastpath_enabled(fastpath)
    if function is scaled_dot_product_attention:
        from torch.jit._builtins import _register_builtin  # a private name

        _register_builtin(function, "tileattn::scaled_dot_product_attention")
    return before
