"""``tileattn.jax.ring_attention``: inside ``shard_map``, on a sequence that devices share."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tileattn.call.options import INTEGERS, ROWS, options_with
from tileattn.call.parse import four_axes
from tileattn.call.sequences import integers, kv_lengths_of
from tileattn.call.window import window_of
from tileattn.distributed.validation import check_supported
from tileattn.expressions.functions import read_functions
from tileattn.jax.arrays import Arrays, arrays_of
from tileattn.jax.call import call_of
from tileattn.jax.differentiation import differentiable
from tileattn.jax.manual_axes import axes_of, varying
from tileattn.jax.ring import LAYOUTS, Ring
from tileattn.messages import must_be
from tileattn.results import Attention
from tileattn.validation import check_flags

_BY_INDEX = [x for x in options_with(by_index=True, shared=True) if x not in INTEGERS]
_PLACES = options_with(role="place", shared=True)


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis_name: str,
    *,
    return_lse: bool = False,
    layout: str = "contiguous",
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Exact attention over a sequence that the devices of a mesh axis share.

    Each device calls it inside ``jax.shard_map`` with its part of the sequence. It is
    differentiable in q, k, v, bias, sinks and aux.

    Parameters
    ----------
    q : jax.Array, shape (B, Hq, Nq, D), (Hq, Nq, D) or (Nq, D)
        Queries of this device; float16, bfloat16, float32 or float64.
    k, v : jax.Array, shapes (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv), or without leading axes as q
        Keys and values of this device.
    axis_name : str
        The axis of the mesh over which the sequence is sharded.
    return_lse : bool
        Return the logsumexp of each query, too; it is differentiable.
    layout : str
        Which tokens each device holds; ``"contiguous"``: one range, in the order of the devices;
        ``"zigzag"``: ``tileattn.distributed.Layout.zigzag``, with which a causal mask gives all
        devices equal work; Nq and Nk must be even.
    backend : str
        As for ``tileattn.forward``; it computes the blocks.
    **options
        The options of ``tileattn.forward``, the same on all devices of the axis. Indices, positions
        and lengths refer to the whole sequence. ``bias`` and ``mask`` have the rows of this
        device's queries, and all keys in order. ``block_mask``, ``tree_mask``, ``prefix``, packed
        sequences and pages are not supported; ``mask_mod`` is. The same options as in
        ``tileattn.jax.attention`` may be traced.

    Returns
    -------
    jax.Array, shape (B, Hq, Nq, Dv), or Attention
        The output of this device's queries, or with ``return_lse`` the pair ``(out, lse)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or the call is not inside ``jax.shard_map`` over this
        axis; the message names it.
    UnsupportedError
        If an option is not supported, an array is on a device other than CPUs and NVIDIA GPUs, or
        ``alibi_slopes`` is differentiated.

    Notes
    -----
    Keys and values travel in their dtype, by ``jax.lax.ppermute``, and no further than windows
    reach. Blocks without a visible pair, by causal mask, window or length, are not computed.
    Partial results and gradients are kept in the accumulation dtype, and rounded once. As for any
    callback all axes of the mesh must be manual, and the mapped function must be under ``jax.jit``.
    Traced lengths beyond the sequence count as its length.

    References
    ----------
    Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, arXiv:2310.01889.

    Examples
    --------
    >>> from functools import partial
    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from tileattn.jax import ring_attention
    >>> mesh = jax.make_mesh((jax.device_count(),), ("x",))
    >>> spec = PartitionSpec(None, None, "x")
    >>> x = jax.random.normal(jax.random.key(0), (3, 2, 4, 128, 32))
    >>> q, k, v = (jax.device_put(y, NamedSharding(mesh, spec)) for y in x)
    >>> call = partial(ring_attention, axis_name="x", causal=True)
    >>> sharded = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    >>> jax.jit(sharded)(q, k, v).shape
    (2, 4, 128, 32)
    """
    check_flags(return_lse=return_lse)
    check_supported(options)
    options = read_functions(options)
    size = _size(axis_name)
    arrays = arrays_of(q, k, v, options)
    call = call_of(arrays | {name: _whole(arrays[name], size) for name in "kv"}, backend, options)
    _check_layout(layout, arrays)
    window = window_of(options.get("window"), options.get("causal", False))
    places = _places(options, arrays, size)
    lead = (0,) * (4 - arrays["q"].ndim)
    arrays |= {
        n: four_axes(arrays[n]) for n in (*ROWS, *options_with(broadcasts=True)) if n in arrays
    }
    ring = Ring(call, axis_name, size, layout, window, steps=size)
    ring = replace(ring, steps=_steps(ring, arrays, places))
    arrays |= {name: jnp.asarray(x) for name, x in places.items()}
    origin = arrays.pop("origin", jnp.zeros(4, jnp.int32))
    if any(options.get(name) for name in _BY_INDEX):
        arrays["origin"] = origin
    # The sum over blocks of a gradient is rounded once.
    wide = {name: arrays[name] for name in options_with(gradient=True) if name in arrays}
    arrays |= jax.tree.map(lambda x: x.astype(ring.wider(x)), wide)
    axes = axes_of((arrays, jax.lax.axis_index(axis_name)))
    out, lse = differentiable(ring, varying(arrays, axes))
    result = Attention(out.astype(call.out[1])[lead], lse[lead])
    return result if return_lse else result.out


def _size(axis_name: Any) -> int:
    try:
        return int(jax.lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            f"axis_name must be an axis of jax.shard_map's mesh; got {axis_name!r} (ring_attention "
            "must be called inside jax.shard_map)"
        ) from None


def _check_layout(layout: Any, arrays: Arrays) -> None:
    if layout not in LAYOUTS:
        raise ValueError(must_be("layout", " or ".join(map(repr, LAYOUTS)), layout))
    for name in "qk":
        n = arrays[name].shape[-2]
        if layout == "zigzag" and n % 2:
            raise ValueError(
                f"{name} must have an even number of tokens on each device with layout='zigzag'; "
                f"got {n}"
            )


def _whole(x: Any, size: int) -> Any:
    """Describe the array that all devices hold together."""
    shape = x.shape if x.ndim < 2 else (*x.shape[:-2], x.shape[-2] * size, x.shape[-1])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _places(options: Mapping[str, Any], arrays: Arrays, size: int) -> dict[str, Any]:
    """Return kv_lengths and q_offset of each batch entry, as NumPy arrays if none is traced."""
    q, k = arrays["q"], arrays["k"]
    B, Nq, Nk = (q.shape[0] if q.ndim == 4 else 1), size * q.shape[-2], size * k.shape[-2]
    given = {name: options[name] for name in _PLACES if options.get(name) is not None}
    if any(isinstance(x, jax.core.Tracer) for x in given.values()):
        given = {name: jnp.broadcast_to(arrays[name], B) for name in given}
        lengths = jnp.clip(given.get("kv_lengths", Nk), 0, Nk)
    else:
        given = {name: integers(name, np.asarray(x), B) for name, x in given.items()}
        lengths = kv_lengths_of(given.get("kv_lengths"), B, Nk)
    return {"kv_lengths": lengths, "q_offset": given.get("q_offset", lengths - Nq)}


def _steps(ring: Ring, arrays: Arrays, places: Mapping[str, Any]) -> int:
    """Count the devices that keys visit, at most; all devices if lengths or offsets are traced."""
    if any(isinstance(x, jax.core.Tracer) for x in places.values()):
        return ring.size
    Nq, Nk = (arrays[name].shape[2] for name in "qk")
    needed = {
        (r - s) % ring.size
        for r, s in product(range(ring.size), repeat=2)
        for a, c in product(ring.segments(r, Nq), ring.segments(s, Nk))
        if ring.visible(a, c, **places)
    }
    return 1 + max(needed, default=0)
