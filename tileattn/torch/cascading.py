"""``tileattn.torch.cascade``: attention over pages that sequences share, on tensors."""

from typing import Any

import torch

import tileattn
from tileattn.messages import must_be
from tileattn.results import Attention
from tileattn.torch import library
from tileattn.torch.inputs import descale_tensor, integer_tensor, number, refuse_gradients
from tileattn.torch.tensors import array_of, check_integers, check_tensor, on, tensor_of
from tileattn.validation import check_flags

_INTEGERS = "shared_lengths", "block_table", "kv_lengths"
_OPTIONAL = "tree_mask", "sinks", "k_descale", "v_descale"
_INPUTS = {
    **dict.fromkeys(("q", "k", "v", *_INTEGERS), "Tensor"),
    **dict.fromkeys(_OPTIONAL, "Tensor?"),
    "causal": "bool",
    **dict.fromkeys(("scale", "softcap"), "float?"),
    "backend": "str",
}


def cascade(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    shared_lengths: Any,
    block_table: Any,
    kv_lengths: Any,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    tree_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_descale: Any = None,
    v_descale: Any = None,
    backend: str = "auto",
) -> Attention:
    """Attention that reads pages which sequences share once, as `tileattn.cascade` does.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Hq, Nq, D)
        Queries, on the CPU or on an NVIDIA GPU.
    k : torch.Tensor, shape (pages, Hkv, page, D)
        Pages of keys. All tensors are on the device of q; integers may also be on the CPU.
    v : torch.Tensor, shape (pages, Hkv, page, Dv)
        Pages of values.
    shared_lengths : int, torch.Tensor or sequence of int of shape (G,)
        Number of keys that the sequences of each of G groups share. The batch is G groups of B / G
        consecutive sequences. An integer is for one group of all sequences.
    block_table : torch.Tensor or sequence of int, shape (B, pages of a sequence)
        Pages of each sequence.
    kv_lengths : int, torch.Tensor or sequence of int of shape (B,)
        Number of keys of each sequence, with the shared ones.
    causal : bool
        As in `tileattn.cascade`.
    scale : float, default 1/sqrt(D)
        As in `tileattn.cascade`.
    softcap : float or None
        As in `tileattn.cascade`.
    tree_mask : torch.Tensor of bool, shape (B, Nq, Nq) or (1, Nq, Nq), or None
        As in `tileattn.cascade`.
    sinks : torch.Tensor, shape (Hq,), or None
        As in `tileattn.cascade`.
    k_descale, v_descale : float or torch.Tensor of float32, or None
        As in `tileattn.cascade`.
    backend : str
        As for ``tileattn.forward``.

    Returns
    -------
    Attention
        The tensors ``(out, lse)``.

    Raises
    ------
    TypeError, ValueError
        As `tileattn.cascade`; the message names the argument.
    UnsupportedError
        If a tensor requires a gradient while gradients are recorded; if a tensor is sparse, nested
        or on another kind of device; if no backend supports the call.

    Notes
    -----
    The call has no gradient. It is one operator, which ``torch.compile`` knows. On a GPU it runs on
    PyTorch's current stream, and the host does not wait for it.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch import attention, cascade
    >>> q = torch.randn(2, 4, 1, 8)
    >>> k, v = torch.randn(2, 5, 2, 16, 8).unbind()  # 5 pages of 16 keys
    >>> pages = {"block_table": torch.tensor([[3, 0, 1], [3, 0, 4]]), "kv_lengths": [40, 33]}
    >>> out, lse = cascade(q, k, v, shared_lengths=32, **pages)
    >>> torch.allclose(out, attention(q, k, v, **pages), atol=1e-5)
    True
    """
    check_flags(causal=causal)
    given = {"q": q, "k": k, "v": v, "tree_mask": tree_mask, "sinks": sinks}
    given |= {"k_descale": k_descale, "v_descale": v_descale}
    given = {name: x for name, x in given.items() if x is not None or name in ("q", "k", "v")}
    for name in ("k_descale", "v_descale"):
        if name in given:
            given[name] = descale_tensor(name, given[name], q)
    for name, x in given.items():
        check_tensor(name, x, None if name == "q" else q.device)
    refuse_gradients(given, "cascade")
    integers = {"shared_lengths": shared_lengths, "block_table": block_table}
    integers["kv_lengths"] = kv_lengths
    for name, x in integers.items():
        if x is None:
            raise TypeError(must_be(name, "integers", None))
        integers[name] = integer_tensor(name, x)
        check_integers(name, integers[name], q.device)
    numbers = (
        None if x is None else number(name, x)
        for name, x in (("scale", scale), ("softcap", softcap))
    )
    if not isinstance(backend, str):
        raise TypeError(must_be("backend", "a name or 'auto'", backend))
    optional = (given.get(name) for name in _OPTIONAL)
    inputs = (q, k, v, *integers.values(), *optional, bool(causal), *numbers, backend)
    return Attention(*library.call("cascade", _run, *inputs))


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = dict(zip(_INPUTS, inputs, strict=True))
    with on(given["q"].device):
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        found = tileattn.cascade(**given | {name: array_of(x) for name, x in tensors.items()})
        return tensor_of(found.out), tensor_of(found.lse)


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = inputs[0], inputs[2]
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=sums)


library.define("cascade", _INPUTS, "(Tensor, Tensor)", _run, _fake)
