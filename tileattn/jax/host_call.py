"""A primitive that calls a function of NumPy arrays from a compiled program of the CPU.

``jax.pure_callback`` first makes JAX arrays of what it hands over, and large ones are copied by the
threads that run the devices. With several devices each of these may wait in a callback, and none
is left to copy. Here the function gets the program's own memory, and no thread waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tileattn.errors import UnsupportedError
from tileattn.jax.manual_axes import axes_of, varying


def called(on_host: Callable[..., Any], shapes: Any, *given: Any) -> Any:
    """Call a function on trees of arrays; ``shapes`` is the tree of its results.

    Outside of ``jax.jit`` calls of equal functions share a compiled program.
    """
    arrays, tree = jax.tree.flatten(given)
    results, tree_of_results = jax.tree.flatten(shapes)
    found = host_call.bind(*arrays, on_arrays=_OnArrays(on_host, tree), shapes=tuple(results))
    return varying(jax.tree.unflatten(tree_of_results, found), axes_of(arrays))


@dataclass(frozen=True)
class _OnArrays:
    """A function of trees, as one of their leaves that gives leaves."""

    on_host: Callable[..., Any]
    tree: Any

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        leaves: Sequence[Any] = jax.tree.leaves(
            self.on_host(*jax.tree.unflatten(self.tree, arrays))
        )
        return leaves


host_call = Primitive("tileattn_host_call")
host_call.multiple_results = True


def _shapes(*_: Any, shapes: Any, **__: Any) -> Any:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes]


def _eager(*arrays: Any, **more: Any) -> Any:
    return _compiled(**more)(*arrays)


@lru_cache(maxsize=256)
def _compiled(**more: Any) -> Any:
    return jax.jit(partial(host_call.bind, **more))


def _lowered(context: Any, *arrays: Any, on_arrays: Callable[..., Any], **_: Any) -> Any:
    for platform in context.platforms or context.module_context.platforms:
        if platform != "cpu":
            raise UnsupportedError(
                f"an array is on {platform!r}, and tileattn.jax runs on the CPU; nothing is copied "
                "there by itself: jax.device_put(x, jax.devices('cpu')[0]) does it"
            )
    avals = context.avals_in, context.avals_out
    found, *_ = mlir.emit_python_callback(
        *(context, on_arrays, None, arrays, *avals), has_side_effect=False, returns_token=False
    )
    return found


def _batched(arrays: Any, axes: Any, **more: Any) -> Any:
    """Call for each element of a batch, one after the other."""
    mapped = {
        n: jax.numpy.moveaxis(x, axis, 0)
        for n, (x, axis) in enumerate(zip(arrays, axes, strict=True))
        if axis is not None
    }

    def one(elements: Any) -> Any:
        return host_call.bind(*(elements.get(n, x) for n, x in enumerate(arrays)), **more)

    found = jax.lax.map(one, mapped)
    return found, [0] * len(found)


def _differentiated(*_: Any, **__: Any) -> Any:
    raise UnsupportedError("second derivatives are asked for; gradients are not differentiable")


host_call.def_abstract_eval(_shapes)
host_call.def_impl(_eager)
mlir.register_lowering(host_call, _lowered)
batching.primitive_batchers[host_call] = _batched
ad.primitive_jvps[host_call] = _differentiated
