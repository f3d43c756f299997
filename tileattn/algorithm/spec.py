"""The algorithm: attention tile by tile with online softmax, forward and backward.

This file is the specification and it is what the NumPy backend runs. A *lane* is a set of heads of
one batch entry that are computed together: every array has the axes ``(Hkv, G, rows, columns)``,
``G`` query heads for each key head. Blocks may have any size, and come in any order.

References
----------
Dao et al., FlashAttention, arXiv:2205.14135; Dao, FlashAttention-2, arXiv:2307.08691.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tileattn import record
from tileattn.algorithm.columns import with_column, with_ones
from tileattn.algorithm.heads import Lane, load, norms
from tileattn.algorithm.mask import Tile, cut, schedule
from tileattn.algorithm.softmax import Array, RowState, Scratch, weigh
from tileattn.algorithm.tile_mask import Seen


def forward(lane: Lane, block_q: int, block_k: int, order: str = "query") -> tuple[Array, Array]:
    """Forward pass of a lane, tile by tile in the order of a schedule.

    Parameters
    ----------
    lane : Lane
        The heads.
    block_q, block_k : int
        Queries and keys of a tile.
    order : {"query", "key"}
        ``"query"`` is FlashAttention-2, ``"key"`` is FlashAttention (Algorithm 1).

    Returns
    -------
    out : array, shape (Hkv, G, Nq, Dv)
        Attention output, in the dtype of the sums.
    lse : array, shape (Hkv, G, Nq)
        Natural logarithm of the softmax denominator.

    Raises
    ------
    ValueError
        Where ``order`` is neither.
    """
    if order == "key":
        return _forward_by_keys(lane, block_q, block_k)
    if order != "query":
        raise ValueError(f"order is {order!r}; 'query' and 'key' are accepted")
    scratch, rows = Scratch(), lane.q.shape[:3]
    out, lse = np.empty((*rows, lane.v.shape[-1]), lane.dtype), np.empty(rows, lane.dtype)
    for q0, q1 in cut(lane.sight.band.Nq, block_q):
        parts = forward_rows(lane, q0, q1, block_k, scratch)
        for name, whole, part in zip(("out", "lse"), (out, lse), parts, strict=True):
            whole[:, :, q0:q1] = part
            record.write(name, part)
    return out, lse


def forward_rows(
    lane: Lane, q0: int, q1: int, block_k: int, scratch: Scratch
) -> tuple[Array, Array]:
    """Forward pass of one query block: the inner loop of FlashAttention-2.

    Parameters
    ----------
    lane : Lane
        The heads.
    q0, q1 : int
        Queries q0 to q1 - 1.
    block_k : int
        Keys of a tile.
    scratch : Scratch
        Buffers of this worker.

    Returns
    -------
    out : array, shape (Hkv, G, q1 - q0, Dv)
        Attention output, in the dtype of the sums; valid until the next use of the scratch.
    lse : array, shape (Hkv, G, q1 - q0)
        Natural logarithm of the softmax denominator.
    """
    q = load(lane.q[..., q0:q1, :], lane.dtype, "q", scratch, lane.scale)
    rows = (*lane.q.shape[:2], q1 - q0)
    state = RowState.empty(rows, lane.v.shape[-1], lane.dtype, lane.bounded, scratch)
    for tile in lane.sight.row_tiles(q0, q1, block_k):
        part = slice(tile.q0 - q0, tile.q1 - q0)
        kv = load_keys(lane, tile.k0, tile.k1, scratch)
        absorb_tile(lane, state.rows(part), q[..., part, :], kv, tile, scratch)
    return finish(lane, state)


def _forward_by_keys(lane: Lane, block_q: int, block_k: int) -> tuple[Array, Array]:
    """Forward pass of a lane with key blocks outside: the state of every row comes and goes."""
    scratch = Scratch()
    state = RowState.empty(lane.q.shape[:3], lane.v.shape[-1], lane.dtype, lane.bounded)
    _record_state(record.write, state)
    for k0, k1 in cut(lane.sight.Nk, block_k):
        block: tuple[Array, Array] | None = None
        for tile in lane.sight.column_tiles(k0, k1, block_q):
            block = block or load_keys(lane, k0, k1, scratch)
            k, v = (x[..., tile.k0 - k0 : tile.k1 - k0, :] for x in block)
            q = load(lane.q[..., tile.queries, :], lane.dtype, "q", scratch, lane.scale)
            rows = state.rows(tile.queries)
            _record_state(record.read, rows)
            absorb_tile(lane, rows, q, (k, v), tile, scratch)
            _record_state(record.write, rows)
    return finish(lane, state)


def _record_state(note: Callable[[str, Array], None], state: RowState) -> None:
    for name, x in (("out", state.acc), ("l", state.l), ("m", state.m)):
        note(name, x)


def load_keys(lane: Lane, k0: int, k1: int, scratch: Scratch) -> tuple[Array, Array]:
    """Bring keys and values k0 to k1 - 1 of a lane into fast memory."""
    k = load(lane.k[..., k0:k1, :], lane.dtype, "k", scratch)
    return k, load(lane.v[..., k0:k1, :], lane.dtype, "v", scratch)


def absorb_tile(
    lane: Lane, state: RowState, q: Array, kv: tuple[Array, Array], tile: Tile, scratch: Scratch
) -> None:
    """Compute the scores of one tile and take them in.

    Parameters
    ----------
    lane : Lane
        The heads.
    state : RowState
        State of the tile's queries.
    q : array, shape (Hkv, G, q1 - q0, D)
        The tile's queries times the scale, in the dtype of the sums.
    kv : (array, array), shapes (Hkv, 1, k1 - k0, D) and (Hkv, 1, k1 - k0, Dv)
        The tile's keys and values, in the dtype of the sums.
    tile : Tile
        The tile.
    scratch : Scratch
        Buffers.
    """
    seen = lane.seen(tile)
    k, v = kv
    s = scratch.take("s", (*q.shape[:3], k.shape[-2]), lane.dtype)
    np.matmul(q, k.swapaxes(-1, -2), out=s)
    lane.terms.apply(s, tile)
    if lane.terms.bias is not None:
        seen = _above_minus_infinity(s, seen)
    state.absorb(s, v, seen, lane.keep(tile), scratch)


def finish(lane: Lane, state: RowState) -> tuple[Array, Array]:
    """Let the sinks join and divide: the end of the forward pass of some rows."""
    if lane.sinks is not None:
        state.sink(lane.sinks)
    return state.finish(lane.gain, state.acc)


@dataclass(frozen=True)
class Upstream:
    """What arrives at the outputs of a lane, and what the forward pass has saved.

    Parameters
    ----------
    dout : array, shape (Hkv, G, Nq, Dv)
        Gradient at the output, in the caller's dtype.
    lse : array, shape (Hkv, G, Nq)
        Logsumexp of the forward pass, 0 in place of -inf.
    delta : array, shape (Hkv, G, Nq)
        ``rowsum(dout * out) - dlse``.
    lse_lo : array, shape (Hkv, G, Nq), or None
        Low word: the logsumexp is ``lse + lse_lo`` in rows that ``renormalise`` has split, in
        others it is 0. None stands for 0.
    split : array of bool, shape (Hkv, G, 1, 1), or None
        With ``lse_lo``: which heads have such rows.
    """

    dout: Array
    lse: Array
    delta: Array
    lse_lo: Array | None = None
    split: Array | None = None


@dataclass(slots=True)
class KeyBlock:
    """A block of keys and values in fast memory, with its gradients.

    Parameters
    ----------
    k0 : int
        First key.
    k : array, shape (Hkv, 1, N, D + 1)
        Keys; the last column is 1.
    v : array, shape (Hkv, 1, N, Dv + 1)
        Values; the last column is 1.
    dk, dv : array, shapes (Hkv, 1, N, D) and (Hkv, 1, N, Dv)
        Sums of the gradients.
    """

    k0: int
    k: Array
    v: Array
    dk: Array
    dv: Array

    @classmethod
    def load(cls, lane: Lane, k0: int, k1: int, scratch: Scratch) -> "KeyBlock":
        """Bring keys k0 to k1 - 1 of a lane into fast memory."""
        k, v = lane.k[..., k0:k1, :], lane.v[..., k0:k1, :]
        dk = scratch.take("dk", k.shape, lane.dtype)
        dv = scratch.take("dv", v.shape, lane.dtype)
        dk.fill(0)
        dv.fill(0)
        k, v = (with_ones(name, x, lane.dtype, scratch) for name, x in (("k", k), ("v", v)))
        return cls(k0, k, v, dk, dv)


def rounded(lse: Array, dtype: np.dtype[Any]) -> Array:
    """Say in which rows the rounding of the logsumexp would show in the gradients.

    Parameters
    ----------
    lse : array
        Logsumexps, in the dtype of the sums.
    dtype : numpy.dtype
        Of q, k and v.

    Returns
    -------
    array of bool, shape of lse
        False where lse is not finite.

    Notes
    -----
    Half a unit in the last place of lse is a relative error of the row's P. At 16 it is 1e-6 in
    float32; at 512 it is 3e-5, a thirtieth of a unit of float16.
    """
    size = np.abs(lse)
    flags: Array = (size > (512 if dtype.itemsize == 2 else 16)) & (size < np.inf)
    return flags


def renormalise(
    lane: Lane,
    words: tuple[Array, Array],
    q0: int,
    q1: int,
    tiles: Iterable[Tile],
    scratch: Scratch,
) -> None:
    """Split the logsumexp of rows where its rounding would show into maximum and logarithm.

    Parameters
    ----------
    lane : Lane
        The heads.
    words : (array, array), shape (Hkv, G, Nq) each
        ``lse`` and ``lse_lo`` of ``Upstream``, which become ``m`` and ``log(l)``.
    q0, q1 : int
        Queries q0 to q1 - 1.
    tiles : iterable of Tile
        All tiles of these queries, each as ``backward_tile`` is given it: the scores are then the
        same to the bit, and ``S - m`` is never above 0.
    scratch : Scratch
        Buffers.

    Notes
    -----
    This is the forward pass without values. The rows keep an lse that is larger than theirs by
    more than rounding explains: it counts other keys too, as one from ``merge`` does. A product of
    D terms is off by up to some ``eps sqrt(D) |q_i| |k_j|``, hence the norms of the keys in place
    of values.
    """
    lse, lse_lo = (x[..., q0:q1] for x in words)
    undropped = replace(lane, dropout_p=0.0)
    state = RowState.empty((*lane.q.shape[:2], q1 - q0), 1, lane.dtype, scratch=scratch)
    for tile in tiles:
        q = with_column({"q": lane.q, "lse": words[0]}, tile, lane.dtype, scratch, lane.scale)
        k = with_ones("k", lane.k[..., tile.keys, :], lane.dtype, scratch)[..., :-1]
        part = state.rows(slice(tile.q0 - q0, tile.q1 - q0))
        absorb_tile(undropped, part, q[..., :-1], (k, norms(k)[..., None]), tile, scratch)
    key_norm, _ = finish(undropped, state)
    log_l = np.log(state.l)
    q_norm = abs(lane.scale) * norms(lane.q[..., q0:q1, :].astype(lane.dtype, copy=False))
    size = np.abs(lse) + math.sqrt(lane.q.shape[-1]) * q_norm * key_norm[..., 0]
    explained = 2 * np.finfo(lane.dtype).eps * size
    own = rounded(lse, lane.q.dtype) & (lse - state.m - log_l <= explained)
    np.copyto(lse_lo, log_l, where=own)
    np.copyto(lse, state.m, where=own)


def backward_tile(
    lane: Lane, up: Upstream, block: KeyBlock, tile: Tile, scratch: Scratch
) -> tuple[Array, Array]:
    """Recompute the probabilities of one tile and add its share of dk and dv.

    Parameters
    ----------
    lane : Lane
        The heads.
    up : Upstream
        Gradients that arrive, and what the forward pass saved.
    block : KeyBlock
        The tile's keys, among others; its ``dk`` and ``dv`` are added to.
    tile : Tile
        The tile.
    scratch : Scratch
        Buffers; both results live there until the next tile.

    Returns
    -------
    dq : array, shape (Hkv, G, q1 - q0, D)
        The tile's share of the gradient at q, which still lacks the scale.
    dbias : array, shape (Hkv, G, q1 - q0, k1 - k0)
        Its gradient at the scores, which is that at the bias.

    Notes
    -----
    With P the probabilities, Z the dropout (0 or ``1 / (1 - p)``) and ``t'`` the softcap's slope::

        P  = exp(S - lse)                   dV += (Z P)^T dO
        dP = Z (dO V^T)                     dS  = P (dP - delta)
        dQ = t' dS K                        dK += t' dS^T (Q scale)

    The scale is multiplied into Q, as in the forward pass: S is rounded there as it is here.

    Subtracting a row's constant is one more column of the matrix product: ``[Q, -lse] [K, 1]^T``
    is ``S - lse`` and ``[dO, -delta] [V, 1]^T`` is ``dP - delta``, which spares two passes over
    the tile. Rows that ``renormalise`` has looked at subtract ``lse``, then ``lse_lo``.

    References
    ----------
    Dao, arXiv:2307.08691, Algorithm 2.
    """
    seen, keep = lane.seen(tile), lane.keep(tile)
    keys = slice(tile.k0 - block.k0, tile.k1 - block.k0)
    k, v = block.k[..., keys, :], block.v[..., keys, :]
    q = with_column({"q": lane.q, "lse": up.lse}, tile, lane.dtype, scratch, lane.scale)
    dout = with_column({"dout": up.dout, "delta": up.delta}, tile, lane.dtype, scratch)
    shape = (*q.shape[:3], k.shape[-2])
    p = scratch.take("p", shape, lane.dtype)
    ds = scratch.take("ds", shape, lane.dtype)

    slope, seen = _probabilities(lane, up, q, k, seen, tile, p)
    dropped = p if keep is None else p * (keep * lane.dtype.type(lane.gain))
    _add_over_group(block.dv[..., keys, :], dropped, dout[..., :-1], seen, scratch)
    if keep is None:
        np.matmul(dout, v.swapaxes(-1, -2), out=ds)
    else:
        np.matmul(dout[..., :-1], v[..., :-1].swapaxes(-1, -2), out=ds)
        ds *= keep * lane.dtype.type(lane.gain)
        ds += dout[..., -1:]
    ds *= p
    if seen is not None and not np.isfinite(ds.sum()):
        seen.hide(ds, 0)  # where p = 0 has met what is not finite
    capped = ds if slope is None else np.multiply(ds, slope, out=slope)
    _add_over_group(block.dk[..., keys, :], capped, q[..., :-1], seen, scratch)
    dq = scratch.take("dq", (*q.shape[:3], k.shape[-1] - 1), lane.dtype)
    return weigh(capped, k[..., :-1], seen, dq), ds


def backward(
    lane: Lane, up: Upstream, block_q: int, block_k: int, order: str = "key"
) -> tuple[Array, Array, Array]:
    """Backward pass of a lane, tile by tile in the order of a schedule.

    Parameters
    ----------
    lane : Lane
        The heads.
    up : Upstream
        Gradients that arrive, and what the forward pass saved.
    block_q, block_k : int
        Queries and keys of a tile.
    order : {"query", "key"}
        What the outer loop runs over.

    Returns
    -------
    dq, dk, dv : array, shapes (Hkv, G, Nq, D), (Hkv, 1, Nk, D) and (Hkv, 1, Nk, Dv)
        Gradients, in the dtype of the sums.
    """
    scratch = Scratch()
    tiles = list(schedule(lane.sight, block_q, block_k, order))
    words = up.lse.copy(), np.zeros_like(up.lse)
    split = np.asarray(rounded(up.lse, lane.q.dtype).any(axis=-1))[..., None, None]
    renormalise(lane, words, 0, lane.q.shape[-2], tiles, scratch)
    up = Upstream(up.dout, words[0], up.delta, words[1], split)
    block = KeyBlock.load(lane, 0, lane.k.shape[-2], scratch)
    dq = np.zeros(lane.q.shape, lane.dtype)
    for tile in tiles:
        dq[..., tile.queries, :] += backward_tile(lane, up, block, tile, scratch)[0]
    return dq * lane.dtype.type(lane.scale), block.dk, block.dv


def _probabilities(
    lane: Lane, up: Upstream, q: Array, k: Array, seen: Seen | None, tile: Tile, p: Array
) -> tuple[Array | None, Seen | None]:
    """Write ``exp(S - lse)`` to p; return the derivative of S by the scaled product, and seen."""
    slope = None
    if lane.terms.plain and up.lse_lo is None:
        np.matmul(q, k.swapaxes(-1, -2), out=p)
    else:
        np.matmul(q[..., :-1], k[..., :-1].swapaxes(-1, -2), out=p)
        slope = lane.terms.apply_with_slope(p, tile)
        if lane.terms.bias is not None:
            seen = _above_minus_infinity(p, seen)
        p += q[..., -1:]
        if up.lse_lo is not None:
            p -= up.lse_lo[..., tile.queries, None]
        if up.split is not None and lane.terms.plain and not up.split.all():
            np.copyto(p, q @ k.swapaxes(-1, -2), where=~up.split)  # the bits of a head alone
    np.exp(p, out=p)
    if seen is not None:
        seen.hide(p, 0)
        if slope is not None:
            seen.hide(slope, 0)
    return slope, seen


def _above_minus_infinity(s: Array, seen: Seen | None) -> Seen | None:
    """Count pairs with a score of -inf, which a bias may give, as not seen."""
    above = s != -np.inf
    if above.all():
        return seen
    return Seen.of(above if seen is None else above & seen.whole())


def _add_over_group(total: Array, p: Array, x: Array, seen: Seen | None, scratch: Scratch) -> None:
    """Add ``p.T @ x``, summed over the query heads that share a key head."""
    turned = None if seen is None else seen.transposed()
    shape = (*p.shape[:2], p.shape[-1], x.shape[-1])
    share = weigh(p.swapaxes(-1, -2), x, turned, scratch.take("share", shape, p.dtype))
    total += share if share.shape[1] == 1 else share.sum(axis=1, keepdims=True)
