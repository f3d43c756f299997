"""Operators of PyTorch, which a call bypasses if PyTorch neither traces nor records it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tileattn.errors import UnsupportedError
from tileattn.torch.batches import are_gradients_batched, rule_for_gradients, rule_for_vmap
from tileattn.torch.eager import holds_elements, is_eager
from tileattn.torch.operators import UNSAFE

_LIBRARY = torch.library.Library("tileattn", "FRAGMENT")
_SUFFIXES: Mapping[str, list[Any]] = {"": [], "_reading_host": UNSAFE}

Gradient = tuple[Callable[..., Any], Callable[..., Any]]


def define(
    name: str,
    inputs: Mapping[str, str],
    results: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Gradient | None = None,
    no_batches: str = "",
) -> None:
    """Define an operator.

    Parameters
    ----------
    name : str
        Name of the operator in ``torch.ops.tileattn``.
    inputs : mapping of str to str
        Names of the arguments, and their types in the schema.
    results : str
        Types of the results in the schema.
    run : callable
        Computes the results on the CPU and on a GPU.
    fake : callable
        Makes results without values, of the right shape, dtype and device.
    gradient : (callable, callable) or None
        The backward pass and what saves its inputs, as for ``torch.library.register_autograd``.
    no_batches : str
        What a call under ``torch.vmap`` does not do, as the start of its error. Empty: there is a
        call for each element.
    """
    schema = ", ".join(f"{kind} {argument}" for argument, kind in inputs.items())
    for suffix, tags in _SUFFIXES.items():
        own = f"{name}{suffix}"
        _LIBRARY.define(f"{own}({schema}) -> {results}", tags=tags)
        for kind in ("CPU", "CUDA"):
            _LIBRARY.impl(own, run, kind)
        torch.library.register_fake(f"tileattn::{own}", fake, lib=_LIBRARY)
        if no_batches:
            _LIBRARY.impl(own, partial(_refuse_batches, no_batches), "FuncTorchBatched")
        else:
            rule = rule_for_vmap(getattr(torch.ops.tileattn, own))
            torch.library.register_vmap(f"tileattn::{own}", rule, lib=_LIBRARY)
            _LIBRARY.impl(own, rule_for_gradients(rule), "Batched")
        if gradient is not None:
            backward, save = gradient
            torch.library.register_autograd(
                f"tileattn::{own}", backward, setup_context=save, lib=_LIBRARY
            )


def _refuse_batches(what: str, *_inputs: Any) -> Any:
    raise UnsupportedError(
        f"{what} under torch.vmap; call it for each element, or once with a larger batch"
    )


def call(name: str, run: Callable[..., Any], *inputs: Any) -> Any:
    """Call ``run``, or the operator of this name if PyTorch may trace or record the call."""
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    if is_eager() and not are_gradients_batched() and all(map(_is_plain, tensors)):
        return run(*inputs)
    reads_host = any(x.is_cuda for x in tensors) and any(x.is_cpu for x in tensors)
    return getattr(torch.ops.tileattn, name + ("_reading_host" if reads_host else ""))(*inputs)


def _is_plain(x: torch.Tensor) -> bool:
    """Return True for a tensor with elements in memory that needs no gradient."""
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return not needs_gradient and not x.is_meta and holds_elements(x)
