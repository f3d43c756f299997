"""The calls of the package flash_attn, with its layouts and arguments, computed here."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import tileattn
from tileattn.backends.registry import candidates, supporting
from tileattn.errors import UnsupportedError
from tileattn.lengths import integers
from tileattn.problem import parse
from tileattn.torch.functional import attention, new_seed
from tileattn.torch.tensors import array_of, check_integers, check_tensor, on, tensor_of

Window = tuple[int, int]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what ``flash_attn.flash_attn_func`` does.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Nq, Hq, D)
        Queries.
    k : torch.Tensor, shape (B, Nk, Hkv, D)
        Keys.
    v : torch.Tensor, shape (B, Nk, Hkv, Dv)
        Values.
    dropout_p : float
        Probability of dropping an entry. The seed comes from PyTorch's generator on the CPU.
    softmax_scale : float or None
        Multiplies the products; None is ``1 / sqrt(D)``.
    causal : bool
        Aligned at the bottom right.
    window_size : (int, int)
        Keys to the left and right; -1 leaves a side open.
    softcap : float
        Caps the scaled products; 0 is no cap.
    alibi_slopes : torch.Tensor, shape (Hq,) or (B, Hq), or None
        Subtracts ``slope * |i + Nk - Nq - j|``.
    deterministic : bool
        Ask for bitwise reproducible gradients.
    return_attn_probs : bool
        Return the logsumexp, too.

    Returns
    -------
    torch.Tensor, shape (B, Nq, Hq, Dv), or (out, softmax_lse, None)
        The output, or with ``return_attn_probs`` the logsumexp, too, of shape (B, Hq, Nq).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `tileattn.torch.attention`.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 32)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 100, 4, 32])
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _returned(
        attention(
            *_heads_first(q=q, k=k, v=v), return_lse=True, deterministic=deterministic, **options
        ),
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Do what ``flash_attn.flash_attn_varlen_func`` does.

    Parameters
    ----------
    q : torch.Tensor, shape (Tq, Hq, D)
        Queries of all sequences.
    k : torch.Tensor, shape (Tk, Hkv, D), or with pages (pages, page, Hkv, D)
        Keys.
    v : torch.Tensor, shape (Tk, Hkv, Dv), or with pages (pages, page, Hkv, Dv)
        Values.
    cu_seqlens_q : torch.Tensor, shape (S + 1,)
        Where the queries of each sequence start.
    cu_seqlens_k : torch.Tensor, shape (S + 1,)
        Where the keys of each sequence start; with pages their differences are the lengths.
    max_seqlen_q, max_seqlen_k : int or None
        Not needed, and not looked at.
    dropout_p : float
        As `flash_attn_func`.
    softmax_scale : float or None
        As `flash_attn_func`.
    causal : bool
        As `flash_attn_func`.
    window_size : (int, int)
        As `flash_attn_func`.
    softcap : float
        As `flash_attn_func`.
    alibi_slopes : torch.Tensor, shape (Hq,) or (S, Hq), or None
        As `flash_attn_func`.
    deterministic, return_attn_probs : bool
        As `flash_attn_func`.
    block_table : torch.Tensor, shape (S, pages of a sequence), or None
        The pages of each sequence. Then there are no gradients.

    Returns
    -------
    torch.Tensor, shape (Tq, Hq, Dv), or (out, softmax_lse, None)
        The output, or with ``return_attn_probs`` the logsumexp, too, of shape (Hq, Tq).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `tileattn.torch.attention`.
    """
    del max_seqlen_q, max_seqlen_k
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options["cu_seqlens_q"] = cu_seqlens_q
    if block_table is None:
        options["cu_seqlens_k"] = cu_seqlens_k
    else:
        options |= {"block_table": block_table, "kv_lengths": cu_seqlens_k.diff()}
    return _returned(
        attention(
            *_heads_first(q=q, k=k, v=v), return_lse=True, deterministic=deterministic, **options
        ),
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Do what ``flash_attn.flash_attn_with_kvcache`` does, without gradients.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Nq, Hq, D)
        Queries.
    k_cache : torch.Tensor, shape (entries, capacity, Hkv, D), or with pages (pages, page, Hkv, D)
        Keys; new ones are written into it.
    v_cache : torch.Tensor, shape (entries, capacity, Hkv, Dv), or with pages (pages, page, Hkv, Dv)
        Values; new ones are written into it.
    k : torch.Tensor, shape (B, N, Hkv, D), or None
        New keys, which are appended before the queries look.
    v : torch.Tensor, shape (B, N, Hkv, Dv), or None
        New values.
    rotary_cos, rotary_sin : torch.Tensor, shape (positions, rotary dimension / 2), or None
        Rotate q and k: new keys stand at the positions from ``cache_seqlens`` on, and so do queries
        if causal or in a window; else all of them stand at ``cache_seqlens``.
    cache_seqlens : torch.Tensor, shape (B,), int or None
        Keys that the cache has so far; None is its capacity.
    cache_batch_idx : torch.Tensor, shape (B,), or None
        Entry of the cache that each sequence has; None is its own number.
    cache_leftpad : None
        Not supported.
    block_table : torch.Tensor, shape (B, pages of a sequence), or None
        The pages of each sequence.
    softmax_scale : float or None
        As `flash_attn_func`.
    causal : bool
        As `flash_attn_func`.
    window_size : (int, int)
        As `flash_attn_func`.
    softcap : float
        As `flash_attn_func`.
    rotary_interleaved : bool
        Rotate pairs of neighbours; else halves.
    alibi_slopes : torch.Tensor, shape (Hq,) or (B, Hq), or None
        As `flash_attn_func`.
    num_splits : int
        Not needed, and not looked at.
    return_softmax_lse : bool
        Return the logsumexp, too.

    Returns
    -------
    torch.Tensor, shape (B, Nq, Hq, Dv), or (out, softmax_lse)
        The output, or with ``return_softmax_lse`` the logsumexp, too, of shape (B, Hq, Nq).

    Raises
    ------
    TypeError, ValueError
        As `tileattn.torch.attention` and `tileattn.append_kv`; then the cache is as before.
    UnsupportedError
        If ``cache_leftpad`` is given, or a tensor needs a gradient.
    """
    del num_splits
    if cache_leftpad is not None:
        raise UnsupportedError("cache_leftpad is given; a cache that starts at 0 is accepted")
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= {"k": k, "v": v} if k is not None or v is not None else {}
    _refuse_gradients(given)
    rotary = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    rotary = {} if rotary_cos is None and rotary_sin is None else rotary
    slopes = {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}
    _checked(given | rotary | slopes)
    places = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx}
    for name, y in (places | {"block_table": block_table}).items():
        if isinstance(y, torch.Tensor):
            check_integers(name, y, q.device)
    with on(q.device):
        x = {name: array_of(y).swapaxes(1, 2) for name, y in given.items()}
        tables = tuple(array_of(y) for y in rotary.values())
        options = _options(0.0, softmax_scale, causal, window_size, softcap, None)
        options |= {name: array_of(y) for name, y in slopes.items()}
        pages = _pages(block_table, cache_batch_idx)
        capacity = x["k_cache"].shape[2] * (1 if pages is None else pages.shape[1])
        old = _lengths(cache_seqlens, capacity, len(q), appended="k" in x)
        turn: dict[str, Any] = {"rotary": tables or None, "interleaved": rotary_interleaved}
        if tables:
            in_order = options["causal"] or options["window"] != (None, None)
            positions = _query_positions(old, q.shape[1], in_order=in_order)
            x["q"] = tileattn.rope(
                x["q"], *tables, positions=positions, interleaved=rotary_interleaved
            )
        options |= {"kv_lengths": old, "block_table": pages}
        caches = x["k_cache"], x["v_cache"]
        if "k" in x:
            # What cannot be computed is not appended.
            supporting(candidates("auto", x), parse(x["q"], *caches, options)[0])
            options["kv_lengths"] = tileattn.append_kv(
                *caches, x["k"], x["v"], kv_lengths=old, block_table=pages, **turn
            )
            torch.autograd.graph.increment_version((k_cache, v_cache))
        result = tileattn.forward(x["q"], *caches, **options)
        out, lse = map(tensor_of, result)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> dict[str, Any]:
    """Translate the options that the three calls have in common."""
    left, right = (None if side == -1 else side for side in window_size)
    options: dict[str, Any] = {
        "scale": softmax_scale,
        "causal": causal,
        "window": (left, right),
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
    }
    if dropout_p:
        options |= {"dropout_p": dropout_p, "seed": new_seed()}
    return options


def _checked(tensors: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """Check tensors, all of which must be on the device of the first, q."""
    device = getattr(tensors["q"], "device", None)
    for name, x in tensors.items():
        check_tensor(name, x, device)
    return tensors


def _heads_first(**tensors: torch.Tensor) -> list[torch.Tensor]:
    """View tensors whose last axes are tokens, heads and head dimension as attention takes them."""
    for name, x in _checked(tensors).items():
        if x.ndim not in (3, 4):
            accepted = "(B, N, H, D) and, packed, (T, H, D)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; accepted are {accepted}")
    return [x.transpose(-3, -2) for x in tensors.values()]


def _returned(result: Any, with_lse: bool) -> Any:
    out, lse = result
    out = out.transpose(-3, -2)
    return (out, lse, None) if with_lse else out


def _refuse_gradients(tensors: Mapping[str, Any]) -> None:
    for name, x in tensors.items():
        if torch.is_grad_enabled() and getattr(x, "requires_grad", False):
            raise UnsupportedError(
                f"{name} requires a gradient, and a call with a cache has none; "
                "torch.no_grad() is accepted"
            )


def _pages(block_table: Any, cache_batch_idx: Any) -> Any:
    """Give the pages of each sequence; an entry of a cache is one page."""
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("block_table and cache_batch_idx are given; one of them is accepted")
    if cache_batch_idx is not None:
        return array_of(cache_batch_idx)[:, np.newaxis]
    return None if block_table is None else array_of(block_table)


def _lengths(cache_seqlens: Any, capacity: int, B: int, *, appended: bool) -> Any:
    """Give the keys that each sequence has before the call."""
    if cache_seqlens is None:
        if appended:
            raise TypeError("cache_seqlens is None; with k the lengths before it are needed")
        cache_seqlens = capacity
    if isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = array_of(cache_seqlens)
    return integers("cache_seqlens", cache_seqlens, B)


def _query_positions(old: Any, N: int, *, in_order: bool) -> Any:
    """Say where the queries of each sequence stand: behind its keys, one by one or all together."""
    first = old[:, np.newaxis]
    if in_order and N > 1:
        return first + np.arange(N, like=old)
    return np.broadcast_to(first, (len(old), N))
