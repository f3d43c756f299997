"""Calls that bypass PyTorch's dispatcher, to save its time, if nothing intercepts operators.

Calls of one kind have the same options, types of arguments, dtypes and devices. These are checked
once. The library checks sizes and numbers in each call.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

import tileattn
from tileattn.call.block_mask import BlockMask
from tileattn.call.options import DIFFERENTIABLE, ROWS
from tileattn.call.prepared import (
    CALLS,
    SEEN_OFTEN,
    KnownKind,
    SeenCall,
    default_backend,
    kind_of_options,
    kind_signature,
    signature,
)
from tileattn.expressions.parameters import Expression
from tileattn.torch import cuda, operators
from tileattn.torch.batches import are_gradients_batched
from tileattn.torch.cuda import TensorPass
from tileattn.torch.inputs import inputs_of
from tileattn.torch.tensors import PLAIN, array_of, first_run, on, tensor_of

_GRADIENTS = [f"d{name}" for name in DIFFERENTIABLE]
_NUMBERS = frozenset({bool, int, float, type(None)})
_SEQUENCES = frozenset({tuple, list})
_HASHED = _NUMBERS | {str, Expression}
_VALUES = _HASHED | {BlockMask, np.ndarray}
_Pass = Callable[[Sequence[Any]], Any]
_Run = _Pass | SeenCall


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


def holds_elements(x: torch.Tensor) -> bool:
    """Return True for a plain dense tensor whose elements are in its memory."""
    is_dense = x.layout is torch.strided and not x.is_nested
    return type(x) in PLAIN and is_dense and not (x.is_neg() or x._is_zerotensor())


def attend(
    rows: Sequence[Any], backend: Any, deterministic: bool, options: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output and the logsumexp, recorded by autograd if a tensor needs a gradient."""
    given = _sorted(rows, options) if type(backend) is str and is_eager() else None
    if given is not None:
        names, tensors, values = given
        default = default_backend() if backend == "auto" else None
        of_all = names, backend, default, deterministic
        key = _signature(of_all, tensors, values)
        known: tuple[Call, _Run] | None = None if key is None else CALLS.get(key)
        if known is not None:
            call, run = known
            return call(tensors, values, key, run)
        of_tensors = [(x.dtype, x.device, x.ndim) for x in tensors]
        of_values = kind_of_options(values)
        kind = None if of_values is None else ("tensors", of_all, *of_tensors, *of_values)
        of_kind: Call | None = CALLS.get(kind)
        if of_kind is not None:
            return of_kind(tensors, values, key)
    inputs = inputs_of(rows, backend, deterministic, options)
    if given is None or inputs[0].is_meta:
        return operators.call_forward(*inputs)
    call = Call(names, tensors, backend, deterministic)
    output = call(tensors, values, key)
    CALLS.keep(kind, call)
    return output


def _sorted(
    rows: Sequence[Any], options: Mapping[str, Any]
) -> tuple[tuple[str, ...], Sequence[torch.Tensor], Mapping[str, Any]] | None:
    """Sort the arguments of a call; None for unusual ones.

    Returns
    -------
    names : tuple of str
        Names of the options that are tensors.
    tensors : sequence of torch.Tensor
        The rows, the options with these names, and ``aux``.
    values : mapping
        The other options.
    """
    seed: Any = options.get("seed")
    if type(seed) in PLAIN and seed.is_cpu and seed.numel() == 1:
        options = {**options, "seed": seed.item()}
    names: tuple[str, ...] = ()
    tensors, values = rows, options
    for name, x in options.items():
        kind = type(x)
        if kind in PLAIN and (name in DIFFERENTIABLE or not x.requires_grad):
            names = *names, name
        elif kind in _SEQUENCES:
            if name != "aux" and not _NUMBERS.issuperset(map(type, x)):
                return None
        elif kind not in _VALUES:
            return None
    if names or "aux" in options:
        values = dict(options)
        aux = values.pop("aux", None) or ()
        tensors = *rows, *map(values.pop, names), *aux
    for x in tensors:
        if not (isinstance(x, torch.Tensor) and holds_elements(x)):
            return None
    return names, tensors, values


def _signature(
    first: Any, tensors: Sequence[torch.Tensor], values: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Return a key of the layouts of tensors and of values; None for values without a hash."""
    key: list[Any] = [first]
    for x in tensors:
        key += (x.dtype, x.shape, x.stride(), x.device)
    for name, value in values.items():
        kind = type(value)
        if kind in _SEQUENCES:
            key += name, kind, (*map(type, value),), (*value,)
        elif kind in _HASHED:
            key += name, kind, value
        else:
            return None
    return tuple(key)


class Call:
    """Both passes of all calls of one kind, which bring their tensors and their other options.

    Parameters
    ----------
    names : tuple of str
        Names of the options that are tensors. Each call brings q, k and v before them, and ``aux``
        after them.
    tensors : sequence of torch.Tensor
        The tensors of one of the calls.
    backend : str
        As for `attention`.
    deterministic : bool
        As for `attention`.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        tensors: Sequence[torch.Tensor],
        backend: str,
        deterministic: bool,
    ) -> None:
        self._given = (*ROWS, *names)
        self._most = sum(name in DIFFERENTIABLE for name in self._given)  # gradients but for aux
        self._backend, self._deterministic = backend, deterministic
        # A pass by addresses reads no values, so all tensors must be on the GPU.
        has_aux = len(tensors) > len(self._given)
        self._has_addresses = not has_aux and all(x.is_cuda for x in tensors)
        self._has_aux = has_aux
        self._first_run = cuda.first_run if self._has_addresses else first_run
        self._kinds: dict[bool | None, KnownKind] = {}  # by direction; what runs new calls

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        key: Any,
        run: _Run | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward pass, recorded by autograd if a tensor requires a gradient.

        ``key`` is the signature of the call, and ``run`` what is known for it.
        """
        if torch.is_grad_enabled():
            for x in tensors:
                if x.requires_grad:
                    kept = {name: _copied(x) for name, x in values.items()}
                    output: tuple[torch.Tensor, torch.Tensor]
                    output = _apply(self, key, run, kept, *tensors)
                    return output
        return self.forward(tensors, values, key, run)

    def forward(
        self,
        tensors: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        key: Any,
        run: _Run | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward pass."""
        output: tuple[torch.Tensor, torch.Tensor] | None
        output = self._by_addresses(None, tensors, values, key, run)
        if output is not None:
            return output
        with on(tensors[0].device):
            rows, options = self._arrays(tensors, values)
            self._plan(rows, options, run)
            out, lse = map(tensor_of, tileattn.forward(*rows, backend=self._backend, **options))
            self._learn(None, rows, options)
            if key is not None and (run is None or isinstance(run, SeenCall)):
                results = {"out": out, "lse": lse}
                made = self._pass(None, (rows, options), self._given, results, [*results])
                if made is not None:
                    CALLS.keep(key, (self, made))
        return out, lse

    def backward(
        self,
        needs: Sequence[bool],
        saved: Mapping[str, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        values: Mapping[str, Any],
    ) -> Sequence[torch.Tensor | None]:
        """Compute the needed gradients; return None for the others.

        ``saved`` are dout, out, lse and, if it has a gradient, dlse.
        """
        rows = *tensors, *saved.values()
        # If gradients are enabled this may be double backward, which only the operators refuse.
        is_plain = not torch.is_grad_enabled() and is_eager() and not are_gradients_batched()
        if not (is_plain and all(map(holds_elements, rows))):
            return self._dispatched(needs, saved, tensors, values)
        key = _signature((self, *needs), rows, values) if self._has_addresses else None
        seen: tuple[Call, _Run] | None = None if key is None else CALLS.get(key)
        run = None if seen is None else seen[1]
        direction = self._deterministic
        grads: Sequence[torch.Tensor | None] | None
        grads = self._by_addresses(direction, rows, values, key, run, needs)
        if grads is not None:
            return grads
        with on(tensors[0].device):
            arrays, options = self._arrays(tensors, values)
            others = {name: array_of(x) for name, x in saved.items()}
            every = *arrays, *others.values()
            self._plan(every, options, run)
            found = tileattn.backward(
                **dict(zip(ROWS, arrays, strict=True)), **others, wrt=self._wrt(needs),
                backend=self._backend, deterministic=self._deterministic, **options,
            )  # fmt: skip
            each = [getattr(found, f"d{name}", None) for name in self._given]
            each += found.daux or (None,) * (len(tensors) - len(each))
            needed = (x if need else None for x, need in zip(each, needs, strict=True))
            grads = [None if x is None else tensor_of(x) for x in needed]
            if "dlse" not in saved:
                self._learn(direction, every, options)
            if key is not None and (run is None or isinstance(run, SeenCall)):
                made = self._backward_pass(needs, saved, tensors, (every, options))
                if made is not None:
                    CALLS.keep(key, (self, made))
        return grads

    def _by_addresses(
        self,
        direction: bool | None,
        tensors: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        key: Any,
        run: _Run | None,
        needs: Sequence[bool] = (),
    ) -> Any:
        """Run a pass without arrays; None if this is not possible.

        ``direction`` is None for the forward pass, else ``deterministic``.
        """
        if run is not None and not isinstance(run, SeenCall):
            return run(tensors)
        known = self._kinds.get(direction)
        if known is None or key is None or (run is not None and run.count >= SEEN_OFTEN):
            return None
        names = self._given
        if len(tensors) not in (len(names), len(names) + 3):
            return None  # the logsumexp has a gradient
        gradients = tuple([name for name, need in zip(names[3:], needs[3:], strict=False) if need])
        found = self._first_run(known, names, tensors, values, direction, gradients)
        if found is None:
            return None
        if run is None:
            CALLS.keep(key, (self, SeenCall(known)))
        else:
            run.count += 1
        if direction is None:
            return tuple(found)
        grads = [getattr(found, f"d{name}", None) for name in names]
        return [x if need else None for x, need in zip(grads, needs, strict=True)]

    def _plan(self, arrays: Sequence[Any], options: Mapping[str, Any], run: _Run | None) -> None:
        """Let the library plan a call that first runs have run often enough."""
        if isinstance(run, SeenCall):
            CALLS.keep(signature(arrays, self._backend, options), run)

    def _learn(
        self, direction: bool | None, arrays: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """Keep what the library knows about the kind of a call that has run on arrays."""
        if not self._has_aux and direction not in self._kinds:
            known = CALLS.get(kind_signature(arrays, self._backend, options))
            if known is not None and known.call is not None:
                self._kinds[direction] = known

    def _arrays(
        self, tensors: Sequence[torch.Tensor], values: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """View the tensors as arrays; return the rows and the options of the library."""
        arrays = [array_of(x) for x in tensors]
        rows, given, count = arrays[:3], arrays[3:], len(self._given) - 3
        if given:
            values = {**values, **dict(zip(self._given[3:], given, strict=False))}
            if len(given) > count:
                values["aux"] = tuple(given[count:])
        return rows, values

    def _wrt(self, needs: Sequence[bool]) -> Sequence[str] | None:
        """Name the gradients to compute; None if these are all."""
        count = len(self._given)
        needed = [name for name, need in zip(self._given, needs, strict=False) if need]
        needed += ["aux"] if any(needs[count:]) else []
        return None if len(needed) == self._most + (len(needs) > count) else needed

    def _dispatched(
        self,
        needs: Sequence[bool],
        saved: Mapping[str, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        values: Mapping[str, Any],
    ) -> Sequence[torch.Tensor | None]:
        """Compute the gradients by the operator, which PyTorch may trace, batch or intercept."""
        count = len(self._given)
        options = {**values, **dict(zip(self._given[3:], tensors[3:], strict=False))}
        options["aux"] = tensors[count:]
        inputs = inputs_of(tensors[:3], self._backend, self._deterministic, options)
        needed: dict[str, Any] = dict.fromkeys(operators.INPUTS, False)
        needed |= {**dict(zip(self._given, needs, strict=False)), "aux": needs[count:]}
        dout, dlse, out, lse = (saved.get(name) for name in ("dout", "dlse", "out", "lse"))
        each = [*needed.values()]
        found = operators.gradients(operators.call_backward, each, dout, dlse, out, lse, inputs)
        by_name = dict(zip(operators.INPUTS, found, strict=True))
        return *(by_name[name] for name in self._given), *by_name["aux"]

    def _pass(
        self,
        deterministic: bool | None,
        given: tuple[Sequence[Any], Mapping[str, Any]],
        names: Sequence[str],
        results: Mapping[str, torch.Tensor],
        returned: Sequence[str | None],
    ) -> _Pass | None:
        """Make the pass by addresses of the call that has just run on the ``given`` arrays.

        None if it may repeat too seldom for that.
        """
        arrays, options = given
        call = CALLS.get(signature(arrays, self._backend, options))
        if isinstance(call, SeenCall):
            return None
        if call is None:
            return _on_arrays
        if not self._has_addresses:
            on_host = call.host_pass() if len(arrays) == len(self._given) == len(ROWS) else None
            return _on_arrays if on_host is None else partial(_on_host, on_host)
        known = call.address_pass(deterministic, [*results])
        return _on_arrays if known is None else TensorPass(known, names, results, returned)

    def _backward_pass(
        self,
        needs: Sequence[bool],
        saved: Mapping[str, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        given: tuple[Sequence[Any], Mapping[str, Any]],
    ) -> _Pass | None:
        """Make the backward pass by addresses."""
        likes = {f"d{name}": x for name, x in zip(self._given, tensors, strict=True)}
        returned = [name if need else None for name, need in zip(likes, needs, strict=True)]
        # One kernel computes the gradients of q, k and v.
        computed = {*returned, *(("dq", "dk", "dv") if any(needs[:3]) else ())}
        ordered = (name for name in _GRADIENTS if name in computed)
        results = {name: likes[name] for name in ordered}
        return self._pass(self._deterministic, given, (*self._given, *saved), results, returned)


def _copied(x: Any) -> Any:
    """Copy a value that the caller may change before the backward pass."""
    return (*x,) if type(x) is list else x.copy() if type(x) is np.ndarray else x


def _on_host(run: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
    """Run a forward pass on the addresses of tensors on the CPU."""
    q, k, v = tensors
    at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    # Empty and freed tensors have no address.
    found = run(at, tensors) if all(at) else None
    return None if found is None else (tensor_of(found.out), tensor_of(found.lse))


def _on_arrays(_tensors: Sequence[Any]) -> None:
    """Return None, so that the caller runs the pass on arrays: addresses are not enough."""


class _Function(torch.autograd.Function):  # type: ignore[misc]  # untyped
    """Both passes of a `Call`, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, key: Any, run: Any, values: Mapping[str, Any], *tensors: Any
    ) -> Any:
        output = call.forward(tensors, values, key, run)
        ctx.call, ctx.values = call, values
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        _, _, _, _, *needs = ctx.needs_input_grad
        out, lse, *tensors = ctx.saved_tensors
        saved = {"dout": operators.upstream(dout, out), "out": out, "lse": lse}
        if dlse is not None:
            saved["dlse"] = dlse
        return None, None, None, None, *ctx.call.backward(needs, saved, tensors, ctx.values)


# Function.apply spends a quarter of its time on transforms, of which there are none here.
_apply = super(torch.autograd.Function, _Function).apply
