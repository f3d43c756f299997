"""A primitive that calls a function of arrays from a compiled program.

The function gets the program's own memory: NumPy arrays on the CPU, CuPy arrays on a GPU.
``jax.pure_callback`` would pass copies, which the device threads make; if all of these wait in
callbacks, none is left to copy, and the program hangs.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tileattn.errors import UnsupportedError
from tileattn.jax.handler import PLATFORMS, Call, number_of, target
from tileattn.jax.manual_axes import axes_of, varying
from tileattn.jax.numbers import NUMBERS, array_of
from tileattn.jax.partition import partition_of, partitioned, typed

_KNOWN = " or ".join(map(repr, PLATFORMS))


def call_host(on_host: Callable[..., Any], shapes: Any, *given: Any) -> Any:
    """Call a function on trees of arrays; ``shapes`` is the tree of its results.

    Outside of ``jax.jit`` calls of functions that differ in numbers only share a compiled program.
    """
    arrays, tree = jax.tree.flatten(given)
    results, tree_of_results = jax.tree.flatten(shapes)
    found = host_call.bind(*arrays, on_arrays=_OnArrays(on_host, tree), shapes=tuple(results))
    return varying(jax.tree.unflatten(tree_of_results, found), axes_of(arrays))


@dataclass(frozen=True)
class _OnArrays:
    """A function of trees as a function of their leaves, which returns leaves."""

    on_host: Callable[..., Any]
    tree: Any

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        leaves: Sequence[Any] = jax.tree.leaves(
            self.on_host(*jax.tree.unflatten(self.tree, arrays))
        )
        return leaves


host_call = Primitive("tileattn_host_call")
host_call.multiple_results = True


def _shapes(*avals: Any, on_arrays: Any, shapes: Any) -> Any:
    return typed(partition_of(on_arrays, avals, shapes), avals, shapes)


def _eager(*arrays: Any, on_arrays: _OnArrays, shapes: Any) -> Any:
    axes = (None,) * len(arrays)
    return _mapped(arrays, axes, on_arrays, shapes)


def _mapped(
    arrays: Sequence[Any], axes: Sequence[int | None], on_arrays: _OnArrays, shapes: Any
) -> Any:
    """Call a function on arrays, or on their elements along axes, in a compiled program.

    The program gets numbers as an array, unless it becomes part of another program.
    """
    split = getattr(on_arrays.on_host, "split", None)
    if split is not None and not any(isinstance(x, jax.core.Tracer) for x in arrays):
        on_host, numbers = split()
        tree, order = _with_numbers(on_arrays.tree)
        on_arrays = _OnArrays(on_host, tree)
        arrays, axes = (*arrays, array_of(numbers)), (*axes, None)
        arrays, axes = ([x[n] for n in order] for x in (arrays, axes))
    return _compiled(tuple(axes), on_arrays, shapes)(*arrays)


@lru_cache(maxsize=256)
def _with_numbers(tree: Any) -> tuple[Any, tuple[int, ...]]:
    """Add numbers to the arrays of a call; also return the order of the arrays, numbers last."""
    given, *rows = jax.tree.unflatten(tree, range(tree.num_leaves))
    order, found = jax.tree.flatten((given | {NUMBERS: tree.num_leaves}, *rows))
    return found, tuple(order)


@lru_cache(maxsize=256)
def _compiled(axes: tuple[int | None, ...], on_arrays: _OnArrays, shapes: Any) -> Any:
    """Compile the call of a function; with axes one for each element, one after another."""
    one = partial(host_call.bind, on_arrays=on_arrays, shapes=shapes)

    def every(*arrays: Any) -> Any:
        mapped = {
            n: jax.numpy.moveaxis(x, axis, 0)
            for n, (x, axis) in enumerate(zip(arrays, axes, strict=True))
            if axis is not None
        }
        return jax.lax.map(lambda own: one(*(own.get(n, x) for n, x in enumerate(arrays))), mapped)

    return jax.jit(one if all(axis is None for axis in axes) else every)


def _lowered(context: Any, *arrays: Any, on_arrays: Callable[..., Any], shapes: Any) -> Any:
    for platform in context.platforms or context.module_context.platforms:
        if platform not in PLATFORMS:
            raise UnsupportedError(
                f"arrays must be on {_KNOWN}; got arrays on {platform!r} "
                "(jax.device_put(x, jax.devices('cpu')[0]) copies one to the CPU)"
            )
        name = target(platform)
    partition = partition_of(on_arrays, context.avals_in, shapes)
    if partition is not None and _has_many_devices(context.module_context.axis_context):
        kept: list[Call] = []
        context.module_context.add_keepalive(kept)
        function = partitioned(partition, shapes, partial(_on_device, name, on_arrays, kept))
        return mlir.lower_fun(function, multiple_results=True)(context, *arrays)
    given, made = (tuple(map(_spec, x)) for x in (context.avals_in, context.avals_out))
    call = Call(on_arrays, given, made)
    context.module_context.add_keepalive(call)
    return jax.ffi.ffi_lowering(name)(context, *arrays, number=np.int64(number_of(call)))


def _has_many_devices(axis_context: Any) -> bool:
    """Return True if XLA partitions the program over a known mesh; False inside shard_map."""
    devices = getattr(axis_context, "device_assignment", None)
    mesh = getattr(axis_context, "abstract_mesh", None)
    return devices is not None and len(devices) > 1 and mesh is not None


def _on_device(
    name: str, on_arrays: Callable[..., Any], kept: list[Call], shapes: Sequence[Any]
) -> Callable[..., Sequence[Any]]:
    """Return the call of one device; ``kept`` keeps it alive."""

    def run(*arrays: Any) -> Sequence[Any]:
        call = Call(on_arrays, tuple(map(_spec, arrays)), tuple(map(_spec, shapes)))
        kept.append(call)
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
        found: Sequence[Any] = jax.ffi.ffi_call(name, results)(
            *arrays, number=np.int64(number_of(call))
        )
        return found

    return run


def _spec(aval: Any) -> Any:
    return aval.shape, np.dtype(aval.dtype)


def _batched(arrays: Any, axes: Any, **more: Any) -> Any:
    found = _mapped(arrays, axes, **more)
    return found, [0] * len(found)


def _differentiated(*_: Any, **__: Any) -> Any:
    raise UnsupportedError("tileattn.jax.attention does not support second derivatives")


with suppress(ImportError, AttributeError):  # without it, sharded arrays are gathered
    # JAX passes a program's devices to the lowering only of primitives in this set.
    dispatch = importlib.import_module("jax._src.dispatch")
    dispatch.prim_requires_devices_during_lowering.add(host_call)
host_call.def_abstract_eval(_shapes)
host_call.def_impl(_eager)
mlir.register_lowering(host_call, _lowered)
batching.primitive_batchers[host_call] = _batched
ad.primitive_jvps[host_call] = _differentiated
