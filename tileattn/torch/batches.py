"""Rules of operators for batched tensors: ``torch.vmap`` and batched gradients."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tileattn.errors import UnsupportedError


@cache
def _key(name: str) -> Any:
    """Look up a dispatch key by its private name, at the first use."""
    return torch._C._dispatch_key_parse(name)


def are_gradients_batched() -> bool:
    """Return True inside ``torch.autograd.grad(is_grads_batched=True)``."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_key("VmapMode")))


def rule_for_vmap(operator: Any) -> Callable[..., Any]:
    """Make a rule for ``torch.vmap`` that calls the operator for each element of the batch."""

    def rule(info: Any, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, Any]:
        calls = [
            operator(*(_element(n, x, dim) for x, dim in zip(inputs, in_dims, strict=True)))
            for n in range(max(info.batch_size, 1))  # an empty batch needs one call for the shapes
        ]
        if isinstance(calls[0], torch.Tensor):
            return torch.stack(calls)[: info.batch_size], 0
        stacked = [torch.stack(parts)[: info.batch_size] for parts in zip(*calls, strict=True)]
        whole = type(calls[0])(stacked)
        return whole, type(whole)([0] * len(stacked))

    return rule


def _element(n: int, x: Any, dim: Any) -> Any:
    """Return an element of an input; for an empty batch, zeros of its shape."""
    if isinstance(x, list):
        return [_element(n, y, d) for y, d in zip(x, dim or [None] * len(x), strict=True)]
    if dim is None or n < x.shape[dim]:
        return x if dim is None else x.select(dim, n)
    return x.sum(dim, dtype=x.dtype)  # zeros that autograd still connects to x


def rule_for_gradients(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Make the rule for batches of ``torch.autograd.grad(is_grads_batched=True)``."""

    def kernel(*inputs: Any) -> Any:
        tensors = [x for x in tree_leaves(inputs) if _is_batched(x)]
        levels = (n for n in range(1, 64) if not _is_batched(_whole(tensors[0], n)))
        level = next(levels, None)
        if level is None or any(_is_batched(_whole(x, level)) for x in tensors):
            raise UnsupportedError("gradients must be batched at most once")
        in_dims = tree_map(lambda x: 0 if _is_batched(x) else None, inputs)
        whole = tree_map(lambda x: _whole(x, level) if _is_batched(x) else x, inputs)
        found, _ = rule(_Batch(len(_whole(tensors[0], level))), in_dims, *whole)
        if isinstance(found, torch.Tensor):
            return torch._add_batch_dim(found, 0, level)
        return type(found)(torch._add_batch_dim(x, 0, level) for x in found)

    return kernel


def _is_batched(x: Any) -> bool:
    """Return True for a batch of gradients."""
    return isinstance(x, torch.Tensor) and torch._C._dispatch_keys(x).has(_key("Batched"))


def _whole(x: torch.Tensor, level: int) -> torch.Tensor:
    """Return a batch of this level as a plain tensor; other tensors get an axis of length 1."""
    return torch._remove_batch_dim(x, level, 1, 0)


class _Batch(NamedTuple):
    batch_size: int
