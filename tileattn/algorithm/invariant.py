"""The forward pass of invariant calls: a row has the same bits, whatever else is in the call.

A matrix product rounds differently where its shape differs. So each task computes one query, and a
tile of keys is always whole: it starts at a multiple of its size, with 0 in place of the keys and
values that the query's window does not reach. All products of a row then have the same shapes and
the same operands in a prefill, in chunks of it and in decoding.

Everything else is as in ``forward_block`` of ``algorithm/spec.py``.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from tileattn.algorithm.heads import Array, HeadGroup, head_groups
from tileattn.algorithm.memory import Executor, Memory
from tileattn.algorithm.softmax import RowState
from tileattn.algorithm.spec import finalize
from tileattn.algorithm.tile_mask import above_minus_infinity
from tileattn.algorithm.tiles import Tile, cut_between
from tileattn.call.block_mask import EMPTY
from tileattn.call.problem import Operands, Problem
from tileattn.results import Attention


def forward(
    problem: Problem, operands: Operands, block_k: int, executor: Executor, *, together: int = 1
) -> Attention:
    """Compute attention, with four axes; ``block_k`` is the keys of a tile, as in every call."""
    P = problem
    result = Attention(
        np.empty((P.B, P.Hq, P.Nq, P.Dv), P.dtype), np.empty((P.B, P.Hq, P.Nq), P.accum_dtype)
    )
    groups = head_groups(P, operands, together)
    rows = [(heads, i) for heads in groups for i in range(heads.q.shape[-2])]
    executor.run([partial(forward_row, *row, block_k, result) for row in rows])
    return result


def forward_row(heads: HeadGroup, i: int, block_k: int, result: Attention, memory: Memory) -> None:
    """Compute one query of some heads. Sums over tiles are in float64."""
    q = memory.load("q", heads.q[..., i : i + 1, :], heads.scale)
    sums = RowState.empty((*heads.q.shape[:2], 1), heads.kv.Dv, np.dtype(np.float64))
    state = replace(sums, m=sums.m.astype(heads.dtype))
    for k0, k1 in cut_between(*heads.mask.window.key_range(i, i + 1), block_k):
        kind = heads.mask.kind(i, i + 1, k0, k1)
        if kind != EMPTY:
            update_whole_tile(heads, state, q, Tile(i, i + 1, k0, k1, kind), block_k, memory)
    finalize(heads, state, i, i + 1, result, memory)


def update_whole_tile(
    heads: HeadGroup, state: RowState, q: Array, tile: Tile, block_k: int, memory: Memory
) -> None:
    """Update the state of a row with a tile, which is extended to a whole block of keys."""
    keys = slice(tile.k0 % block_k, tile.k0 % block_k + tile.k1 - tile.k0)
    k = memory.load("k", heads.kv.keys(tile.keys))
    s = (q @ _whole(k, keys, block_k, axis=-2).swapaxes(-1, -2))[..., keys]
    heads.score_mods.apply(s, tile)
    visible = heads.tile_mask(tile)
    if heads.score_mods.can_mask:
        visible = above_minus_infinity(s, visible)
    weights = heads.weights(tile, visible)
    v = memory.load("v", heads.kv.values(tile.keys))
    state.update(
        _whole(s, keys, block_k, rest=-np.inf),
        _whole(v, keys, block_k, axis=-2),
        None if visible is None else visible.within(keys, block_k),
        None if weights is None else _whole(weights, keys, block_k),
    )


def _whole(x: Array, keys: slice, block_k: int, axis: int = -1, rest: float = 0) -> Array:
    """Extend the axis of the keys to a whole block of them."""
    shape = list(x.shape)
    shape[axis] = block_k
    whole = np.full(shape, rest, x.dtype)
    whole.swapaxes(axis, -1)[..., keys] = x.swapaxes(axis, -1)
    return whole
