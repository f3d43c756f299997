"""``tileattn.torch.append_kv``: caches of keys and values that grow in place."""

from typing import Any

import torch

import tileattn
from tileattn.messages import must_be
from tileattn.torch import library
from tileattn.torch.inputs import descale_tensor, integer_tensor, refuse_gradients
from tileattn.torch.tensors import (
    array_of,
    check_elements,
    check_integers,
    check_tensor,
    on,
    tensor_of,
)
from tileattn.validation import check_flags

_INPUTS = {
    "k_cache": "Tensor(a!)",
    "v_cache": "Tensor(b!)",
    **dict.fromkeys(("k", "v", "kv_lengths"), "Tensor"),
    **dict.fromkeys(("block_table", "cu_seqlens", "cos", "sin"), "Tensor?"),
    "k_descale": "Tensor(c!)?",
    "v_descale": "Tensor(d!)?",
    "interleaved": "bool",
}


def append_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kv_lengths: Any,
    block_table: Any = None,
    cu_seqlens: Any = None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    interleaved: bool = False,
    k_descale: Any = None,
    v_descale: Any = None,
) -> torch.Tensor:
    """Append new keys and values to a cache of tensors, in place, as `tileattn.append_kv` does.

    Parameters
    ----------
    k_cache : torch.Tensor, shape (B, Hkv, capacity, D), or with pages (pages, Hkv, page, D)
        Keys, on the CPU or on an NVIDIA GPU; any strides.
    v_cache : torch.Tensor, shape (B, Hkv, capacity, Dv), or with pages (pages, Hkv, page, Dv)
        Values. All tensors are on the device of k_cache; integers may also be on the CPU.
    k : torch.Tensor, shape (B, Hkv, N, D), or packed (Hkv, T, D)
        New keys, of the dtype of the cache. On the CPU, caches of float8_e4m3fn and int8 also take
        float16, bfloat16 and float32, and quantise them.
    v : torch.Tensor, shape (B, Hkv, N, Dv), or packed (Hkv, T, Dv)
        New values.
    kv_lengths : int, torch.Tensor or sequence of int of shape (B,)
        Number of keys in the cache for each sequence, without the new ones.
    block_table : torch.Tensor or sequence of int, shape (B, pages of a sequence), or None
        Key j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``.
    cu_seqlens : torch.Tensor or sequence of int, shape (B + 1,), or None
        Offsets of the new tokens of each sequence, if they are packed.
    rotary : (torch.Tensor, torch.Tensor) or None
        ``cos`` and ``sin`` of `rope`: each new key is rotated at its position in its sequence.
    interleaved : bool
        Which columns are a pair, as in `rope`.
    k_descale, v_descale : float or torch.Tensor of float32, or None
        As in `tileattn.append_kv`; a tensor with a number for each token is written.

    Returns
    -------
    torch.Tensor of int64, shape (B,)
        The new lengths; on the device where ``kv_lengths`` or ``cu_seqlens`` is.

    Raises
    ------
    TypeError, ValueError
        As `tileattn.append_kv`; the message names the argument, and nothing is written.
    UnsupportedError
        If a tensor requires a gradient while gradients are recorded; under ``torch.vmap``; if a
        tensor is sparse, nested or on another kind of device.

    Notes
    -----
    The call has no gradient. It is one operator that writes to the caches, and ``torch.compile``
    and autograd know it: if an earlier graph needs the old contents, its backward pass raises an
    error. On a GPU one kernel on PyTorch's current stream does all of it. If the lengths are on the
    GPU, the host does not wait for it.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch import append_kv
    >>> k_cache, v_cache = torch.zeros(2, 2, 1, 100, 8).unbind()
    >>> k, v = torch.ones(2, 2, 1, 3, 8).unbind()
    >>> append_kv(k_cache, v_cache, k, v, kv_lengths=[0, 40])
    tensor([ 3, 43])
    >>> k_cache[1, 0, 38:45, 0]
    tensor([0., 0., 1., 1., 1., 0., 0.])
    """
    check_flags(interleaved=interleaved)
    given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    tables = _tables(rotary)
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    descales = {
        name: descale_tensor(name, x, k_cache) for name, x in descales.items() if x is not None
    }
    for name, x in (given | tables | descales).items():
        check_tensor(name, x, None if name == "k_cache" else k_cache.device, first="k_cache")
    if not torch.compiler.is_compiling():
        check_elements("k_cache", k_cache)
        check_elements("v_cache", v_cache)
        for name, x in descales.items():
            check_elements(name, x)
    refuse_gradients(given | tables | descales, "append_kv")
    if kv_lengths is None:
        raise TypeError(must_be("kv_lengths", "an integer, or integers of shape (B,)", None))
    integers = {"kv_lengths": kv_lengths, "block_table": block_table, "cu_seqlens": cu_seqlens}
    for name, x in integers.items():
        if x is not None:
            integers[name] = integer_tensor(name, x)
            check_integers(name, integers[name], k_cache.device, first="k_cache")
    inputs = (*given.values(), *integers.values(), tables.get("cos"), tables.get("sin"))
    inputs = (*inputs, descales.get("k_descale"), descales.get("v_descale"))
    lengths: torch.Tensor = library.call("append_kv", _run, *inputs, bool(interleaved))
    return lengths


def _tables(rotary: Any) -> dict[str, torch.Tensor]:
    """Return the tables of a rotation by name; none without rotation."""
    if rotary is None:
        return {}
    if not isinstance(rotary, tuple) or len(rotary) != 2:
        raise TypeError(must_be("rotary", "a tuple (cos, sin) or None", rotary))
    return dict(zip(("cos", "sin"), rotary, strict=True))


def _run(*inputs: Any) -> torch.Tensor:
    given = dict(zip(_INPUTS, inputs, strict=True))
    caches = [given["k_cache"], given["v_cache"]]
    caches += [x for x in (given["k_descale"], given["v_descale"]) if x is not None]
    with on(caches[0].device):
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        x = given | {name: array_of(y) for name, y in tensors.items()}
        cos, sin = x.pop("cos"), x.pop("sin")
        new = tileattn.append_kv(**x, rotary=None if cos is None else (cos, sin))
        if given["k"].shape[-2]:
            torch.autograd.graph.increment_version(caches)
        return tensor_of(new)


def _fake(*inputs: Any) -> torch.Tensor:
    given = dict(zip(_INPUTS, inputs, strict=True))
    entries = given["k_cache" if given["block_table"] is None else "block_table"].shape[0]
    counted = [x for x in (given["kv_lengths"], given["cu_seqlens"]) if x is not None]
    place = next((x for x in counted if not x.is_cpu), counted[0])
    return place.new_empty((entries,), dtype=torch.int64)


library.define(
    *("append_kv", _INPUTS, "Tensor", _run, _fake),
    no_batches="append_kv does not append keys",
)
