"""Forward and backward as PyTorch operators, for autograd, ``torch.compile`` and export."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import tileattn
from tileattn.call.options import DIFFERENTIABLE, OPTIONS, ROWS
from tileattn.call.scalars import seed_of
from tileattn.errors import UnsupportedError
from tileattn.expressions.parameters import Expression
from tileattn.torch.batches import rule_for_gradients, rule_for_vmap
from tileattn.torch.block_mask_names import block_mask_of
from tileattn.torch.tensors import array_of, on, tensor_of


class _Type(NamedTuple):
    """Type of an option in an operator's schema, and its conversion to the library's option."""

    name: str
    to_option: Callable[[Any], Any]


_TENSOR = _Type("Tensor?", array_of)
_TYPES: dict[str, _Type] = {  # by the value of an option
    "array": _TENSOR,
    "integers": _TENSOR,
    "descale": _TENSOR,
    "number": _Type("float?", lambda x: x),
    # A seed is a tensor, so that compiled programs and exported ones take a new one.
    "integer": _TENSOR._replace(to_option=lambda x: seed_of(x.item())),
    "function": _Type("str?", Expression.from_text),
    "block mask": _Type("str?", block_mask_of),
    "arrays": _Type("Tensor[]", lambda tensors: tuple(map(array_of, tensors))),
    "flag": _Type("bool", lambda x: x),
}
_SIDES = ("window", "causal")  # together they are two arguments, below
_OPTIONS = {
    name: _TYPES[x.value] for name, x in OPTIONS.items() if x.value in _TYPES and name not in _SIDES
}

TENSORS = (*ROWS, *(name for name, kind in _OPTIONS.items() if kind.name == "Tensor?"))
"""Names of the arguments that are one tensor; they come first."""

INPUTS = {
    **dict.fromkeys(ROWS, "Tensor"),
    **dict.fromkeys(TENSORS[len(ROWS) :], "Tensor?"),
    **{name: kind.name for name, kind in _OPTIONS.items() if not kind.name.startswith("Tensor")},
    **dict.fromkeys(("left", "right"), "SymInt?"),
    "backend": "str",
    "deterministic": "bool",
    "aux": "Tensor[]",
}
"""Arguments that both operators share, and their types in the schema.

Functions are texts of expressions, so that an exported program is self-contained.
"""


def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward operator without PyTorch's dispatcher; the arguments are `INPUTS`."""
    with on(inputs[0].device):
        result = on_arrays(tileattn.forward, inputs)
        return tensor_of(result.out), tensor_of(result.lse)


def on_arrays(call: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call ``tileattn.forward`` or ``tileattn.explain`` on the arrays of `INPUTS`."""
    given = dict(zip(INPUTS, inputs, strict=True))
    options = _options(given)
    del options["deterministic"]
    return call(*(array_of(given[name]) for name in ROWS), **options)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wrt: Sequence[str],
    *inputs: Any,
) -> list[torch.Tensor]:
    """Run the backward operator without PyTorch's dispatcher."""
    given = dict(zip(INPUTS, inputs, strict=True))
    with on(dout.device):
        options = _options(given | {"wrt": wrt})
        if dlse is not None:
            options["dlse"] = array_of(dlse)
        rows = (dout, *(given[name] for name in ROWS), out, lse)
        grads = tileattn.backward(*map(array_of, rows), **options)
        found = [*grads, *(grads.daux or ())]
        return [tensor_of(x) for x in found if x is not None]


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the given inputs to options of the library."""
    options = {name: x for name, x in given.items() if x is not None and name not in ROWS}
    for name, x in options.items():
        if name in _OPTIONS:
            options[name] = _OPTIONS[name].to_option(x)
    left, right = options.pop("left", None), options.pop("right", None)
    if left is not None or right is not None:
        options["window"] = left, right
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
    found = [given[name] for name in DIFFERENTIABLE if name in wrt and name != "aux"]
    if "aux" in wrt:
        found += filter(torch.is_floating_point, given["aux"])
    return [x.new_empty(x.shape) for x in found]


def _save(ctx: Any, inputs: Sequence[Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    given = dict(zip(INPUTS, inputs, strict=True))
    ctx.values = {name: x for name, x in given.items() if name not in (*TENSORS, "aux")}
    ctx.alive = None if given["block_mask"] is None else block_mask_of(given["block_mask"])
    ctx.save_for_backward(*output, *(given[name] for name in TENSORS), *given["aux"])


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    given = ctx.values | dict(zip(TENSORS, tensors, strict=False))
    given["aux"] = tensors[len(TENSORS) :]
    inputs = [given[name] for name in INPUTS]
    dout = upstream(dout, out)
    return gradients(call_backward, ctx.needs_input_grad, dout, dlse, out, lse, inputs)


def upstream(dout: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Return dout, or zeros if autograd passes None because only lse has a gradient."""
    return torch.zeros_like(out) if dout is None else dout


def gradients(
    run: Callable[..., Any],
    needs: Sequence[Any],
    dout: Any,
    dlse: Any,
    out: Any,
    lse: Any,
    inputs: Sequence[Any],
) -> tuple[Any, ...]:
    """Compute the needed gradients by ``run``, in the order of `INPUTS`; None for the others."""
    given = dict(zip(INPUTS, inputs, strict=True))
    needed = dict(zip(INPUTS, needs, strict=True))
    needed["aux"] = any(needed["aux"]) if given["aux"] else False
    wrt = [name for name in DIFFERENTIABLE if needed[name]]
    found = iter(run(dout, dlse, out, lse, wrt, *inputs))
    grads = dict.fromkeys(INPUTS)
    grads |= {name: next(found) for name in wrt if name != "aux"}
    floating = [needed["aux"] and x.is_floating_point() for x in given["aux"]]
    return tuple((grads | {"aux": [next(found) if x else None for x in floating]}).values())


def _refuse(_ctx: Any, *_grads: Any) -> None:
    raise UnsupportedError(
        "tileattn.torch.attention does not support double backward "
        "(the math backend of torch.nn.functional.scaled_dot_product_attention does)"
    )


def call_forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the forward operator, which PyTorch may trace, transform or intercept."""
    ops = torch.ops.tileattn
    run = ops.forward_reading_host if _reads_host(inputs) else ops.forward
    output: tuple[torch.Tensor, torch.Tensor] = run(*inputs)
    return output


def call_backward(*given: Any) -> list[torch.Tensor]:
    """Call the backward operator."""
    ops = torch.ops.tileattn
    run = ops.backward_reading_host if _reads_host(given[-len(INPUTS) :]) else ops.backward
    found: list[torch.Tensor] = run(*given)
    return found


def _reads_host(inputs: Sequence[Any]) -> bool:
    """Return True if the kernels of a GPU get values of tensors on the CPU, such as a seed."""
    tensors = inputs[: len(TENSORS)]
    return tensors[0].is_cuda and any(x is not None and x.is_cpu for x in tensors)


_shared = ", ".join(f"{kind} {name}" for name, kind in INPUTS.items())
_LIBRARY = torch.library.Library("tileattn", "DEF")
_RESULTS = {
    "forward": f"({_shared}) -> (Tensor, Tensor)",
    "backward": "(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, str[] wrt, "
    f"{_shared}) -> Tensor[]",
}

UNSAFE = [x for x in (getattr(torch.Tag, "cudagraph_unsafe", None),) if x is not None]
"""Tags of operators that read values on the host: a CUDA graph would repeat these values."""

for _name, _run, _fake in (
    ("forward", forward, _fake_forward),
    ("backward", backward, _fake_backward),
):
    for _suffix, _tags in (("", []), ("_reading_host", UNSAFE)):
        _own = f"{_name}{_suffix}"
        _LIBRARY.define(f"{_own}{_RESULTS[_name]}", tags=_tags)
        for _kind in ("CPU", "CUDA"):
            _LIBRARY.impl(_own, _run, _kind)
        torch.library.register_fake(f"tileattn::{_own}", _fake, lib=_LIBRARY)
        _operator = getattr(torch.ops.tileattn, _own)
        _rule = rule_for_vmap(_operator)
        torch.library.register_vmap(f"tileattn::{_own}", _rule, lib=_LIBRARY)
        _LIBRARY.impl(_own, rule_for_gradients(_rule), "Batched")
        if _name == "forward":
            torch.library.register_autograd(
                f"tileattn::{_own}", _differentiate, setup_context=_save, lib=_LIBRARY
            )
        else:
            torch.library.register_autograd(f"tileattn::{_own}", _refuse, lib=_LIBRARY)
