"""The algorithm: exact attention tile by tile with online softmax, forward and backward.

This text is the specification. The NumPy backend runs these loops; the CUDA and LLVM kernels mirror
them. A *grid* is a list of tasks that may run at the same time. A task loads tiles into fast
memory; its loop is that of one thread block on a GPU. S and P are tiles of scores and
probabilities, dP and dS their gradients, as in the papers.

Blocks may have any size. Arrays of a ``HeadGroup`` have the axes ``(Hkv, G, rows, columns)``, with
``G`` query heads for each key head.

References
----------
Dao et al., FlashAttention, arXiv:2205.14135; Dao, FlashAttention-2, arXiv:2307.08691.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import numpy as np

from tileattn.algorithm.heads import Array, HeadGroup, head_groups
from tileattn.algorithm.memory import Executor, Memory, Operand, OrderedSums, sum_dtype
from tileattn.algorithm.parameter_gradient import (
    aux_gradients,
    groups_sharing_sums,
    parameter_sums,
)
from tileattn.algorithm.residuals import (
    HeadResiduals,
    Residuals,
    Sums,
    rounding_of_lse,
    row_norms,
)
from tileattn.algorithm.scores import Grad, Partial
from tileattn.algorithm.softmax import RowState
from tileattn.algorithm.tile_mask import TileMask, above_minus_infinity
from tileattn.algorithm.tiles import Tile, cut
from tileattn.call.problem import Operands, Problem
from tileattn.results import Attention, Gradients

_PREPROCESSED = 1 << 20  # elements of dO that a task of ``preprocess`` takes
_END = 1 << 62  # past every query block

# --- forward ------------------------------------------------------------------------------------


def forward(
    problem: Problem,
    operands: Operands,
    block_size: tuple[int, int],
    executor: Executor,
    *,
    together: int = 1,
    outer_loop: str = "q",
) -> Attention:
    """Compute attention, with four axes.

    ``block_size`` is queries and keys of a tile. ``together`` heads share a task; more if their
    score matrices are small. ``outer_loop`` is ``"q"``, FlashAttention-2, or ``"kv"``,
    FlashAttention, Algorithm 1.
    """
    P, (block_q, block_k) = problem, block_size
    result = Attention(
        np.empty((P.B, P.Hq, P.Nq, P.Dv), P.dtype), np.empty((P.B, P.Hq, P.Nq), P.accum_dtype)
    )
    groups = head_groups(P, operands, together)
    if outer_loop == "kv":
        executor.run([partial(forward_by_keys, heads, block_size, result) for heads in groups])
    elif outer_loop == "q":
        grid = [(heads, *rows) for heads in groups for rows in cut(heads.q.shape[-2], block_q)]
        grid.sort(key=_keys_in_reach, reverse=True)  # the longest first: none is left for the end
        executor.run([partial(forward_block, *block, block_k, result) for block in grid])
    else:
        raise ValueError(f"outer_loop must be 'q' or 'kv'; got {outer_loop!r}")
    return result


def forward_block(
    heads: HeadGroup, q0: int, q1: int, block_k: int, result: Attention, memory: Memory
) -> None:
    """Compute the rows of one query block: FlashAttention-2, Algorithm 1."""
    q = memory.load("q", heads.q[..., q0:q1, :], heads.scale)
    state = memory.row_state(heads, q1 - q0)
    for tile in heads.mask.row_tiles(q0, q1, block_k):
        rows = slice(tile.q0 - q0, tile.q1 - q0)
        k = memory.load("k", heads.kv.keys(tile.keys))
        v = memory.load("v", heads.kv.values(tile.keys))
        update_tile(heads, state.rows(rows), q[..., rows, :], k, v, tile, memory)
    finalize(heads, state, q0, q1, result, memory)


def forward_by_keys(
    heads: HeadGroup, block_size: tuple[int, int], result: Attention, memory: Memory
) -> None:
    """Compute all rows with key blocks outside: FlashAttention, Algorithm 1."""
    (block_q, block_k), Nq = block_size, heads.q.shape[-2]
    state = memory.row_state(heads, Nq)
    memory.store_state(state)
    for k0, k1 in cut(heads.mask.Nk, block_k):
        tiles = list(heads.mask.column_tiles(k0, k1, block_q))
        if tiles:
            k = memory.load("k", heads.kv.keys(slice(k0, k1)))
            v = memory.load("v", heads.kv.values(slice(k0, k1)))
        for tile in tiles:
            keys = slice(tile.k0 - k0, tile.k1 - k0)
            q = memory.load("q", heads.q[..., tile.queries, :], heads.scale)
            rows = memory.load_state(state.rows(tile.queries))
            update_tile(heads, rows, q, k[..., keys, :], v[..., keys, :], tile, memory)
            memory.store_state(rows)
    finalize(heads, state, 0, Nq, result, memory)


def update_tile(
    heads: HeadGroup, rows: RowState, q: Array, k: Array, v: Array, tile: Tile, memory: Memory
) -> None:
    """Compute the scores of one tile and update the state of its rows."""
    s = memory.matmul("s", q, k)
    heads.score_mods.apply(s, tile)
    visible = heads.tile_mask(tile)
    if heads.score_mods.can_mask:
        visible = above_minus_infinity(s, visible)
    rows.update(s, v, visible, heads.weights(tile, visible))


def finalize(
    heads: HeadGroup, state: RowState, q0: int, q1: int, result: Attention, memory: Memory
) -> None:
    """Add the sinks, divide by the denominator, and store the rows of a query block."""
    if heads.sinks is not None:
        state.sink(heads.sinks)
    out, lse = state.finalize(heads.dropout_scale)
    memory.store("out", heads.of(result.out)[..., q0:q1, :], out)
    memory.store("lse", heads.of(result.lse)[..., q0:q1], lse)


# --- backward -----------------------------------------------------------------------------------


@dataclass(slots=True)
class KeyBlock:
    """Keys and values from ``k0`` on in fast memory, with the sums of their gradients."""

    k0: int
    k: Operand
    v: Operand
    dk: Array
    dv: Array

    @classmethod
    def load(cls, heads: HeadGroup, k0: int, k1: int, memory: Memory) -> "KeyBlock":
        """Load keys k0 to k1 - 1; their gradients start at 0."""
        k, v = heads.kv.keys(slice(k0, k1)), heads.kv.values(slice(k0, k1))
        sums = memory.zeros("dk", k.shape), memory.zeros("dv", v.shape)
        return cls(k0, memory.load_right("k", k), memory.load_right("v", v), *sums)


class KeyBlocks:
    """Keys k0 to k1 - 1 of several key heads: loaded on first use, their gradients stored once."""

    def __init__(self, k0: int, k1: int, memory: Memory) -> None:
        self._span, self._memory = (k0, k1), memory
        self._loaded: dict[tuple[int, int], KeyBlock] = {}

    def of(self, heads: HeadGroup) -> KeyBlock:
        """Return the key block of a head group."""
        key_head = heads.batch, heads.kv_head
        if key_head not in self._loaded:
            memory = self._memory.another() if self._loaded else self._memory
            self._loaded[key_head] = KeyBlock.load(heads, *self._span, memory)
        return self._loaded[key_head]

    def store(self, groups: Sequence[HeadGroup], sums: Sums) -> None:
        """Store dK and dV of all key heads, 0 if no query attends to their keys."""
        for heads in {(heads.batch, heads.kv_head): heads for heads in groups}.values():
            block = self._loaded.get((heads.batch, heads.kv_head))
            kv_heads = slice(heads.kv_head, heads.kv_head + heads.kv.heads)
            for name, whole in (("dk", sums.dk), ("dv", sums.dv)):
                if whole is None:
                    continue
                part = whole[heads.place.batch, kv_heads, heads.place.keys][:, slice(*self._span)]
                self._memory.store(name, part, 0 if block is None else getattr(block, name)[:, 0])


def backward(
    problem: Problem,
    operands: Operands,
    dout: Array,
    attention: Attention,
    dlse: Array | None,
    block_size: tuple[int, int],
    executor: Executor,
) -> Gradients:
    """Compute the gradients: FlashAttention-2, Algorithm 2, key blocks outside."""
    P, x, (block_q, block_k) = problem, operands, block_size
    saved = Residuals.saved(P, dout, attention.lse)
    sums = Sums(
        np.empty((P.B, P.Hq, P.Nq, P.D), sum_dtype(P)) if x.wants("q") else None,
        np.zeros((P.B, P.Hkv, P.Nk, P.D), P.dtype) if x.wants("k") else None,
        np.zeros((P.B, P.Hkv, P.Nk, P.Dv), P.dtype) if x.wants("v") else None,
        parameter_sums(P, x),
    )
    groups = list(head_groups(P, x))
    executor.run(
        [partial(preprocess, rows, attention.out, dlse, saved, sums) for rows in _row_blocks(P)]
    )
    large_rows = saved.blocks_of_large_rows(groups, block_size)
    executor.run([partial(renormalise, *rows, saved) for rows in large_rows])
    grid = []
    for shared in groups_sharing_sums(groups, sums.parameters.values()) if sums.of_tiles else ():
        keys = list(cut(max(heads.mask.Nk for heads in shared), block_k))
        order = executor.ordered_sums(len(keys))
        grid += [(n, shared, order, span) for n, span in enumerate(keys)]
    grid.sort(key=itemgetter(0))  # key blocks wait for earlier ones
    executor.run(
        [
            partial(backward_block, shared, order, number, *span, block_q, saved, sums)
            for number, shared, order, span in grid
        ]
    )
    with np.errstate(all="ignore"):  # a cast to 16 bits may overflow
        if sums.dq is not None:
            sums.dq *= P.accum_dtype.type(P.scale)
        dq = None if sums.dq is None else sums.dq.astype(P.dtype, copy=False)
        dbias = sums.parameters["bias"].total() if "bias" in sums.parameters else None
        dbias = None if dbias is None else dbias.astype(x.bias.dtype, copy=False)
        wants_sinks = x.sinks is not None and x.wants("sinks")
        dsinks = sink_gradient(x.sinks, saved) if wants_sinks else None
        daux = aux_gradients(x, sums.parameters)
        return Gradients(dq, sums.dk, sums.dv, dbias, dsinks, daux)


def preprocess(
    rows: tuple[slice, slice, slice],
    out: Array,
    dlse: Array | None,
    saved: Residuals,
    sums: Sums,
    memory: Memory,
) -> None:
    """Compute ``delta = rowsum(dO * O) - dlse`` of some rows of (B, Hq, Nq); dQ starts at 0."""
    o, do = memory.load("out", out[rows]), memory.load("dout", saved.dout[rows])
    delta = np.einsum("bhid,bhid->bhi", do, o)
    memory.store("delta", saved.delta[rows], delta if dlse is None else delta - dlse[rows])
    if sums.dq is not None:
        memory.store("dq", sums.dq[rows], 0)


def backward_block(
    groups: Sequence[HeadGroup],
    order: OrderedSums,
    number: int,
    k0: int,
    k1: int,
    block_q: int,
    saved: Residuals,
    sums: Sums,
    memory: Memory,
) -> None:
    """Compute dK and dV of one key block, and add its part of dQ and of parameters' gradients.

    Query blocks ascend, so that tasks can add to them one after the other: key block ``number``
    adds to a query block after key block ``number - 1``.
    """
    tiles = sorted(
        (tile.q0 // block_q, n, tile)
        for n, heads in enumerate(groups)
        for tile in heads.mask.column_tiles(k0, k1, block_q)
    )
    residuals = [saved.of(heads) for heads in groups]
    blocks = KeyBlocks(k0, k1, memory)
    parameters = {name: part.task() for name, part in sums.parameters.items()}
    with order.task(number) as semaphore:
        for query_block, n, tile in tiles:
            semaphore.begin(query_block)
            heads = groups[n]
            dq, parts = backward_tile(heads, residuals[n], blocks.of(heads), tile, sums, memory)
            semaphore.wait(query_block)
            if sums.dq is not None and dq is not None:
                memory.add("dq", heads.of(sums.dq)[..., tile.queries, :], dq)
            for part, by in parts:
                parameters[by.parameter].add(heads, part, by, tile)
        blocks.store(groups, sums)
        if parameters:
            semaphore.wait(_END)
        for task in parameters.values():
            task.finish()


def backward_tile(
    heads: HeadGroup,
    saved: HeadResiduals,
    block: KeyBlock,
    tile: Tile,
    sums: Sums,
    memory: Memory,
) -> tuple[Array | None, list[tuple[Array, Partial]]]:
    """Recompute the probabilities of one tile and add its part of dK and dV.

    Returns its part of dQ, which still lacks the scale, and of the gradients of parameters; all
    stay in fast memory until the next tile. With P the probabilities, Z the dropout (0 or
    ``1 / (1 - p)``) and ``s'`` the derivative of the score modifiers::

        P  = exp(S - lse)                   dV += (Z P)^T dO
        dP = Z (dO V^T)                     dS  = P (dP - delta)
        dQ = s' dS K                        dK += s' dS^T (Q scale)

    The scale is multiplied into Q, as in the forward pass: S is rounded there as it is here.
    """
    keys = slice(tile.k0 - block.k0, tile.k1 - block.k0)
    k, v = block.k.rows(keys), block.v.rows(keys)
    dk, dv = block.dk[..., keys, :], block.dv[..., keys, :]
    rows, lse, delta = tile.queries, saved.lse.rows(tile.queries), saved.delta.rows(tile.queries)
    q = memory.load_left("q", heads.q[..., rows, :], lse, heads.scale)
    dout = memory.load_left("dout", saved.dout[..., rows, :], delta)

    p, grads, visible = recompute_p(heads, q, k, tile, memory)
    keep = heads.keep(tile)
    z = None if keep is None else keep * heads.dtype.type(heads.dropout_scale)
    if sums.dv is not None:
        add_over_group(dv, p if z is None else p * z, dout.x, visible, memory)
    if not sums.of_scores:
        return None, []
    ds = memory.matmul_minus("ds", dout, v, None if z is None else partial(_multiply, z))
    ds *= p
    if visible is not None and not np.isfinite(ds.sum()):
        visible.masked_fill(ds, 0)  # p = 0 times a dP that is not finite
    ds, parts = chain_rule(ds, grads, visible, sums)
    if sums.dk is not None:
        add_over_group(dk, ds, q.x, visible, memory)
    if sums.dq is None:
        return None, parts
    return memory.masked_matmul("dq", ds, k.x, visible), parts


def chain_rule(
    ds: Array, grads: Sequence[Grad], visible: TileMask | None, sums: Sums
) -> tuple[Array, list[tuple[Array, Partial]]]:
    """Propagate dS back through the score modifiers, the last first.

    Returns the derivative by the scaled products, and the derivatives by parameters.
    """
    parts = []
    for grad in reversed(grads):
        for by in grad.by_parameters:
            if by.parameter in sums.parameters:
                part = ds if by.value is None else ds * by.value
                if visible is not None and part is not ds and not np.isfinite(part.sum()):
                    visible.masked_fill(part, 0)
                parts.append((part, by))
        if grad.by_score is not None:
            ds = np.multiply(ds, grad.by_score, out=grad.by_score)
    return ds, parts


def recompute_p(
    heads: HeadGroup, q: Operand, k: Operand, tile: Tile, memory: Memory
) -> tuple[Array, list[Grad], TileMask | None]:
    """Compute ``P = exp(S - lse)``, the derivatives of the score modifiers, and the mask."""
    visible, mods, grads = heads.tile_mask(tile), heads.score_mods, list[Grad]()

    def modify(s: Array) -> None:
        nonlocal visible, grads
        grads = mods.apply_with_grad(s, tile)
        if mods.can_mask:
            visible = above_minus_infinity(s, visible)

    p = memory.matmul_minus("p", q, k, modify if mods else None)
    np.exp(p, out=p)
    for x in (p, *(grad.by_score for grad in grads)):
        if x is not None and visible is not None:
            visible.masked_fill(x, 0)
    return p, grads, visible


def add_over_group(
    total: Array, p: Array, x: Array, visible: TileMask | None, memory: Memory
) -> None:
    """Add ``p.T @ x``, summed over the query heads that share a key head."""
    transposed = None if visible is None else visible.transposed()
    part = memory.masked_matmul("over group", p.swapaxes(-1, -2), x, transposed)
    total += part if part.shape[1] == 1 else part.sum(axis=1, keepdims=True)


def sink_gradient(sinks: Array, saved: Residuals) -> Array:
    """Sum ``-exp(sink - lse) * delta``: a sink has a probability and the value 0."""
    exponent = sinks.astype(saved.lse.dtype)[:, None] - saved.lse - saved.log_l
    total = -(np.exp(exponent) * saved.delta).sum(axis=(0, 2))
    total[np.isneginf(sinks)] = 0
    return np.asarray(total.astype(sinks.dtype, copy=False))


# --- rows with large scores ---------------------------------------------------------------------


def renormalise(
    heads: HeadGroup, q0: int, q1: int, tiles: Sequence[Tile], saved: Residuals, memory: Memory
) -> None:
    """Split the logsumexp of large rows of a query block: ``lse`` becomes m, ``log_l`` log(l).

    This is the forward pass over the tiles of ``backward_tile``, so scores are bitwise identical
    and ``S - m`` is never above 0. A row keeps its lse if it exceeds the recomputed one by more
    than rounding explains: then it counts other keys too, as an lse from ``merge`` does. A dot
    product of D terms is off by about ``eps sqrt(D) |q_i| |k_j|``; so the norms of the keys take
    the place of values.
    """
    lse, log_l = (heads.of(x)[..., q0:q1] for x in (saved.lse, saved.log_l))
    undropped = replace(heads, dropout_p=0.0)
    state = memory.row_state(heads, q1 - q0, columns=1)
    rows = saved.of(heads).lse
    for tile in tiles:
        constant = rows.rows(tile.queries)
        q = memory.load_left("q", heads.q[..., tile.queries, :], constant, heads.scale).x
        k = memory.load_right("k", heads.kv.keys(tile.keys)).x
        part = state.rows(slice(tile.q0 - q0, tile.q1 - q0))
        update_tile(undropped, part, q, k, row_norms(k)[..., None], tile, memory)
    if heads.sinks is not None:
        state.sink(heads.sinks)
    key_norm, _ = state.finalize()
    own_log_l = np.log(state.l)
    q_norm = abs(heads.scale) * row_norms(heads.q[..., q0:q1, :].astype(heads.dtype, copy=False))
    explained = rounding_of_lse(lse, heads.q.shape[-1], q_norm, key_norm[..., 0])
    ours = heads.of(saved.large)[..., q0:q1] & (lse - state.m - own_log_l <= explained)
    np.copyto(log_l, own_log_l, where=ours)
    np.copyto(lse, state.m, where=ours)


# --- which tasks there are ----------------------------------------------------------------------


def _row_blocks(P: Problem) -> Iterator[tuple[slice, slice, slice]]:
    """Cut the rows of (B, Hq, Nq) into blocks of a fixed size, whatever the batch."""
    entry = max(1, P.Hq * P.Dv)  # elements of dO per query of a batch entry
    entries, queries = (max(1, _PREPROCESSED // n) for n in (entry * max(1, P.Nq), entry))
    for b in cut(P.B, entries):
        for i in cut(P.Nq, queries):
            yield slice(*b), slice(None), slice(*i)


def _keys_in_reach(block: tuple[HeadGroup, int, int]) -> int:
    """Return the number of keys that a query block reaches: the length of its loop."""
    heads, q0, q1 = block
    lo, hi = heads.mask.window.key_range(q0, q1)
    return hi - lo


def _multiply(z: Array, s: Array) -> None:
    s *= z
