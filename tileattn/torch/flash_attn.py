"""The functions of the package flash_attn, with its layouts and arguments."""

from typing import Any

import torch

from tileattn.torch.flash_cache import flash_attn_with_kvcache
from tileattn.torch.flash_options import NAMES, Integers, Window, attend_flash, offsets, unpack

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


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
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Any:
    """Compute what ``flash_attn.flash_attn_func`` does.

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
        Keys to the left and right; -1 or None leaves a side open.
    softcap : float
        Caps the scaled products; 0 is no cap.
    alibi_slopes : torch.Tensor, shape (Hq,) or (B, Hq), or None
        Subtracts ``slope * |i + Nk - Nq - j|``.
    deterministic : bool
        Compute bitwise reproducible gradients.
    return_attn_probs : bool
        Return the logsumexp, too.
    learnable_sink : torch.Tensor, shape (Hq,), or None
        Logits that join the denominator of the softmax only. It has a gradient.

    Returns
    -------
    torch.Tensor, shape (B, Nq, Hq, Dv), or (out, softmax_lse, None)
        The output, or with ``return_attn_probs`` the logsumexp, too, of shape (B, Hq, Nq).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As in `tileattn.torch.attention`.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 32)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 100, 4, 32])
    """
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    rows = {"q": q, "k": k, "v": v}
    return attend_flash(rows, dropout_p, deterministic, return_attn_probs, given)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None,
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
    block_table: Integers | None = None,
    *,
    seqused_k: Integers | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> Any:
    """Compute what ``flash_attn.flash_attn_varlen_func`` does.

    Parameters that are not listed are as in `flash_attn_func`.

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
    cu_seqlens_k : torch.Tensor, shape (S + 1,), or None
        Where the keys of each sequence start. With pages only the lengths count, and it may be
        None if ``seqused_k`` has them.
    max_seqlen_q, max_seqlen_k : int or None
        Ignored: the library needs no maximum.
    alibi_slopes : torch.Tensor, shape (Hq,) or (S, Hq), or None
        Slopes for each head, or for each sequence and head.
    block_table : torch.Tensor, shape (S, pages of a sequence), or None
        The pages of each sequence; such a call has no gradients.
    seqused_k : torch.Tensor, shape (S,), or None
        Number of keys in use, from the first key of each sequence on; None is all keys.

    Returns
    -------
    torch.Tensor, shape (Tq, Hq, Dv), or (out, softmax_lse, None)
        The output, or with ``return_attn_probs`` the logsumexp, too, of shape (Hq, Tq).
    """
    del max_seqlen_q, max_seqlen_k
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    places = offsets(cu_seqlens_q=cu_seqlens_q) | {"kv_lengths": seqused_k}
    if block_table is None:
        places |= offsets(cu_seqlens_k=cu_seqlens_k)
    else:
        places["block_table"] = block_table
        if seqused_k is None:
            places["kv_lengths"] = offsets(cu_seqlens_k=cu_seqlens_k)["cu_seqlens_k"].diff()
    lengths = "cu_seqlens_k" if seqused_k is None else "seqused_k"
    rows, names = {"q": q, "k": k, "v": v}, NAMES | {"kv_lengths": lengths}
    return attend_flash(rows, dropout_p, deterministic, return_attn_probs, given, names, **places)


# --- queries, keys and values in one tensor -------------------------------------------------------


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Any:
    """Compute what ``flash_attn.flash_attn_qkvpacked_func`` does.

    Other parameters and results are as in `flash_attn_func`.

    Parameters
    ----------
    qkv : torch.Tensor, shape (B, N, 3, H, D)
        Queries, keys and values.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(2, 100, 3, 4, 32), causal=True).shape
    torch.Size([2, 100, 4, 32])
    """
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    rows = unpack("qkv", qkv, "qkv")
    return attend_flash(rows, dropout_p, deterministic, return_attn_probs, given)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Any:
    """Compute what ``flash_attn.flash_attn_kvpacked_func`` does.

    Other parameters and results are as in `flash_attn_func`.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Nq, Hq, D)
        Queries.
    kv : torch.Tensor, shape (B, Nk, 2, Hkv, D)
        Keys and values.
    """
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    rows = {"q": q, **unpack("kv", kv, "kv")}
    return attend_flash(rows, dropout_p, deterministic, return_attn_probs, given)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: Integers,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Any:
    """Compute what ``flash_attn.flash_attn_varlen_qkvpacked_func`` does.

    Other parameters and results are as in `flash_attn_varlen_func`.

    Parameters
    ----------
    qkv : torch.Tensor, shape (T, 3, H, D)
        Queries, keys and values of all sequences.
    cu_seqlens : torch.Tensor, shape (S + 1,)
        Where each sequence starts.
    max_seqlen : int or None
        Ignored: the library needs no maximum.
    """
    del max_seqlen
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    rows = unpack("qkv", qkv, "qkv")
    names = NAMES | {"cu_seqlens_q": "cu_seqlens"}
    places = {"cu_seqlens_q": offsets(cu_seqlens=cu_seqlens)["cu_seqlens"]}
    return attend_flash(rows, dropout_p, deterministic, return_attn_probs, given, names, **places)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
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
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Any:
    """Compute what ``flash_attn.flash_attn_varlen_kvpacked_func`` does.

    Other parameters and results are as in `flash_attn_varlen_func`.

    Parameters
    ----------
    q : torch.Tensor, shape (Tq, Hq, D)
        Queries of all sequences.
    kv : torch.Tensor, shape (Tk, 2, Hkv, D)
        Keys and values of all sequences.
    """
    del max_seqlen_q, max_seqlen_k
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    places = offsets(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    rows = {"q": q, **unpack("kv", kv, "kv")}
    return attend_flash(rows, dropout_p, deterministic, return_attn_probs, given, **places)
