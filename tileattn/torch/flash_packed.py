"""The calls of the package flash_attn on packed queries, keys and values."""

from typing import Any

import torch

from tileattn.torch.flash_options import NAMES, Integers, Window, attended, offsets, unpacked


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
    """Do what ``flash_attn.flash_attn_qkvpacked_func`` does.

    Parameters
    ----------
    qkv : torch.Tensor, shape (B, N, 3, H, D)
        Queries, keys and values.
    dropout_p, softmax_scale : float
        As `flash_attn_func`.
    causal : bool
        As `flash_attn_func`.
    window_size : (int, int)
        As `flash_attn_func`.
    softcap : float
        As `flash_attn_func`.
    alibi_slopes : torch.Tensor, shape (Hq,) or (B, Hq), or None
        As `flash_attn_func`.
    deterministic, return_attn_probs : bool
        As `flash_attn_func`.
    learnable_sink : torch.Tensor, shape (Hq,), or None
        As `flash_attn_func`.

    Returns
    -------
    torch.Tensor, shape (B, N, Hq, Dv), or (out, softmax_lse, None)
        As `flash_attn_func`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `tileattn.torch.attention`.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(2, 100, 3, 4, 32), causal=True).shape
    torch.Size([2, 100, 4, 32])
    """
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    rows = unpacked("qkv", qkv, "qkv")
    return attended(rows, dropout_p, deterministic, return_attn_probs, given)


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
    """Do what ``flash_attn.flash_attn_kvpacked_func`` does.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Nq, Hq, D)
        Queries.
    kv : torch.Tensor, shape (B, Nk, 2, Hkv, D)
        Keys and values.
    dropout_p, softmax_scale : float
        As `flash_attn_func`.
    causal : bool
        As `flash_attn_func`.
    window_size : (int, int)
        As `flash_attn_func`.
    softcap : float
        As `flash_attn_func`.
    alibi_slopes : torch.Tensor, shape (Hq,) or (B, Hq), or None
        As `flash_attn_func`.
    deterministic, return_attn_probs : bool
        As `flash_attn_func`.
    learnable_sink : torch.Tensor, shape (Hq,), or None
        As `flash_attn_func`.

    Returns
    -------
    torch.Tensor, shape (B, Nq, Hq, Dv), or (out, softmax_lse, None)
        As `flash_attn_func`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `tileattn.torch.attention`.
    """
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    rows = {"q": q, **unpacked("kv", kv, "kv")}
    return attended(rows, dropout_p, deterministic, return_attn_probs, given)


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
    """Do what ``flash_attn.flash_attn_varlen_qkvpacked_func`` does.

    Parameters
    ----------
    qkv : torch.Tensor, shape (T, 3, H, D)
        Queries, keys and values of all sequences.
    cu_seqlens : torch.Tensor, shape (S + 1,)
        Where each sequence starts.
    max_seqlen : int or None
        Not needed, and not looked at.
    dropout_p, softmax_scale : float
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
    learnable_sink : torch.Tensor, shape (Hq,), or None
        As `flash_attn_func`.

    Returns
    -------
    torch.Tensor, shape (T, Hq, Dv), or (out, softmax_lse, None)
        As `flash_attn_varlen_func`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `tileattn.torch.attention`.
    """
    del max_seqlen
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    rows = unpacked("qkv", qkv, "qkv")
    names = NAMES | {"cu_seqlens_q": "cu_seqlens"}
    places = {"cu_seqlens_q": offsets(cu_seqlens=cu_seqlens)["cu_seqlens"]}
    return attended(rows, dropout_p, deterministic, return_attn_probs, given, names, **places)


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
    """Do what ``flash_attn.flash_attn_varlen_kvpacked_func`` does.

    Parameters
    ----------
    q : torch.Tensor, shape (Tq, Hq, D)
        Queries of all sequences.
    kv : torch.Tensor, shape (Tk, 2, Hkv, D)
        Keys and values of all sequences.
    cu_seqlens_q, cu_seqlens_k : torch.Tensor, shape (S + 1,)
        Where the queries and the keys of each sequence start.
    max_seqlen_q, max_seqlen_k : int or None
        Not needed, and not looked at.
    dropout_p, softmax_scale : float
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
    learnable_sink : torch.Tensor, shape (Hq,), or None
        As `flash_attn_func`.

    Returns
    -------
    torch.Tensor, shape (Tq, Hq, Dv), or (out, softmax_lse, None)
        As `flash_attn_varlen_func`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `tileattn.torch.attention`.
    """
    del max_seqlen_q, max_seqlen_k
    given = softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    places = offsets(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    rows = {"q": q, **unpacked("kv", kv, "kv")}
    return attended(rows, dropout_p, deterministic, return_attn_probs, given, **places)
