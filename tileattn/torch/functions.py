"""Trace ``score_mod`` and ``mask_mod`` to the text of an expression, which operators take.

A function is read once, by the call. The backward pass and compiled programs use the text.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from tileattn.call.options import FUNCTIONS
from tileattn.call.parse import aux_arrays
from tileattn.expressions.aux_arrays import AuxArrays, check_kind
from tileattn.expressions.functions import expression_of
from tileattn.expressions.parameters import Expression
from tileattn.torch.tensors import check_tensor, tensor_of

_DYNAMO = "get_local", "graph_break", "_i_will_not_complain_if_bc_breaks_InstructionTranslator"


class ArrayKind(NamedTuple):
    """Dtype and shape of an array that a traced function indexes."""

    dtype: Any
    shape: tuple[int, ...]


class _Tensors(AuxArrays):
    """``aux`` and captured arrays; symbolic numbers of exported programs become arrays, too."""

    def __init__(self, aux: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__(aux)
        self._device = device

    def symbol(self, x: Any) -> Any:
        is_number = isinstance(x, torch.SymInt | torch.SymFloat)
        return _number_tensor(x, self._device) if is_number else None


def read_functions(options: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Replace functions among the options by their expressions; captured arrays join ``aux``.

    A program that Dynamo traces gets the texts of the expressions. ``device`` is the device of q.
    """
    if options.get("score_mod") is None and options.get("mask_mod") is None:
        return options
    functions = functions_of(options)
    for name, x in aux_arrays(options).items():
        check_tensor(name, x)
        check_kind(name, x)
    read = _read_in_program if torch.compiler.is_dynamo_compiling() else _read
    return {**options, **read(functions, tuple(options.get("aux") or ()), device)}


def functions_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions among the options."""
    return {name: options[name] for name in FUNCTIONS if options.get(name) is not None}


def expressions_of(
    functions: Mapping[str, Any], aux: Sequence[torch.Tensor], device: torch.device
) -> tuple[dict[str, Expression], AuxArrays]:
    """Trace functions; return their expressions, and ``aux`` with the arrays they capture."""
    arrays = _Tensors(aux, device)
    return {name: expression_of(x, arrays, name) for name, x in functions.items()}, arrays


def tensors_of(arrays: AuxArrays, device: torch.device) -> tuple[Any, ...]:
    """Return ``aux`` and the captured arrays after it, as tensors."""
    captured = arrays[len(arrays.parameters) :]
    return (*arrays.parameters, *(_tensor(x, device) for x in captured))


def text_of(name: str, function: Any, arrays: Sequence[Any]) -> str:
    """Trace a function; return the text of its expression."""
    return expression_of(function, arrays, name).to_text()


def _read(
    functions: Mapping[str, Any], aux: Sequence[torch.Tensor], device: torch.device
) -> dict[str, Any]:
    """Return the expressions of functions, and the arrays they index as ``aux``, if any."""
    found: dict[str, Any]
    found, arrays = expressions_of(functions, aux, device)
    return {**found, "aux": tensors_of(arrays, device)} if arrays else found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # PyTorch's
def _read_outside(
    functions: Mapping[str, Any], aux: Sequence[torch.Tensor], device: torch.device
) -> dict[str, Any]:
    """Return the same, with texts in place of expressions."""
    found = _read(functions, aux, device)
    return found | {name: found[name].to_text() for name in functions}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # PyTorch's
def _has_dynamo() -> bool:
    """Return True if this PyTorch has the private names that `tileattn.torch.dynamo` needs."""
    try:
        import_module("tileattn.torch.dynamo")
        from torch._dynamo.comptime import ComptimeContext
    except (ImportError, AttributeError):
        return False
    return all(hasattr(ComptimeContext, name) for name in _DYNAMO)


def _read_in_program(
    functions: Mapping[str, Any], aux: Sequence[torch.Tensor], device: torch.device
) -> dict[str, Any]:
    """Do the same while Dynamo traces; numbers that Dynamo keeps symbolic become arrays, too."""
    if not _has_dynamo():
        read: dict[str, Any] = _read_outside(functions, aux, device)
        return read
    from tileattn.torch.dynamo import text_in_program

    found: dict[str, Any] = {}
    kinds = tuple((x.dtype, x.dim()) for x in aux)
    arrays = [*aux]
    for name, function in functions.items():
        text, captured = text_in_program(name, function, kinds, len(arrays))
        if text is None:
            outside: dict[str, Any] = _read_outside(functions, aux, device)
            return outside
        found[name] = text
        arrays += [_tensor_in_program(x, device) for x in captured]
    if arrays:
        found["aux"] = tuple(arrays)
    return found


def _tensor_in_program(x: Any, device: torch.device) -> torch.Tensor:
    """Make a tensor of a captured array or symbolic number."""
    if isinstance(x, torch.Tensor):
        return x
    is_number = isinstance(x, int | float)
    return _number_tensor(x, device) if is_number else torch.as_tensor(x, device=device)


def _number_tensor(x: Any, device: torch.device) -> torch.Tensor:
    """Make a tensor of a symbolic number."""
    if isinstance(x, int | torch.SymInt):
        return torch.full((), x, dtype=torch.int64, device=device)
    # torch.full would be compiled again for each float; a sum is not.
    return torch.zeros((), dtype=torch.float64, device=device) + x


def _tensor(x: Any, device: torch.device) -> torch.Tensor:
    """Make a tensor of a captured array."""
    return x if isinstance(x, torch.Tensor) else tensor_of(np.array(x)).to(device)
