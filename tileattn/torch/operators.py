"""The two passes as operators of PyTorch: what autograd, ``torch.compile`` and export see."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tileattn
from tileattn.errors import UnsupportedError
from tileattn.torch.handles import named
from tileattn.torch.tensors import array_of, tensor_of

INPUTS = {
    **dict.fromkeys(("q", "k", "v"), "Tensor"),
    **dict.fromkeys(("bias", "sinks"), "Tensor?"),
    "aux": "Tensor[]",
    **dict.fromkeys(("alibi_slopes", "mask", "kv_lengths", "q_offset"), "Tensor?"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "block_table", "seed"), "Tensor?"),
    **dict.fromkeys(("scale", "softcap"), "float?"),
    "dropout_p": "float",
    **dict.fromkeys(("left", "right"), "SymInt?"),
    **dict.fromkeys(("score_mod", "mask_mod", "block_mask"), "str?"),
    "backend": "str",
    "deterministic": "bool",
}
"""Arguments of the forward operator, and their types there; the rest of the backward one's, too."""

TENSORS = tuple(name for name, kind in INPUTS.items() if kind in ("Tensor", "Tensor?"))
"""The arguments that are one tensor."""

_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "aux")  # in the order of INPUTS
_HANDLES = ("score_mod", "mask_mod", "block_mask")


def _forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = dict(zip(INPUTS, inputs, strict=True))
    options = _options(given)
    del options["deterministic"]
    result = tileattn.forward(*_arrays(given, "q", "k", "v"), **options)
    return tensor_of(result.out), tensor_of(result.lse)


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wrt: Sequence[str],
    *inputs: Any,
) -> list[torch.Tensor]:
    given = dict(zip(INPUTS, inputs, strict=True))
    grads = tileattn.backward(
        array_of(dout),
        *_arrays(given, "q", "k", "v"),
        array_of(out),
        array_of(lse),
        dlse=None if dlse is None else array_of(dlse),
        wrt=wrt,
        **_options(given),
    )
    found = [*grads, *(grads.daux or ())]
    return [tensor_of(x) for x in found if x is not None]


def _arrays(given: Mapping[str, Any], *names: str) -> list[Any]:
    return [array_of(given[name]) for name in names]


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Give the options of a call of the library, those that are absent left out."""
    options = {
        name: array_of(given[name])
        for name in TENSORS[3:]
        if name != "seed" and given[name] is not None
    }
    options |= {name: named(given[name]) for name in _HANDLES if given[name] is not None}
    names = ("scale", "softcap", "dropout_p", "backend", "deterministic")
    options |= {name: given[name] for name in names}
    if given["seed"] is not None:
        options["seed"] = int(given["seed"]) & (1 << 64) - 1
    if given["left"] is not None or given["right"] is not None:
        options["window"] = (given["left"], given["right"])
    if given["aux"]:
        options["aux"] = tuple(map(array_of, given["aux"]))
    return options


def _fake_forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v = inputs[:3]
    sums = torch.float64 if q.dtype is torch.float64 else torch.float32
    rows = q.shape[:-1]
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=sums)


def _fake_backward(
    _dout: Any, _dlse: Any, _out: Any, _lse: Any, wrt: Sequence[str], *inputs: Any
) -> list[torch.Tensor]:
    given = dict(zip(INPUTS, inputs, strict=True))
    found = [given[name] for name in _DIFFERENTIABLE[:-1] if name in wrt]
    if "aux" in wrt:
        found += filter(torch.is_floating_point, given["aux"])
    return [x.new_empty(x.shape) for x in found]


def _save(ctx: Any, inputs: Sequence[Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    given = dict(zip(INPUTS, inputs, strict=True))
    ctx.values = {name: x for name, x in given.items() if name not in (*TENSORS, "aux")}
    ctx.alive = [named(given[name]) for name in _HANDLES if given[name] is not None]
    ctx.save_for_backward(*output, *(given[name] for name in TENSORS), *given["aux"])


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    """Compute the gradients that are needed; autograd gives None where there is none upstream."""
    out, lse, *tensors = ctx.saved_tensors
    given = ctx.values | dict(zip(TENSORS, tensors, strict=False))
    given["aux"] = tensors[len(TENSORS) :]
    needed = dict(zip(INPUTS, ctx.needs_input_grad, strict=True))
    needed["aux"] = any(needed["aux"]) if given["aux"] else False
    wrt = [name for name in _DIFFERENTIABLE if needed[name]]
    dout = torch.zeros_like(out) if dout is None else dout
    inputs = (given[name] for name in INPUTS)
    found = iter(torch.ops.tileattn.backward(dout, dlse, out, lse, wrt, *inputs))
    grads = dict.fromkeys(INPUTS)
    grads |= {name: next(found) for name in wrt if name != "aux"}
    floating = [needed["aux"] and x.is_floating_point() for x in given["aux"]]
    return tuple((grads | {"aux": [next(found) if x else None for x in floating]}).values())


def _refuse(_ctx: Any, *_grads: Any) -> None:
    raise UnsupportedError(
        "second derivatives of tileattn.torch.attention are asked for; first ones are accepted "
        "(PyTorch's own attention, in its math backend, has second ones)"
    )


_of_both = ", ".join(f"{kind} {name}" for name, kind in INPUTS.items())
_LIBRARY = torch.library.Library("tileattn", "DEF")
_LIBRARY.define(f"forward({_of_both}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, str[] wrt, {_of_both})"
    " -> Tensor[]"
)
for _name, _run, _fake in (
    ("forward", _forward, _fake_forward),
    ("backward", _backward, _fake_backward),
):
    _LIBRARY.impl(_name, _run, "CPU")
    torch.library.register_fake(f"tileattn::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "tileattn::forward", _differentiate, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd("tileattn::backward", _refuse, lib=_LIBRARY)
