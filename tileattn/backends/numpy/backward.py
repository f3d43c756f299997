"""The backward pass on NumPy arrays: one task for each key block, sums in a fixed order."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tileattn import record
from tileattn.algorithm import spec
from tileattn.algorithm.heads import Lane, lanes
from tileattn.algorithm.mask import Tile, cut
from tileattn.algorithm.softmax import Array, Scratch
from tileattn.backends.numpy.threads import Turns, borrowed_scratch
from tileattn.problem import Operands, Problem
from tileattn.results import Attention, Gradients


class Backward:
    """One backward pass: its tasks, and the arrays that they fill.

    A task owns a key block of a group of lanes: ``dk``, ``dv`` and the bias columns of the block
    are its own. Rows of ``dq`` (and of a bias that is broadcast over keys) are shared by all tasks
    of the group, which add to them in turns. A group holds one key head, or all that a bias is
    broadcast over.

    Parameters
    ----------
    problem : Problem
        What is asked.
    operands : Operands
        The arrays.
    dout : array, shape (B, Hq, Nq, Dv)
        Gradient that arrives at the output.
    attention : Attention
        What the forward pass has returned, with four axes.
    dlse : array, shape (B, Hq, Nq), or None
        Gradient that arrives at the logsumexp.
    tile : (int, int)
        Queries and keys of a tile.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        dout: Array,
        attention: Attention,
        dlse: Array | None,
        tile: tuple[int, int],
    ) -> None:
        P, dtype = problem, problem.sum_dtype
        self._problem, self._operands = problem, operands
        self._block_q, self._block_k = tile
        self._dout = dout
        self._lse = np.where(np.isneginf(attention.lse), 0, attention.lse).astype(dtype, copy=False)
        self._rounded = spec.rounded(self._lse, P.dtype)
        self._lse_lo = np.zeros_like(self._lse) if self._rounded.any() else None
        with np.errstate(all="ignore"):
            self._delta = _delta(dout, attention.out, dlse, dtype)
        self._dq = np.zeros((P.B, P.Hq, P.Nq, P.D), dtype)
        self._dk = np.zeros((P.B, P.Hkv, P.Nk, P.D), P.dtype)
        self._dv = np.zeros((P.B, P.Hkv, P.Nk, P.Dv), P.dtype)
        self._dbias = _bias_sums(operands.bias, P)
        record.read("dout", dout)
        record.read("out", attention.out)
        record.write("delta", self._delta)
        record.write("dq", self._dq)

    def first_tasks(self) -> list[Callable[[], None]]:
        """List what comes before the other tasks: the rows whose logsumexp has lost too much."""
        blocks: dict[tuple[int, int, int], tuple[Lane, list[Tile]]] = {}
        if self._lse_lo is None:
            return []
        for lane in lanes(self._problem, self._operands):
            rows: Array = np.asarray(lane.heads_of(self._rounded).any(axis=(0, 1)))
            for span in cut(self._problem.Nk, self._block_k):
                for tile in lane.sight.column_tiles(*span, self._block_q):
                    q0 = tile.q0 - tile.q0 % self._block_q
                    if rows[q0 : q0 + self._block_q].any():
                        key = lane.batch, lane.heads.start, q0
                        blocks.setdefault(key, (lane, []))[1].append(tile)
        return [
            partial(self._renormalise, self._lse_lo, lane, q0, tiles)
            for (*_, q0), (lane, tiles) in blocks.items()
        ]

    def tasks(self) -> list[Callable[[], None]]:
        """List the tasks; key blocks ascend within each group of lanes."""
        groups = self._groups()
        spans = list(cut(self._problem.Nk, self._block_k))
        turns = [Turns(len(spans)) for _ in groups]
        return [
            partial(self._run, group, turn, index, *span)
            for index, span in enumerate(spans)
            for group, turn in zip(groups, turns, strict=True)
        ]

    def gradients(self) -> Gradients:
        """Return what the tasks have computed, in the dtypes of the inputs."""
        bias = self._operands.bias
        dbias = self._dbias
        with np.errstate(all="ignore"):  # a cast to 16 bits may overflow
            if dbias is not None:
                if dbias.shape[2] != bias.shape[2]:
                    dbias = dbias.sum(axis=2, keepdims=True)
                dbias = dbias.astype(bias.dtype, copy=False)
            self._dq *= self._problem.sum_dtype.type(self._problem.scale)
            dq = self._dq.astype(self._problem.dtype, copy=False)
            dsinks = self._sink_gradient()
        return Gradients(dq, self._dk, self._dv, dbias, dsinks)

    def _groups(self) -> list[list[Lane]]:
        P, bias = self._problem, self._operands.bias
        over_batch = bias is not None and bias.shape[0] < P.B
        over_heads = bias is not None and bias.shape[1] < P.Hq
        groups: dict[tuple[int, int], list[Lane]] = {}
        for lane in lanes(P, self._operands):
            key = (0 if over_batch else lane.batch, 0 if over_heads else lane.kv)
            groups.setdefault(key, []).append(lane)
        return list(groups.values())

    def _run(self, group: list[Lane], turns: Turns, task: int, k0: int, k1: int) -> None:
        """Visit every tile of one key block, query blocks ascending."""
        end = -(-self._problem.Nq // self._block_q)
        try:
            with np.errstate(all="ignore"), borrowed_scratch() as scratch:
                visits = sorted(
                    (tile.q0 // self._block_q, number, tile)
                    for number, lane in enumerate(group)
                    for tile in lane.sight.column_tiles(k0, k1, self._block_q)
                )
                blocks: dict[tuple[int, int], spec.KeyBlock] = {}
                upstream = [self._upstream(lane) for lane in group]
                for n, (row_block, number, tile) in enumerate(visits):
                    lane = group[number]
                    where = lane.batch, lane.kv
                    if where not in blocks:
                        memory = Scratch() if blocks else scratch  # one block stays in the cache
                        blocks[where] = spec.KeyBlock.load(lane, k0, k1, memory)
                    dq, ds = spec.backward_tile(
                        lane, upstream[number], blocks[where], tile, scratch
                    )
                    turns.wait(task, row_block)
                    self._add_dq(lane, tile, dq)
                    self._add_bias(lane, tile, ds)
                    if n + 1 == len(visits) or visits[n + 1][0] > row_block:
                        turns.pass_to(task, row_block + 1)
                self._store(group, blocks, k0, k1)
            turns.wait(task, end - 1)
            turns.pass_to(task, end)
        except BaseException:
            turns.break_off()
            raise

    def _renormalise(self, lse_lo: Array, lane: Lane, q0: int, tiles: list[Tile]) -> None:
        q1 = min(q0 + self._block_q, self._problem.Nq)
        with np.errstate(all="ignore"), borrowed_scratch() as scratch:
            words = lane.heads_of(self._lse), lane.heads_of(lse_lo)
            spec.renormalise(lane, words, q0, q1, tiles, scratch)

    def _upstream(self, lane: Lane) -> spec.Upstream:
        up = spec.Upstream(*(lane.heads_of(x) for x in (self._dout, self._lse, self._delta)))
        if self._lse_lo is None:
            return up
        split = np.asarray(lane.heads_of(self._rounded).any(axis=-1))[..., None, None]
        if not split.any():
            return up
        return replace(up, lse_lo=lane.heads_of(self._lse_lo), split=split)

    def _add_dq(self, lane: Lane, tile: Tile, dq: Array) -> None:
        total = lane.heads_of(self._dq)[..., tile.queries, :]
        record.read("dq", total)
        total += dq
        record.write("dq", total)

    def _add_bias(self, lane: Lane, tile: Tile, ds: Array) -> None:
        total = self._dbias
        if total is None:
            return
        rows = tile.queries if total.shape[2] > 1 else slice(None)
        keys = tile.keys if total.shape[3] > 1 else slice(None)
        if total.shape[3] == 1:
            ds = ds.sum(axis=3, keepdims=True)
        if total.shape[2] == 1:
            ds = ds.sum(axis=2, keepdims=True)
        entry = total[lane.batch if total.shape[0] > 1 else 0]
        if total.shape[1] > 1:
            part = entry[lane.heads]
            part[:, rows, keys] += ds.reshape((len(part), *ds.shape[2:]))
        else:
            entry[0, rows, keys] += ds.sum(axis=(0, 1))

    def _store(
        self, group: list[Lane], blocks: dict[tuple[int, int], spec.KeyBlock], k0: int, k1: int
    ) -> None:
        """Store the gradients of a key block; those of keys that nobody sees stay 0."""
        heads_of = {(lane.batch, lane.kv): len(lane.k) for lane in group}
        for (batch, kv), heads in heads_of.items():
            dk, dv = (x[batch, kv : kv + heads, k0:k1] for x in (self._dk, self._dv))
            block = blocks.get((batch, kv))
            if block is not None:
                dk[...], dv[...] = block.dk[:, 0], block.dv[:, 0]
            record.write("dk", dk)
            record.write("dv", dv)

    def _sink_gradient(self) -> Array | None:
        """Sum of ``-exp(sink - lse) * delta``: a sink has a probability and the value 0."""
        sinks = self._operands.sinks
        if sinks is None:
            return None
        exponent = sinks.astype(self._lse.dtype)[:, None] - self._lse
        if self._lse_lo is not None:
            exponent -= self._lse_lo
        p = np.exp(exponent)
        total = -(p * self._delta).sum(axis=(0, 2))
        total[np.isneginf(sinks)] = 0
        return np.asarray(total.astype(sinks.dtype, copy=False))


def _delta(dout: Array, out: Array, dlse: Array | None, dtype: np.dtype[Any]) -> Array:
    """``rowsum(dout * out) - dlse``, without an array of the size of ``out``."""
    dout, out = (x.astype(dtype, copy=False) for x in (dout, out))
    delta: Array = np.einsum("bhid,bhid->bhi", dout, out)
    return delta if dlse is None else delta - dlse


def _bias_sums(bias: Array | None, P: Problem) -> Array | None:
    """Zeros for the gradient at the bias; a bias over neither axis is summed row by row first."""
    if bias is None:
        return None
    Bb, Hb, Nb, Kb = bias.shape
    return np.zeros((Bb, Hb, P.Nq if Kb == 1 else Nb, Kb), P.sum_dtype)
