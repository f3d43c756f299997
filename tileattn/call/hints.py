"""Hints at the end of error messages: what the caller probably meant. Empty without a guess."""

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np

from tileattn.messages import called

# Arguments of PyTorch, FlashAttention and others: the option's name, or what to do.
ALIASES = {
    "attn_bias": "bias",
    "attn_mask": "mask= takes booleans, bias= what is added to the scores",
    "block_tables": "block_table",
    "cache_seqlens": "kv_lengths",
    "dropout": "dropout_p",
    "enable_gqa": "leave it out: k may have fewer heads than q",
    "is_causal": "causal",
    "k_scale": "k_descale",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None] if True marks padding",
    "logits_soft_cap": "softcap",
    "max_seqlen_k": "leave it out: cu_seqlens_k says how long each sequence is",
    "max_seqlen_q": "leave it out: cu_seqlens_q says how long each sequence is",
    "page_table": "block_table",
    "seqused_k": "kv_lengths",
    "sm_scale": "scale",
    "q_descale": "leave it out: q has 16 or 32 bits",
    "softmax_scale": "scale",
    "v_scale": "v_descale",
    "window_size": "window",
}


def option_hint(name: str, accepted: Iterable[str]) -> str:
    """Suggest an option for an unknown name: by the names of other libraries, or by spelling."""
    if name in ALIASES:
        meant = ALIASES[name]
        return f" ({meant})" if " " in meant else f" (did you mean {meant!r}?)"
    close = difflib.get_close_matches(name, accepted, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def dtype_hint(name: str, x: Any, dtypes: tuple[np.dtype[Any], ...]) -> str:
    """Suggest a remedy for an array of an unsupported dtype."""
    native = x.dtype.newbyteorder("=")
    if native != x.dtype and native in dtypes:
        return f"; {called(name)}.astype({called(name)}.dtype.newbyteorder('=')) swaps its bytes"
    if name == "mask" and x.dtype.kind == "f":
        return "; bias= takes what is added to the scores"
    return ""


def heads_hint(q: Any, k: Any) -> str:
    """Suggest swapping axes if the heads of k do not divide the heads of q."""
    # The length of a sequence is usually greater than the number of heads.
    if q.ndim < 3 or not k.shape[-2] or q.shape[-2] % k.shape[-2] or q.shape[-2] >= q.shape[-3]:
        return ""
    swapped = "x.swapaxes(-3, -2) of each is (B, H, N, D), without a copy"
    return f"; if these are (B, N, H, D), {swapped}"


def broadcast_hint(name: str, x: Any, shape: tuple[int, int, int, int]) -> str:
    """Suggest new axes for a bias or mask that does not broadcast."""
    B, _, Nq, Nk = shape
    if x.shape == (B, Nq, Nk):
        return f"; {called(name)}[:, None] adds the axis of the heads"
    if x.shape != (B, Nk):
        return ""
    hint = f"; {called(name)}[:, None, None, :] adds the axes of heads and queries"
    return f"{hint}, and kv_lengths= masks out keys past an end" if name == "mask" else hint
