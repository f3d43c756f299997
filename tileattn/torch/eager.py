"""Calls that bypass PyTorch's dispatcher, to save its time, if nothing intercepts operators.

A call with the same signature as an earlier one is not validated again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from tileattn.call.options import DIFFERENTIABLE, ROWS
from tileattn.call.prepared import CALLS, default_backend, values_of
from tileattn.torch import operators
from tileattn.torch.batches import are_gradients_batched
from tileattn.torch.block_mask_names import block_mask_of
from tileattn.torch.cuda import TensorPass
from tileattn.torch.operators import INPUTS, TENSORS
from tileattn.torch.tensors import PLAIN

_PLACES = {name: n for n, name in enumerate(INPUTS)}
_DENSE = torch.strided
_Pass = Callable[[Sequence[Any]], Any]


def is_eager() -> bool:
    """Return True if nothing traces, transforms or intercepts operators."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and _is_intercepted())
        or torch._C._get_tracing_state()
        or forward_ad._current_level >= 0
    )


def _is_intercepted() -> bool:
    """Return True if a mode other than a default device intercepts functions."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def layouts(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...] | None:
    """Return dtypes, shapes, strides and devices; None unless all are plain dense tensors."""
    key: list[Any] = []
    try:
        for x in tensors:
            if x is None:
                key.append(None)
            elif type(x) in PLAIN and x.layout is _DENSE and not (x.is_neg() or x._is_zerotensor()):
                key += (x.dtype, x.shape, x.stride(), x.device)
            else:
                return None
    except RuntimeError:
        return None  # a nested tensor, which has no shape
    return tuple(key)


def signature(
    rows: Sequence[Any], backend: Any, deterministic: Any, options: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Return the signature of a call of tensors and plain values; the tensors' names come first.

    Calls of equal signatures are all valid or all invalid. None for other calls, and if something
    intercepts operators.
    """
    if type(backend) is not str or type(deterministic) is not bool or not is_eager():
        return None
    names: tuple[str, ...] = ROWS
    tensors, values = rows, values_of(options)
    if values is None:
        brought = tuple(name for name in TENSORS if type(options.get(name)) in PLAIN)
        if any(options[name].requires_grad for name in brought if name not in DIFFERENTIABLE):
            return None
        names, tensors = names + brought, (*rows, *map(options.get, brought))
        values = values_of({name: x for name, x in options.items() if name not in brought})
    of_tensors = None if values is None else layouts(tensors)
    if of_tensors is None:
        return None
    default = default_backend() if backend == "auto" else None
    return names, of_tensors, backend, default, deterministic, values


class Call:
    """Both passes for all calls of one signature, which bring only their tensors.

    Parameters
    ----------
    inputs : sequence
        Arguments of an operator, in the order of `INPUTS`.
    names : tuple of str
        Names of the arguments that each call brings: q, k and v first. Each brings ``aux``, too.
    is_kept : bool
        True if the call is kept for later calls.
    """

    def __init__(self, inputs: Sequence[Any], names: tuple[str, ...], is_kept: bool) -> None:
        self._fixed = [None if name in names else x for name, x in zip(INPUTS, inputs, strict=True)]
        self._names, self._places = names, [_PLACES[name] for name in names]
        self.options = names[len(ROWS) :]
        self._deterministic = inputs[_PLACES["deterministic"]]
        # Keep the block mask alive until the backward pass.
        block_mask = inputs[_PLACES["block_mask"]]
        self._alive = None if block_mask is None else block_mask_of(block_mask)
        # A pass by addresses reads no values, so all tensors must be on the GPU.
        self._by_addresses = is_kept and all(inputs[n].is_cuda for n in self._places)
        self._forward: _Pass | None = None
        self._backward: dict[Any, _Pass] = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward pass, recorded by autograd if a tensor requires a gradient."""
        if torch.is_grad_enabled():
            for x in tensors:
                if x.requires_grad:
                    output: tuple[torch.Tensor, torch.Tensor] = _apply(self, *tensors)
                    return output
        return self.forward(*tensors)

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward pass."""
        found = self._forward and self._forward(tensors)
        if found is None:
            inputs = self._complete(tensors)
            found = operators.forward(*inputs)
            if self._by_addresses and self._forward is None:
                results = dict(zip(("out", "lse"), found, strict=True))
                self._forward = self._pass(None, inputs, {}, results, [*results])
        out, lse = found
        return out, lse

    def backward(
        self, needs: Sequence[bool], dout: Any, dlse: Any, out: Any, lse: Any, *tensors: Any
    ) -> tuple[Any, ...]:
        """Compute the needed gradients; return None for the others."""
        dout = operators.upstream(dout, out)
        # If gradients are enabled this may be double backward, which only the operators refuse.
        eager = not torch.is_grad_enabled() and is_eager() and not are_gradients_batched()
        rows = (*tensors, dout, out, lse, dlse)
        of_rows = layouts(rows) if eager else None
        key = of_rows, *needs
        known = self._backward.get(key)
        grads: tuple[Any, ...] | None = known and known(rows)
        if grads is not None:
            return grads
        run = torch.ops.tileattn.backward if of_rows is None else operators.backward
        inputs, needed = self._complete(tensors), self._complete(needs)
        found = operators.gradients(run, needed, dout, dlse, out, lse, inputs)
        if self._by_addresses and known is None and of_rows is not None:
            others = {"dout": dout, "out": out, "lse": lse}
            others |= {} if dlse is None else {"dlse": dlse}
            likes = {f"d{name}": x for name, x in zip(self._names, tensors, strict=True)}
            returned = [name if need else None for name, need in zip(likes, needs, strict=True)]
            # One kernel computes the gradients of q, k and v.
            computed = {*returned, *(("dq", "dk", "dv") if any(needs[:3]) else ())}
            results = {name: x for name, x in likes.items() if name in computed}
            self._backward[key] = self._pass(self._deterministic, inputs, others, results, returned)
        return *(found[n] for n in self._places), *found[-1]

    def _complete(self, tensors: Sequence[Any]) -> list[Any]:
        """Put one item for each tensor in its place among the inputs."""
        inputs = [*self._fixed]
        for n, x in zip(self._places, tensors, strict=False):
            inputs[n] = x
        inputs[-1] = list(tensors[len(self._places) :])
        return inputs

    def _pass(
        self,
        deterministic: bool | None,
        inputs: Sequence[Any],
        others: Mapping[str, Any],
        results: Mapping[str, torch.Tensor],
        returned: Sequence[str | None],
    ) -> _Pass:
        """Make a pass by addresses of the call that has just run on ``inputs`` and ``others``."""
        call = operators.prepared(inputs, tuple(others.values()))
        known = None if call is None else call.address_pass(deterministic, [*results])
        if known is None:
            return _on_arrays
        return TensorPass(known, (*self._names, *others), results, returned)


def _on_arrays(_tensors: Sequence[Any]) -> None:
    """Return None, so that the caller runs the pass on arrays: addresses are not enough."""


class _Function(torch.autograd.Function):  # type: ignore[misc]  # untyped
    """Both passes of a `Call`, for autograd."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Any:
        output = call.forward(*tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        _, *needs = ctx.needs_input_grad
        return None, *ctx.call.backward(needs, dout, dlse, *ctx.saved_tensors)


# Function.apply spends a quarter of its time on transforms, of which there are none here.
_apply = super(torch.autograd.Function, _Function).apply


def forward(inputs: Sequence[Any], key: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a new call, through the operator if something intercepts operators.

    ``key`` is its signature; a call that succeeds is kept under it.
    """
    given, aux = dict(zip(TENSORS, inputs, strict=False)), inputs[-1]
    names = tuple(n for n, x in given.items() if x is not None) if key is None else key[0]
    tensors = (*(given[name] for name in names), *aux)
    if inputs[0].is_meta or (key is None and (not is_eager() or layouts(tensors) is None)):
        return torch.ops.tileattn.forward(*inputs)  # type: ignore[no-any-return]  # untyped
    call = Call(inputs, names, key is not None)
    output = call(*tensors)
    CALLS.keep(key, call)
    return output
