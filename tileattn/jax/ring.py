"""Ring attention inside ``shard_map``: keys and values travel over an axis of the mesh.

At step t device r has the keys of device ``r - t``, and passes them on to device ``r + 1``. In the
backward pass the gradients of keys and values follow them, are summed on the way, and return to the
device that holds the keys.

References
----------
Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tileattn.call.options import options_with
from tileattn.distributed.layout import Segment
from tileattn.jax.arrays import Arrays
from tileattn.jax.call import Call
from tileattn.jax.callbacks import Callbacks
from tileattn.jax.manual_axes import axes_of, varying

State = tuple[Any, Any]
"""Output and logsumexp of queries over the keys visited so far."""

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True, slots=True)
class Ring:
    """Both passes of a call whose tokens the devices of an axis share; arrays have four axes.

    Parameters
    ----------
    call : Call
        The call of this device's queries on all keys.
    axis_name : str
        The axis of the mesh.
    size : int
        Number of devices on the axis.
    layout : str
        Which tokens each device holds.
    window : (int or None, int or None)
        Keys to the left and right; causal is a right side of 0.
    steps : int
        Number of devices that keys visit, at most: up to the last device that attends to them.
    """

    call: Call
    axis_name: Any
    size: int
    layout: str
    window: tuple[int | None, int | None]
    steps: int

    def forward(self, arrays: Arrays) -> State:
        """Compute the rows of this device's queries, in the accumulation dtype."""
        q, pair = arrays["q"], {name: arrays[name] for name in "kv"}
        state = empty((*q.shape[:3], arrays["v"].shape[3]), self.call.lse[1])
        state = varying(state, axes_of(arrays))

        def step(t: Any, carry: Any) -> Any:
            pair, state = carry
            return self._passed_on(pair), self._attended(t, arrays | pair, state)

        pair, state = self._before_last(step, (pair, state))
        out, lse = self._attended(self.steps - 1, arrays | pair, state)
        if "sinks" in arrays:
            sinks = jnp.broadcast_to(arrays["sinks"][:, None], lse.shape)
            return merge((out, lse), (jnp.zeros_like(out), sinks))
        return out, lse

    def backward(
        self, arrays: Arrays, out: Any, lse: Any, dout: Any, dlse: Any, wanted: frozenset[str]
    ) -> Mapping[str, Any]:
        """Compute the wanted gradients of this device's arrays; return them by name."""
        rows = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
        sums = {
            name: jax.tree.map(lambda x: jnp.zeros_like(x, dtype=self.wider(x)), arrays[name])
            for name in sorted(wanted - {"sinks"})
        }
        pair = {name: arrays[name] for name in "kv"}

        def follow(sums: Arrays, shift: int = 1) -> Arrays:
            moving: Arrays = self._passed_on({n: x for n, x in sums.items() if n in "kv"}, shift)
            return sums | moving

        def step(t: Any, carry: Any) -> Any:
            pair, sums = carry
            return self._passed_on(pair), follow(self._summed(t, arrays | pair, rows, sums))

        if sums:
            pair, sums = self._before_last(step, (pair, sums))
            sums = self._summed(self.steps - 1, arrays | pair, rows, sums)
            sums = follow(sums, self.size - self.steps + 1)
        if "sinks" in wanted:
            sums["sinks"] = dsinks_of(arrays["sinks"], *rows)
        return {
            name: jax.tree.map(lambda x, like: x.astype(like.dtype), x, arrays[name])
            for name, x in sums.items()
        }

    def visible(self, a: Segment, c: Segment, kv_lengths: Any, q_offset: Any) -> Any:
        """Return True if lengths and window let at least one query attend to a key."""
        (left, right), some = self.window, kv_lengths > c.start
        if left is not None:
            first = a.start + q_offset - left
            some &= (c.stop > first) & (kv_lengths > first)
        if right is not None:
            some &= c.start <= a.stop - 1 + q_offset + right
        return some.any()

    def segments(self, device: Any, n: int) -> list[Segment]:
        """List the ranges of the n tokens of a device, whose number may be traced."""
        chunks, starts = 1, [device]
        if self.layout == "zigzag":
            chunks, starts = 2, [device, 2 * self.size - 1 - device]
        width = n // chunks
        return [
            Segment(s * width, (s + 1) * width, slice(m * width, (m + 1) * width))
            for m, s in enumerate(starts)
        ]

    def wider(self, x: Any) -> Any:
        """Return the dtype in which an array is accumulated."""
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.promote_types(x.dtype, self.call.lse[1]) if floating else x.dtype

    def _before_last(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Run all steps but the last, after which the keys stop."""
        return jax.lax.fori_loop(0, self.steps - 1, step, carry) if self.steps > 1 else carry

    def _passed_on(self, tree: Any, shift: int = 1) -> Any:
        """Pass arrays on by ``shift`` devices, all around the ring."""
        to = [(n, (n + shift) % self.size) for n in range(self.size)]
        return jax.lax.ppermute(tree, self.axis_name, to) if shift % self.size else tree

    def _blocks(self, t: Any, arrays: Arrays) -> Iterator[tuple[Segment, Segment, Any]]:
        """Yield the blocks of a step: queries, keys, and True if any pair is visible."""
        device = jax.lax.axis_index(self.axis_name)
        for a in self.segments(device, arrays["q"].shape[2]):
            for c in self.segments((device - t) % self.size, arrays["k"].shape[2]):
                yield a, c, self.visible(a, c, arrays["kv_lengths"], arrays["q_offset"])

    def _attended(self, t: Any, arrays: Arrays, state: State) -> State:
        """Update the state with the keys of a step."""

        def block(state: State, a: Segment, c: Segment) -> State:
            mine: Any = tuple(x[:, :, a.rows] for x in state)
            call = self._block_call(mine)
            found = merge(mine, Callbacks(call).forward(self._block(arrays, a, c)))
            out, lse = (x.at[:, :, a.rows].set(y) for x, y in zip(state, found, strict=True))
            return out, lse

        for a, c, visible in self._blocks(t, arrays):
            state = jax.lax.cond(visible, lambda x, a=a, c=c: block(x, a, c), lambda x: x, state)
        return state

    def _summed(self, t: Any, arrays: Arrays, rows: tuple[Any, ...], sums: Arrays) -> Arrays:
        """Add the gradients of the blocks of a step."""

        def block(sums: Arrays, a: Segment, c: Segment) -> Arrays:
            out, lse, dout, *dlse = (x[:, :, a.rows] for x in rows)
            passes, given = Callbacks(self._block_call((out, lse))), self._block(arrays, a, c)
            upstream = dout, dlse[0] if dlse else None
            found = passes.backward(given, out, lse, *upstream, frozenset(sums))
            take = cuts(a, c)
            return {name: added(total, found[name], take.get(name)) for name, total in sums.items()}

        for a, c, visible in self._blocks(t, arrays):
            sums = jax.lax.cond(visible, lambda x, a=a, c=c: block(x, a, c), lambda x: x, sums)
        return sums

    def _block_call(self, state: State) -> Call:
        out, lse = state
        return replace(
            self.call, out=(out.shape, self.call.lse[1]), lse=(lse.shape, self.call.lse[1])
        )

    def _block(self, arrays: Arrays, a: Segment, c: Segment) -> Arrays:
        """Cut out the arrays of a block, without sinks, and shift lengths and offsets."""
        given = {name: x for name, x in arrays.items() if name != "sinks"}
        given |= {name: cut(given[name]) for name, cut in cuts(a, c).items() if name in given}
        given |= {name: given[name].astype(self.wider(given[name])) for name in "qkv"}
        given["kv_lengths"] = jnp.clip(arrays["kv_lengths"] - c.start, 0, given["k"].shape[2])
        given["q_offset"] = arrays["q_offset"] + a.start - c.start
        if "origin" in given:
            given["origin"] = given["origin"] + jnp.stack([0, 0, a.start, c.start])
        return given


def cuts(a: Segment, c: Segment) -> dict[str, Callable[[Any], Any]]:
    """Return functions that cut a block's part out of each array, by name."""

    def queries(x: Any) -> Any:
        return x[:, :, a.rows]

    def keys(x: Any) -> Any:
        return x[:, :, c.rows]

    def pairs(x: Any) -> Any:
        x = x[:, :, a.rows] if x.shape[2] > 1 else x
        width = c.rows.stop - c.rows.start
        return jax.lax.dynamic_slice_in_dim(x, c.start, width, 3) if x.shape[3] > 1 else x

    of_pairs = dict.fromkeys(options_with(broadcasts=True), pairs)
    return {"q": queries, "k": keys, "v": keys, **of_pairs}


def added(total: Any, part: Any, cut: Callable[[Any], Any] | None) -> Any:
    """Add a gradient to the part of the sum that ``cut`` cuts out, or to the whole."""
    if cut is None:
        return jax.tree.map(jnp.add, total, part)
    _, pullback = jax.vjp(cut, total)
    return total + pullback(part)[0]


def empty(shape: tuple[int, ...], dtype: Any) -> State:
    """Return the state of queries that have visited no key."""
    return jnp.zeros(shape, dtype), jnp.full(shape[:-1], -jnp.inf, dtype)


def merge(one: State, other: State) -> State:
    """Merge results over disjoint sets of keys, as ``tileattn.merge`` does."""
    lse = jnp.logaddexp(one[1], other[1])
    shift = jnp.where(jnp.isfinite(lse), lse, 0)
    out, more = (x * jnp.exp(y - shift)[..., None] for x, y in (one, other))
    return out + more, lse


def dsinks_of(sinks: Any, out: Any, lse: Any, dout: Any, dlse: Any = 0.0) -> Any:
    """Return the gradient of sinks, which have a probability but no value."""
    delta = (dout * out).sum(axis=-1) - dlse
    P = jnp.exp(sinks[:, None] - jnp.where(jnp.isneginf(lse), 0, lse))
    return -(P * delta).sum(axis=(0, 2))
