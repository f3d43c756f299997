"""The caller's own functions as the texts of their expressions, which operators take.

A function is read once, by the call: the backward pass and compiled programs have its text.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from tileattn.call.parse import aux_arrays
from tileattn.expressions.aux_arrays import AuxArrays, check_kind
from tileattn.expressions.functions import mask_expression, score_expression
from tileattn.expressions.nodes import Node, to_text
from tileattn.torch.tensors import check_tensor, tensor_of

_EXPRESSIONS = {"score_mod": score_expression, "mask_mod": mask_expression}

_DYNAMO = "get_local", "graph_break", "_i_will_not_complain_if_bc_breaks_InstructionTranslator"


class ArrayKind(NamedTuple):
    """What a function needs to know about an array: its dtype and its number of axes."""

    dtype: Any
    shape: tuple[int, ...]


class _Tensors(AuxArrays):
    """The arrays of a call, with symbolic numbers of exported programs among those captured."""

    def __init__(self, aux: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__(aux)
        self._device = device

    def symbol(self, x: Any) -> Any:
        is_number = isinstance(x, torch.SymInt | torch.SymFloat)
        return _of_number(x, self._device) if is_number else None


def read_functions(options: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Return options with the texts of functions in the place of the functions.

    Arrays that functions capture join ``aux``. ``device`` is that of q.
    """
    functions = functions_of(options)
    if not functions:
        return options
    for name, x in aux_arrays(options).items():
        check_tensor(name, x)
        check_kind(name, x)
    read = _read_in_program if torch.compiler.is_dynamo_compiling() else _read
    return {**options, **read(functions, tuple(options.get("aux") or ()), device)}


def functions_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions among the options."""
    return {name: options[name] for name in _EXPRESSIONS if options.get(name) is not None}


def expressions_of(
    functions: Mapping[str, Any], aux: Sequence[torch.Tensor], device: torch.device
) -> tuple[dict[str, Node], AuxArrays]:
    """Return the expressions of functions, and the arrays of ``aux`` and those they capture."""
    arrays = _Tensors(aux, device)
    return {name: _EXPRESSIONS[name](x, arrays) for name, x in functions.items()}, arrays


def tensors_of(arrays: AuxArrays, device: torch.device) -> tuple[Any, ...]:
    """Return ``aux`` and, after it, the arrays that functions capture, as tensors."""
    captured = arrays[len(arrays.parameters) :]
    return (*arrays.parameters, *(_tensor(x, device) for x in captured))


def text_of(name: str, function: Any, arrays: Sequence[Any]) -> str:
    """Trace a function; return the text of its expression."""
    return to_text(_EXPRESSIONS[name](function, arrays))


def _read(
    functions: Mapping[str, Any], aux: Sequence[torch.Tensor], device: torch.device
) -> dict[str, Any]:
    """Return texts of functions and, if there are any, the arrays that they index."""
    nodes, arrays = expressions_of(functions, aux, device)
    found: dict[str, Any] = {name: to_text(node) for name, node in nodes.items()}
    if arrays:
        found["aux"] = tensors_of(arrays, device)
    return found


_read_outside = torch.compiler.disable(_read)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # PyTorch's
def _has_dynamo() -> bool:
    """Return True if this PyTorch has the private names that reading in a program needs."""
    try:
        import_module("tileattn.torch.dynamo")
        from torch._dynamo.comptime import ComptimeContext
    except (ImportError, AttributeError):
        return False
    return all(hasattr(ComptimeContext, name) for name in _DYNAMO)


def _read_in_program(
    functions: Mapping[str, Any], aux: Sequence[torch.Tensor], device: torch.device
) -> dict[str, Any]:
    """Do the same while Dynamo traces. Numbers that it keeps symbolic become arrays, too."""
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
    """Return what a function captures as a tensor: an array, or a symbolic number."""
    if isinstance(x, torch.Tensor):
        return x
    is_number = isinstance(x, int | float)
    return _of_number(x, device) if is_number else torch.as_tensor(x, device=device)


def _of_number(x: Any, device: torch.device) -> torch.Tensor:
    """Make a tensor of a symbolic number."""
    if isinstance(x, int | torch.SymInt):
        return torch.full((), x, dtype=torch.int64, device=device)
    # A sum is compiled once for all floats, `torch.full` for each.
    return torch.zeros((), dtype=torch.float64, device=device) + x


def _tensor(x: Any, device: torch.device) -> torch.Tensor:
    """Return an array that a function captures as a tensor."""
    return x if isinstance(x, torch.Tensor) else tensor_of(np.array(x)).to(device)
