"""Calls of the library from a compiled program of the CPU."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import tileattn
from tileattn.errors import UnsupportedError
from tileattn.jax.call import Arrays, Call

_ONLY_CPU = (
    "an array is on {platform!r}, and tileattn.jax runs on the CPU; nothing is copied there by "
    "itself: jax.device_put(x, jax.devices('cpu')[0]) does it"
)


def forward(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Compute the output and the logsumexp."""

    def on_host(given: Any) -> Any:
        q, k, v, others = _numpy(given)
        return tuple(
            tileattn.forward(q, k, v, backend=call.backend, **dict(call.options), **others)
        )

    shapes = tuple(jax.ShapeDtypeStruct(*x) for x in (call.out, call.lse))
    return _called(on_host, shapes, arrays)  # type: ignore[no-any-return,unused-ignore]  # JAX is untyped here


def backward(
    call: Call, arrays: Arrays, out: Any, lse: Any, dout: Any, dlse: Any, wanted: frozenset[str]
) -> Mapping[str, Any]:
    """Compute the gradients that are wanted, by the names of their arrays."""
    names = sorted(wanted)
    if not names:
        return {}

    def on_host(given: Any, *rest: Any) -> Any:
        q, k, v, others = _numpy(given)
        out, lse, dout, *dlse = map(np.asarray, rest)
        more: dict[str, Any] = {
            "dlse": dlse[0] if dlse else None,
            "wrt": tuple(names),
            "backend": call.backend,
        }
        grads = tileattn.backward(dout, q, k, v, out, lse, **more, **dict(call.options), **others)
        return {name: _whole(given[name], getattr(grads, f"d{name}")) for name in names}

    shapes = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays[name])
        for name in names
    }
    rest = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
    result: Mapping[str, Any] = _called(on_host, shapes, arrays, *rest)
    return result


def _called(on_host: Any, shapes: Any, arrays: Arrays, *rest: Any) -> Any:
    given = arrays | {"q": on_cpu.bind(arrays["q"])}
    return jax.pure_callback(on_host, shapes, given, *rest, vmap_method="sequential")


def _numpy(given: Arrays) -> tuple[Any, Any, Any, dict[str, Any]]:
    """View the arrays of a call as NumPy's: q, k, v and the options."""
    arrays = jax.tree.map(np.asarray, given)
    q, k, v = (arrays.pop(name) for name in "qkv")
    return q, k, v, arrays


def _whole(x: Any, found: Any) -> Any:
    """Fill in zeros where arrays of ``aux`` have no gradient."""
    if isinstance(x, tuple):
        return tuple(
            np.zeros(y.shape, y.dtype) if dy is None else dy for y, dy in zip(x, found, strict=True)
        )
    return found


# An identity that only a program of the CPU may have: elsewhere a callback would copy its arrays to
# the host by itself.
on_cpu = Primitive("tileattn_on_cpu")
on_cpu.def_abstract_eval(lambda x: x)
batching.defvectorized(on_cpu)


def _eager(x: Any) -> Any:
    for device in x.devices():
        if device.platform != "cpu":
            raise UnsupportedError(_ONLY_CPU.format(platform=device.platform))
    return x


def _lowered(context: Any, x: Any) -> Any:
    platforms = context.platforms or context.module_context.platforms
    for platform in platforms:
        if platform != "cpu":
            raise UnsupportedError(_ONLY_CPU.format(platform=platform))
    return [x]


def _differentiated(*_: Any) -> Any:
    raise UnsupportedError("second derivatives are asked for; gradients are not differentiable")


on_cpu.def_impl(_eager)
ad.primitive_jvps[on_cpu] = _differentiated
mlir.register_lowering(on_cpu, _lowered)
