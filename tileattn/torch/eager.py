"""Calls past PyTorch's dispatcher, where nobody listens there: the same calls at a fraction of it.

A call of plain values is validated once for each layout of q, k and v.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from tileattn.backends.cupy.backend import CupyCall
from tileattn.call_cache import CALLS, default_backend, values_of
from tileattn.torch import operators
from tileattn.torch.cuda import Pass
from tileattn.torch.handles import named
from tileattn.torch.operators import INPUTS, TENSORS

_KINDS = frozenset({torch.Tensor, torch.nn.Parameter})  # subclasses may want to see operators
_HANDLES = [n for n, kind in enumerate(INPUTS.values()) if kind == "str?"]
_DETERMINISTIC = [*INPUTS].index("deterministic")
_DENSE: set[int] = set()  # the dispatch keys of dense tensors, as they are met
_keys_of = torch._C._dispatch_keys


def is_eager() -> bool:
    """Whether nothing traces, transforms or intercepts operators."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and _is_intercepted())
        or torch._C._get_tracing_state()
        or forward_ad._current_level >= 0
    )


def _is_intercepted() -> bool:
    """Whether a mode sees functions that is more than a default device."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def layouts(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...] | None:
    """Write down how tensors lie in memory; None if what is there are not simply their elements."""
    key: list[Any] = []
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) in _KINDS and (_keys_of(x).raw_repr() in _DENSE or _is_dense(x)):
            key += (x.dtype, x.shape, x.stride(), x.device)
        else:
            return None
    return tuple(key)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether PyTorch calls kernels on a tensor as it is: no negation is left to do, for one."""
    if x.device.type in ("cpu", "cuda"):
        for mode in (False, True):
            with torch.inference_mode(mode):
                _DENSE.add(_keys_of(torch.empty(0, device=x.device)).raw_repr())
    return _keys_of(x).raw_repr() in _DENSE


def signature(
    tensors: Sequence[Any], backend: Any, deterministic: Any, options: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Write down a call of plain values; None for others, and where operators are looked at.

    Calls of equal signatures are all valid or all invalid.
    """
    if type(backend) is not str or type(deterministic) is not bool or not is_eager():
        return None
    values = values_of(options)
    of_tensors = None if values is None else layouts(tensors)
    if of_tensors is None:
        return None
    default = default_backend() if backend == "auto" else None
    return of_tensors, backend, default, deterministic, values


class Call:
    """What a call brings besides tensors that each call has anew.

    Parameters
    ----------
    inputs : sequence
        Those of an operator, `INPUTS`.
    count : int
        How many of them, from the first on, are such tensors; all of ``aux`` are, too.
    """

    def __init__(self, inputs: Sequence[Any], count: int) -> None:
        self._fixed = tuple(inputs[count:-1])
        self._count = count
        self._deterministic = inputs[_DETERMINISTIC]
        # Functions and masks must not be dropped before the backward pass.
        self._alive = [named(inputs[n]) for n in _HANDLES if inputs[n] is not None]
        self._of_rows = count == 3
        self._forward: Pass | None = None
        self._backward: dict[Any, Pass] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward pass, and let autograd know of it."""
        if torch.is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    output: tuple[torch.Tensor, torch.Tensor] = _apply(self, *tensors)
                    return output
        return self.forward(*tensors)

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward pass."""
        if self._forward is not None:
            results = self._forward(*tensors)
            if results is not None:
                out, lse = results
                return out, lse
        inputs = self._complete(tensors)
        output = operators.forward(*inputs)
        if self._forward is None and self._of_rows and output[0].is_cuda:
            call = operators.prepared(inputs)
            if isinstance(call, CupyCall):
                self._forward = Pass(call, None, output)
        return output

    def backward(
        self, needs: Sequence[bool], dout: Any, dlse: Any, out: Any, lse: Any, *tensors: Any
    ) -> tuple[Any, ...]:
        """Compute the gradients that are needed, None for the others."""
        dout = operators.upstream(dout, out)
        # With gradients enabled, those of gradients are asked for: operators refuse them.
        eager = not torch.is_grad_enabled() and is_eager()
        rows = (*tensors, out, dout, lse, dlse)
        key = layouts(rows) if eager else None
        known = self._backward.get(key)
        if known is not None:
            grads = known(*(rows if dlse is not None else rows[:-1]))
            if grads is not None:
                return tuple(x if need else None for x, need in zip(grads, needs, strict=True))
        run = torch.ops.tileattn.backward if key is None else operators.backward
        inputs, others = self._complete(tensors), [False] * len(self._fixed)
        needed = (*needs[: self._count], *others, list(needs[self._count :]))
        found = operators.gradients(run, needed, dout, dlse, out, lse, inputs)
        if known is None and key is not None and self._of_rows and out.is_cuda:
            call = operators.prepared(inputs, (dout, out, lse, dlse))
            if isinstance(call, CupyCall):
                self._backward[key] = Pass(call, self._deterministic, tensors)
        return *found[: self._count], *found[-1]

    def _complete(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        n = self._count
        return *tensors[:n], *self._fixed, list(tensors[n:])


class _Function(torch.autograd.Function):  # type: ignore[misc]  # untyped
    """A call, its forward pass with its backward one."""

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


# Past what `apply` does for transforms, of which there are none here: a quarter of its time.
_apply = super(torch.autograd.Function, _Function).apply


def forward(inputs: Sequence[Any], key: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a call that is new: as an operator, or past the dispatcher.

    ``key`` is its signature; under it the call is kept when it has succeeded.
    """
    *others, aux = inputs
    tensors = (*others[: len(TENSORS)], *aux)
    if key is None and (not is_eager() or layouts(tensors) is None):
        return torch.ops.tileattn.forward(*inputs)  # type: ignore[no-any-return]  # untyped
    count = len(TENSORS) if key is None else 3
    call = Call(inputs, count)
    output = call(*(tensors if key is None else tensors[:3]))
    CALLS.keep(key, call)
    return output
