"""Unfused attention in float64: whole score matrices, one line for each equation.

This is the arithmetic of the oracle, ``tileattn.reference``, which every other computation in the
package is tested against: it shares no code with them. It takes quadratic memory, and valid
arguments.

Masked-out pairs are excluded, not multiplied by zero: what a masked-out key, value or query holds
(NaN included) never enters a sum. Everything else is IEEE arithmetic on the formulas.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.oracle.dropout import keep
from tileattn.oracle.dual import Clamped, Direction, Dual, tangents_of, value_of
from tileattn.oracle.packed import dense_options, gathered, packed, padded
from tileattn.results import Attention, Gradients

Array = NDArray[Any]


@dataclass(frozen=True)
class Options:
    """The options of a call with their defaults; the public contract says what each means."""

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Any = None
    bias: Any = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: Any = None
    block_mask: Any = None
    kv_lengths: Any = None
    q_offset: Any = None
    sinks: Any = None
    dropout_p: float = 0.0
    seed: int = 0
    score_mod: Any = None
    mask_mod: Any = None
    aux: Any = ()
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    block_table: Any = None
    tree_mask: Any = None
    prefix: Any = None
    origin: Any = None
    k_descale: Any = None
    v_descale: Any = None
    invariant: bool = False  # chooses the order of sums; exact results have none


@dataclass(frozen=True)
class ScoreFunction:
    """Scores of the user's function, and their derivatives."""

    scores: Array
    by_score: Array
    by_element: dict[Direction, Array]  # one for each read of an array
    reads: dict[Direction, tuple[Any, ...]]  # the indices of each


@dataclass(frozen=True)
class Forward:
    """Every quantity of the forward pass; matrices are (B, Hq, Nq, Nk), heads of k, v repeated.

    Packed sequences are entries of B, padded to the longest one.
    """

    options: Options
    group: int
    Hkv: int
    scale: float
    q: Array
    k: Array
    v: Array
    capped: Array
    function: ScoreFunction | None
    scores: Array
    attended: Array
    lse: Array
    P: Array
    kept: Array
    out: Array

    @property
    def results(self) -> Attention:
        """The results of the call; packed if the call is."""
        return Attention(*(packed(x, self.options.cu_seqlens_q) for x in (self.out, self.lse)))


@dataclass(frozen=True)
class Backward:
    """Every quantity of the backward pass; only ``grads`` are packed again where the call was."""

    dout: Array
    dP: Array
    dlog: Array
    dS: Array
    grads: Gradients


def evaluate_forward(q: Any, k: Any, v: Any, dtype: Any, options: dict[str, Any]) -> Forward:
    """Evaluate the forward formulas with every number of them in ``dtype``."""
    o = Options(**dense_options(options))
    q = padded(q, 4, o.cu_seqlens_q).astype(dtype)
    k, v = _keys(k, o.k_descale, o, dtype), _keys(v, o.v_descale, o, dtype)
    B, Hq, Nq, D = q.shape
    Hkv, Nk = k.shape[1:3]
    group = Hq // Hkv if Hkv else 1
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = 1 / math.sqrt(max(D, 1)) if o.scale is None else float(o.scale)
    shape = (B, Hq, Nq, Nk)
    with np.errstate(all="ignore"):  # NaN and infinity propagate as IEEE arithmetic has it
        raw = scale * (q @ k.swapaxes(2, 3))
        capped = raw if o.softcap is None else _softcap(raw, float(o.softcap))
        scores = capped
        if o.alibi_slopes is not None:
            scores = scores - (_slopes(o) * _distance(o, shape)).astype(dtype)
        if o.bias is not None:
            scores = scores + np.asarray(o.bias).astype(dtype)
        function = None if o.score_mod is None else _score_function(scores, o)
        scores = scores if function is None else function.scores
        attended = visibility(shape, options) & (scores != -np.inf)
        scores = np.where(attended, scores, -np.inf)

        lse = _logsumexp(scores, o, dtype)
        P = _select(attended, np.exp(scores - lse[..., np.newaxis]))
        kept = keep(shape, float(o.dropout_p), int(o.seed), _origin(o))
        kept = kept / np.asarray(1 - float(o.dropout_p), dtype)
        out = _masked_matmul(P * kept, attended, v)
    return Forward(
        *(o, group, Hkv, scale, q, k, v, capped, function, scores, attended, lse, P, kept, out)
    )


def _keys(x: Any, descale: Any, o: Options, dtype: Any) -> Array:
    """Return keys or values with a batch entry for each sequence, dequantised: (B, Hkv, Nk, D)."""
    factors = np.ones((), dtype)
    if descale is not None:
        factors = np.asarray(descale).astype(np.float32).astype(dtype)
    of_tokens = factors.shape == np.shape(x)[:-1]
    with np.errstate(all="ignore"):
        if of_tokens:
            x = np.asarray(x).astype(dtype) * factors[..., np.newaxis]
        if o.block_table is not None:
            x = gathered(x, o.block_table, o.kv_lengths)
        x = padded(x, 4, o.cu_seqlens_k).astype(dtype)
        if descale is None or of_tokens:
            return np.asarray(x)
        return np.asarray(x * factors[..., np.newaxis, np.newaxis])


def evaluate_backward(f: Forward, dout: Any, dlse: Any) -> Backward:
    """Evaluate the backward formulas in the dtype of the forward ones."""
    o, dtype = f.options, f.q.dtype
    dout = padded(dout, 4, o.cu_seqlens_q).astype(dtype)
    with np.errstate(all="ignore"):
        dv = _masked_matmul(_transpose(f.P * f.kept), _transpose(f.attended), dout)
        dP = _select(f.attended, (dout @ _transpose(f.v)) * f.kept)
        delta = np.sum(_select(f.attended, f.P * dP), axis=-1)
        dlog = -delta
        if dlse is not None:
            dlog = padded(dlse, 3, o.cu_seqlens_q).astype(dtype) - delta
        dS = _select(f.attended, f.P * (dP + dlog[..., np.newaxis]))
        daux = _element_gradients(f, dS) if o.aux else None
        of_score = dS
        if f.function is not None:
            of_score = _select(f.attended, dS * f.function.by_score)
        draw = of_score
        if o.softcap is not None:
            draw = _select(f.attended, draw * (1 - (f.capped / float(o.softcap)) ** 2))
        dq = f.scale * _masked_matmul(draw, f.attended, f.k)
        dk = f.scale * _masked_matmul(_transpose(draw), _transpose(f.attended), f.q)

        dbias = None if o.bias is None else _sum_to_shape(of_score, np.shape(o.bias))
        dsinks = None
        if o.sinks is not None:
            # A sink is a key of value zero: its dP is 0.
            dsinks = np.sum(np.exp(_sinks(o, dtype) - f.lse) * dlog, axis=(0, 2))
            dsinks = np.where(np.isneginf(np.asarray(o.sinks, dtype)), 0, dsinks)
        dk, dv = (packed(_sum_over_group(x, f.group, f.Hkv), o.cu_seqlens_k) for x in (dk, dv))
        dq = packed(dq, o.cu_seqlens_q)
    return Backward(dout, dP, dlog, dS, Gradients(dq, dk, dv, dbias, dsinks, daux))


def visibility(shape: tuple[int, int, int, int], options: dict[str, Any]) -> NDArray[np.bool_]:
    """Return the pairs that the masks leave visible: (B, Hq, Nq, Nk).

    For packed sequences ``shape`` is the shape of the dense equivalent.
    """
    o = Options(**dense_options(options))
    j = np.arange(shape[3])
    p = _positions(o, shape)
    visible = np.ones(shape, np.bool_) & (j < _lengths(o, shape))
    left, right = o.window or (None, None)
    if o.causal:
        visible = visible & ((j <= p) | (j < _prefix(o)))
    if left is not None:
        visible = visible & (p - j <= left)
    if right is not None:
        visible = visible & ((j - p <= right) | (j < _prefix(o)))
    if o.mask is not None:
        visible = visible & o.mask
    if o.block_mask is not None:
        visible = visible & o.block_mask.to_dense(shape)
    if o.tree_mask is not None:
        visible = visible & _tree(o, shape)
    if o.mask_mod is not None:
        aux = _clamped(o, np.dtype(np.float64), {})
        visible = visible & value_of(o.mask_mod(*_indices(o, shape), *aux))
    return visible


def _origin(o: Options) -> Array:
    """Return the origin, the indices (b, h, i, j) to add: (B or 1, 4)."""
    return np.asarray((0, 0, 0, 0) if o.origin is None else o.origin).reshape(-1, 4)


def _indices(o: Options, shape: tuple[int, ...]) -> list[Dual]:
    """Return the indices passed to functions; they broadcast to (B, Hq, Nq, Nk)."""
    start = _origin(o).T[:, :, np.newaxis, np.newaxis, np.newaxis]
    indices = np.ogrid[tuple(map(slice, shape))]
    return [Dual(x + x0, {}) for x, x0 in zip(indices, start, strict=True)]


def _tree(o: Options, shape: tuple[int, int, int, int]) -> NDArray[np.bool_]:
    """Return the pairs that the tree mask leaves visible: (B, 1, Nq, Nk)."""
    B, _, Nq, Nk = shape
    lengths = np.broadcast_to(_lengths(o, shape).ravel(), B)
    trees = np.broadcast_to(o.tree_mask, (B, Nq, Nq))
    visible = np.ones((B, 1, Nq, Nk), np.bool_)
    for of_entry, tree, length in zip(visible, trees, lengths, strict=True):
        keys = np.hstack([np.ones((Nq, Nk), np.bool_), tree])  # up to the last that exists
        of_entry[0, :, :length] = keys[:, Nk + Nq - length :]
    return visible


def _score_function(s: Array, o: Options) -> ScoreFunction:
    """Call the user's function with dual numbers: one direction is s, and each read has one."""
    reads: dict[Direction, tuple[Any, ...]] = {}
    place = _indices(o, s.shape)
    new = o.score_mod(Dual(s, {("s",): np.ones((), s.dtype)}), *place, *_clamped(o, s.dtype, reads))
    tangents = dict(tangents_of(new))

    def whole(x: Any) -> Array:
        return np.array(np.broadcast_to(x, s.shape)).astype(s.dtype)

    by_score = whole(tangents.pop(("s",), 0))
    return ScoreFunction(
        whole(value_of(new)), by_score, {read: whole(x) for read, x in tangents.items()}, reads
    )


def _clamped(o: Options, dtype: Any, reads: dict[Direction, tuple[Any, ...]]) -> list[Any]:
    """Wrap the arrays of ``aux`` for indexing: floats in ``dtype``, integers in 64 bits."""
    arrays = []
    for number, x in enumerate(o.aux or ()):
        kind = x.dtype if x.dtype == bool else np.int64 if x.dtype.kind in "iu" else dtype
        array = Clamped(np.asarray(x).astype(kind), number, reads)
        arrays.append(array if x.ndim else array[()])
    return arrays


def _element_gradients(f: Forward, dS: Array) -> tuple[Array | None, ...]:
    """Sum dS times the derivatives of the scores, each at the element that was read."""
    totals: list[Any] = [
        None if x.dtype.kind in "biu" else np.zeros(x.shape, dS.dtype) for x in f.options.aux
    ]
    if f.function is not None:
        for read, tangent in f.function.by_element.items():
            part = _select(f.attended, dS * tangent)
            place = tuple(np.broadcast_to(x, part.shape) for x in f.function.reads[read])
            if place:
                np.add.at(totals[read[0]], place, part)
            else:
                totals[read[0]] += part.sum()
    return tuple(totals)


def _softcap(raw: Array, cap: float) -> Array:
    return np.asarray(cap * np.tanh(raw / cap))


def _logsumexp(scores: Array, o: Options, dtype: Any) -> Array:
    """``log(sum_j exp(S_ij) + exp(sink))``; subtracting the largest term avoids overflow."""
    largest = np.max(scores, axis=-1, initial=-np.inf)
    if o.sinks is not None:
        largest = np.maximum(largest, _sinks(o, dtype))
    shift = np.where(np.isfinite(largest), largest, 0)
    total = np.sum(np.exp(scores - shift[..., np.newaxis]), axis=-1)
    if o.sinks is not None:
        total = total + np.exp(_sinks(o, dtype) - shift)
    return np.asarray(shift + np.log(total))


def _sinks(o: Options, dtype: Any) -> Array:
    return np.asarray(o.sinks).astype(dtype)[:, np.newaxis]  # (Hq, 1), against (B, Hq, Nq)


def _lengths(o: Options, shape: tuple[int, ...]) -> Array:
    lengths = shape[3] if o.kv_lengths is None else o.kv_lengths
    return np.asarray(lengths).reshape(-1, 1, 1, 1)


def _prefix(o: Options) -> Array:
    """Return the keys that every query attends to before each sequence is causal, (B or 1, ...)."""
    return np.asarray(0 if o.prefix is None else o.prefix).reshape(-1, 1, 1, 1)


def _positions(o: Options, shape: tuple[int, ...]) -> Array:
    """Position of each query on the key axis, (B or 1, 1, Nq, 1)."""
    offset = _lengths(o, shape) - shape[2] if o.q_offset is None else np.asarray(o.q_offset)
    return np.asarray(np.arange(shape[2])[:, np.newaxis] + offset.reshape(-1, 1, 1, 1))


def _distance(o: Options, shape: tuple[int, ...]) -> Array:
    return np.asarray(np.abs(_positions(o, shape) - np.arange(shape[3])))


def _slopes(o: Options) -> Array:
    return np.asarray(o.alibi_slopes).astype(np.float64)[..., np.newaxis, np.newaxis]


def _masked_matmul(P: Array, attended: Array, x: Array) -> Array:
    """``sum_j P[i, j] x[j]`` over the ``j`` that ``i`` attends to, and over no others."""
    P = _select(attended, P)
    if np.isfinite(x).all():
        return np.asarray(P @ x)
    total = np.zeros((*P.shape[:-1], x.shape[-1]), x.dtype)
    for b, h, i in np.ndindex(P.shape[:-1]):
        row = attended[b, h, i]
        total[b, h, i] = P[b, h, i, row] @ x[b, h, row]
    return total


def _select(attended: Array, x: Array) -> Array:
    return np.where(attended, x, np.zeros((), x.dtype))


def _sum_over_group(x: Array, group: int, Hkv: int) -> Array:
    """Sum over the query heads that share a key head."""
    B, _, N, D = x.shape
    return np.asarray(x.reshape(B, Hkv, group, N, D).sum(axis=2))


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo broadcasting to (B, Hq, Nq, Nk): sum over every axis that was repeated."""
    padded = (1,) * (4 - len(shape)) + shape
    repeated = tuple(axis for axis in range(4) if padded[axis] == 1)
    return np.asarray(x.sum(axis=repeated, keepdims=True).reshape(shape))


def _transpose(x: Array) -> Array:
    return x.swapaxes(2, 3)
