"""flash_attn's function for a key/value cache, which it may append to."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

import tileattn
from tileattn.backends.registry import candidates, supporting
from tileattn.call.parse import parse
from tileattn.call.sequences import integers
from tileattn.call.window import window_of
from tileattn.messages import calling
from tileattn.torch import library
from tileattn.torch.flash_options import NAMES, Integers, Window, check_tensors, to_options
from tileattn.torch.functional import attend
from tileattn.torch.inputs import integer_tensor, number, refuse_gradients
from tileattn.torch.tensors import array_of, check_elements, check_integers, on, tensor_of
from tileattn.validation import check_flags

_NAMES = NAMES | {
    **{"kv_lengths": "cache_seqlens", "positions": "cache_seqlens", "mask": "cache_leftpad"},
    **{"cos": "rotary_cos", "sin": "rotary_sin", "interleaved": "rotary_interleaved"},
}
_ROWS = {"k": "k_cache", "v": "v_cache"}
_AXES = {"cache_batch_idx": ("B,",), "block_table": ("B", "pages of a sequence")}
_CACHED = {
    "q": "(B, N, H, D)",
    **dict.fromkeys(("k", "v"), "(B, N, H, D)"),
    **dict.fromkeys(("k_cache", "v_cache"), "(entries, N, H, D) or (pages, page, H, D)"),
}


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: Integers | int | None = None,
    cache_batch_idx: Integers | None = None,
    cache_leftpad: Integers | None = None,
    block_table: Integers | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Any:
    """Compute what ``flash_attn.flash_attn_with_kvcache`` does, without gradients.

    Parameters that are not listed are as in `flash_attn_func`.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Nq, Hq, D)
        Queries.
    k_cache : torch.Tensor, shape (entries, capacity, Hkv, D), or with pages (pages, page, Hkv, D)
        Keys; new keys are written into it.
    v_cache : torch.Tensor, shape (entries, capacity, Hkv, Dv), or with pages (pages, page, Hkv, Dv)
        Values; new values are written into it.
    k : torch.Tensor, shape (B, N, Hkv, D), or None
        New keys; they are appended before the queries attend.
    v : torch.Tensor, shape (B, N, Hkv, Dv), or None
        New values.
    rotary_cos, rotary_sin : torch.Tensor, shape (positions, rotary dimension / 2), or None
        Rotate q and k. New keys are at the positions from ``cache_seqlens`` on. So are queries
        with causal or a window; otherwise all queries are at position ``cache_seqlens``.
    cache_seqlens : torch.Tensor, shape (B,), int or None
        Number of keys in the cache before the call; None is its capacity.
    cache_batch_idx : torch.Tensor, shape (B,), or None
        Entry of the cache of each sequence; None is 0, 1, ..., B - 1.
    cache_leftpad : torch.Tensor, shape (B,), or None
        Number of keys to mask out at the start of each sequence.
    block_table : torch.Tensor, shape (B, pages of a sequence), or None
        The pages of each sequence.
    rotary_interleaved : bool
        Rotate adjacent pairs (GPT-J); False rotates halves (GPT-NeoX).
    num_splits : int
        Ignored: the library chooses the number of splits.
    return_softmax_lse : bool
        Return the logsumexp, too.

    Returns
    -------
    torch.Tensor, shape (B, Nq, Hq, Dv), or (out, softmax_lse)
        The output, or with ``return_softmax_lse`` the logsumexp, too, of shape (B, Hq, Nq).

    Raises
    ------
    TypeError, ValueError
        As in `tileattn.torch.attention` and `tileattn.append_kv`; the cache is then unchanged.
    UnsupportedError
        If a tensor needs a gradient.

    Notes
    -----
    A call with new keys is one operator that writes to the caches, and ``torch.compile`` and
    autograd know it: if an earlier graph needs the old contents, its backward pass raises an error.
    """
    del num_splits
    check_flags(rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= _pair(k=k, v=v) | _pair(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    more = {"alibi_slopes": alibi_slopes, "learnable_sink": learnable_sink}
    given |= {name: x for name, x in more.items() if x is not None}
    for name, x in check_tensors(given).items():
        if name in _CACHED and x.ndim != 4:
            raise ValueError(f"{name} must have four axes, {_CACHED[name]}; got {tuple(x.shape)}")
        if name.endswith("_cache") and not torch.compiler.is_compiling():
            check_elements(name, x)
    refuse_gradients(given)
    places = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx}
    places |= {"cache_leftpad": cache_leftpad, "block_table": block_table}
    known = {name: integer_tensor(name, x) for name, x in places.items() if x is not None}
    for name, x in known.items():
        check_integers(name, x, q.device)
        if name in _AXES and x.ndim != len(_AXES[name]):
            shape = ", ".join(_AXES[name])
            raise ValueError(f"{name} must have shape ({shape}); got {tuple(x.shape)}")
    lengths, pages = known.get("cache_seqlens"), _pages(known)
    options = to_options(softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink)
    capacity = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    names = _NAMES | ({"block_table": "cache_batch_idx"} if "cache_batch_idx" in known else {})
    if "cache_leftpad" in known:
        options["mask"] = _unpadded(known["cache_leftpad"], capacity, q)
    if "k" in given and lengths is None:
        raise TypeError("cache_seqlens must be given with k: the lengths before it; got None")
    if "k" in given or "rotary_cos" in given:
        new = (
            x[:, :0] if y is None else y for x, y in zip((k_cache, v_cache), (k, v), strict=True)
        )
        lengths = integer_tensor("cache_seqlens", capacity) if lengths is None else lengths
        tensors = [q, k_cache, v_cache, *new, rotary_cos, rotary_sin, lengths, pages]
        with nullcontext() if torch.compiler.is_compiling() else calling(names):
            out, lse = _append_and_attend(tensors, options, rotary_interleaved)
    else:
        if lengths is None and pages is not None:
            lengths = integer_tensor("cache_seqlens", capacity)
        options |= {"kv_lengths": lengths, "block_table": pages}
        rows = [x.transpose(1, 2) for x in (q, k_cache, v_cache)]
        out, lse = attend(rows, options, True, names=_ROWS | names)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _pair(**both: Any) -> dict[str, Any]:
    """Return two arguments that go together, and nothing if both are None."""
    return {} if all(x is None for x in both.values()) else both


def _pages(places: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the page table; a cache entry counts as one page."""
    entries = places.get("cache_batch_idx")
    if entries is None:
        return places.get("block_table")
    if "block_table" in places:
        raise ValueError("cache_batch_idx must be None with block_table")
    return entries[:, None]


def _unpadded(leftpad: torch.Tensor, capacity: int, q: torch.Tensor) -> torch.Tensor:
    """Make the mask of the keys that come after the left padding."""
    if leftpad.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cache_leftpad must have dtype int32 or int64; got {leftpad.dtype}")
    if leftpad.shape != q.shape[:1]:
        raise ValueError(f"cache_leftpad must have shape ({len(q)},); got {tuple(leftpad.shape)}")
    if leftpad.device.type == "cpu" and not torch.compiler.is_compiling() and (leftpad < 0).any():
        raise ValueError(f"cache_leftpad must not be negative; got {leftpad.tolist()}")
    return torch.arange(capacity, device=q.device) >= leftpad.to(q.device)[:, None, None, None]


# --- the operator that appends and attends --------------------------------------------------------

_INPUTS = {
    "q": "Tensor",
    "k_cache": "Tensor(a!)",
    "v_cache": "Tensor(b!)",
    **dict.fromkeys(("k", "v"), "Tensor"),
    **dict.fromkeys(("rotary_cos", "rotary_sin"), "Tensor?"),
    "cache_seqlens": "Tensor",
    **dict.fromkeys(("block_table", "mask", "alibi_slopes", "sinks"), "Tensor?"),
    **dict.fromkeys(("scale", "softcap"), "float?"),
    **dict.fromkeys(("left", "right"), "SymInt?"),
    "interleaved": "bool",
}


def _append_and_attend(
    tensors: Sequence[Any], options: Mapping[str, Any], interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append and attend."""
    left, right = window_of(options["window"], options["causal"])
    own = [options.get(name) for name in ("mask", "alibi_slopes", "sinks")]
    numbers = [
        None if options[name] is None else number(name, options[name])
        for name in ("scale", "softcap")
    ]
    inputs = [*tensors, *own, *numbers, left, right, interleaved]
    found: tuple[torch.Tensor, torch.Tensor]
    found = library.call("append_and_attend", _append, *inputs)
    return found


def _append(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the operator without PyTorch's dispatcher."""
    given = dict(zip(_INPUTS, inputs, strict=True))
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    with on(given["q"].device):
        x = given | {name: array_of(y) for name, y in tensors.items()}
        q, k_cache, v_cache, k, v = (x[name].swapaxes(1, 2) for name in [*_INPUTS][:5])
        old = integers("cache_seqlens", x["cache_seqlens"], len(q))
        window, pages = (x["left"], x["right"]), x["block_table"]
        options = {name: x[name] for name in ("mask", "alibi_slopes", "sinks", "scale", "softcap")}
        options |= {"window": window, "kv_lengths": old, "block_table": pages}
        rotation = {"rotary": None, "interleaved": x["interleaved"]}
        if x["rotary_cos"] is not None:
            rotation["rotary"] = tables = x["rotary_cos"], x["rotary_sin"]
            positions = _query_positions(old, q.shape[2], in_order=window != (None, None))
            with calling({"x": "q"}):
                q = tileattn.rope(q, *tables, positions=positions, interleaved=x["interleaved"])
        # Refuse the call before it writes to the cache.
        arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        with calling(_ROWS):
            supporting(candidates("auto", arrays), parse(q, k_cache, v_cache, options)[0])
        options["kv_lengths"] = tileattn.append_kv(
            k_cache, v_cache, k, v, kv_lengths=old, block_table=pages, **rotation
        )
        if k.shape[2]:
            torch.autograd.graph.increment_version((given["k_cache"], given["v_cache"]))
        out, lse = tileattn.forward(q, k_cache, v_cache, **options)
        return tensor_of(out), tensor_of(lse)


def _query_positions(old: Any, N: int, *, in_order: bool) -> Any:
    """Return the positions of queries: after the keys, in order or all at the first one."""
    first = old[:, np.newaxis]
    if in_order and N > 1:
        return first + np.arange(N, like=old)
    return np.broadcast_to(first, (len(old), N))


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v_cache = inputs[:3]
    B, N, H, _ = q.shape
    sums = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty((B, H, N, v_cache.shape[-1])), q.new_empty((B, H, N), dtype=sums)


library.define(
    *("append_and_attend", _INPUTS, "(Tensor, Tensor)", _append, _fake),
    no_batches="flash_attn_with_kvcache does not append keys",
)
