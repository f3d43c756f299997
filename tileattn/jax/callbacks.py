"""Both passes of a call, as callbacks from a compiled program to the library."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np

import tileattn
from tileattn.call.options import DIFFERENTIABLE, SEEDS
from tileattn.jax.arrays import Arrays
from tileattn.jax.call import Call
from tileattn.jax.host_call import call_host
from tileattn.jax.numbers import NUMBERS, bytes_of

_ALLOCATED = sorted(DIFFERENTIABLE, key=lambda name: name != "aux")
"""Names of the gradients in the order in which the library allocates them: aux comes first."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Both passes of a call; each is one callback."""

    call: Call

    def forward(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Compute the output and the logsumexp."""
        shapes = tuple(jax.ShapeDtypeStruct(*x) for x in (self.call.out, self.call.lse))
        out, lse = call_host(_Forward(self.call), shapes, arrays)
        return out, lse

    def backward(
        self, arrays: Arrays, out: Any, lse: Any, dout: Any, dlse: Any, wanted: frozenset[str]
    ) -> Mapping[str, Any]:
        """Compute the wanted gradients; return them by the names of their arrays."""
        names = tuple(name for name in _ALLOCATED if name in wanted)
        if not names:
            return {}
        like = [arrays[name] for name in names]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        rest = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
        found = call_host(_Backward(self.call, names), shapes, arrays, *rest)
        return dict(zip(names, found, strict=True))


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass on arrays of the library; they may contain the numbers of the call."""

    call: Call

    def split(self) -> tuple[Self, bytes]:
        """Return a pass that gets the numbers of its call among its arrays, and these numbers."""
        call, numbers = self.call.split()
        return replace(self, call=call), numbers

    def arguments(self, given: Arrays) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Return q, k, v and the options; a seed on a GPU is read, which waits for it."""
        others = dict(given)
        q, k, v = (others.pop(name) for name in "qkv")
        call = self.call.at(bytes_of(others.pop(NUMBERS))) if NUMBERS in others else self.call
        seeds = {name: others[name].item() for name in SEEDS if name in others}
        return q, k, v, dict(call.options, backend=call.backend) | others | seeds


@dataclass(frozen=True, slots=True)
class _Forward(_Pass):
    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results."""
        return "out", "lse"

    def __call__(self, given: Any) -> Any:
        q, k, v, options = self.arguments(given)
        return tuple(tileattn.forward(q, k, v, **options))


@dataclass(frozen=True, slots=True)
class _Backward(_Pass):
    names: tuple[str, ...]

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the arrays whose gradients are the results."""
        return self.names

    def __call__(self, given: Any, *rest: Any) -> Any:
        q, k, v, options = self.arguments(given)
        out, lse, dout, *dlse = rest
        options |= {"dlse": dlse[0] if dlse else None, "wrt": self.names}
        grads = tileattn.backward(dout, q, k, v, out, lse, **options)
        return [_whole(given[name], getattr(grads, f"d{name}")) for name in self.names]


def _whole(x: Any, found: Any) -> Any:
    """Replace absent gradients of ``aux`` by zeros."""
    if isinstance(x, tuple):
        return tuple(np.zeros_like(y) if dy is None else dy for y, dy in zip(x, found, strict=True))
    return found
