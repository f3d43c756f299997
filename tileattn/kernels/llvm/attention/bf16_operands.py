"""Operands of both passes for bfloat16 matmuls, with the methods of ``operands.py``.

``bf16_prepare`` has found all their elements finite and of ordinary size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.attention.bf16_prepare import keys_in_reach, transposed_block
from tileattn.kernels.llvm.attention.softmax import RowState
from tileattn.kernels.llvm.instructions.bfloat16 import narrowed, paired
from tileattn.kernels.llvm.instructions.code import Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel, Params
from tileattn.kernels.llvm.sizes import BLOCK, ROWS, TERMS
from tileattn.kernels.llvm.tiles.bf16_matmul import bf16_matmul, grain
from tileattn.kernels.llvm.tiles.bf16_rows import (
    copy_rows,
    pair_rows,
    pair_sums,
    row_bytes,
    transpose_pairs,
    whole_rows,
)
from tileattn.kernels.llvm.tiles.bits import Bits
from tileattn.kernels.llvm.tiles.scratch import Scratch
from tileattn.kernels.llvm.tiles.tile import Row, Tile


def _bf16_rows(c: Code, memory: Scratch, rows: int, columns: Any) -> Any:
    """Allocate padded rows of bfloat16."""
    return memory.rows(rows, c.b.sdiv(c.rounded_up(columns, TERMS), i64(2)))


def _pairs(c: Code, memory: Scratch, columns: Any) -> Tile:
    """Allocate a tile of pairs with a row for two of ``columns`` terms."""
    return memory.tile(c.b.sdiv(c.rounded_up(columns, TERMS), i64(2)))


class ForwardBf16:
    """Q in vector lanes, in pairs; rows of K in place, and V transposed."""

    def __init__(
        self, kernel: Kernel, c: Code, p: Params, memory: Scratch, batch: Any, head: Any, used: Any
    ) -> None:
        self.kernel, self.c, self.p = kernel, c, p
        self.batch, self.head, self.used = batch, head, used
        self.W = kernel.target.vectors * c.lanes
        self.q, self.acc = _pairs(c, memory, p.D), memory.tile(c.rounded_up(p.Dv, TERMS))
        self.weights = memory.tile(kernel.target.keys // 2)
        self.q_rows = _bf16_rows(c, memory, self.W, p.D)
        self.k_rows = _bf16_rows(c, memory, kernel.target.keys, p.D)

    def load_queries(self, row: Row, rows: Any) -> None:
        """Load the rows at given addresses, and turn them into pairs."""
        c, p = self.c, self.p
        copy_rows(c, row, rows, p.D, self.q_rows, i64(self.W))
        transpose_pairs(c, self.q_rows, row_bytes(c, p.D), self.W, p.D, self.q)

    def scores(self, k0: Any, n: Any, s: Tile, read: Any) -> None:
        """``S = scale K Q^T``, a row for each key; if no option reads S, the scale comes later."""
        c, b, p = self.c, self.c.b, self.p
        source = p.row("k", self.batch, self.head, k0)
        k = whole_rows(self.kernel, c, source, p.k_j, n, p.D, self.k_rows)
        right, to = (self.q.start, i64(self.q.step)), (s.start, i64(s.step))
        bf16_matmul(self.kernel, c, self.used, n, p.D, k, right, to, add=False)
        one = ir.Constant(c.scalar, 1.0)
        at_once = b.or_(read, b.fcmp_unordered("<=", p.scale, ir.Constant(c.scalar, 0.0)))
        s.multiply(n, b.select(at_once, p.scale, one))
        self.factor = b.select(at_once, one, p.scale)

    def update(self, rows: RowState, n: Any, s: Tile, drop: Callable[[], None]) -> None:
        """Turn scores into P, in pairs."""
        c, b, to = self.c, self.c.b, self.weights
        end, nothing = c.rounded_up(n, TERMS), [c.const(-math.inf) for _ in s.vectors]

        def put(j: Any, even: list[Any], odd: list[Any]) -> None:
            to.put(b.sdiv(j, i64(2)), [paired(c, *x) for x in zip(even, odd, strict=True)])

        def dropping() -> None:
            rows.update(s, n, self.factor)
            drop()
            pair_sums(c, s, n, to)

        def keeping() -> None:
            c.loop(n, end, lambda j, _: s.put(j, nothing))
            rows.update(s, end, self.factor, put)

        c.when_else(self.p.given("threshold"), dropping, keeping)

    def add_values(self, k0: Any, n: Any, s: Tile, visible: Bits, masked: Any) -> None:  # noqa: ARG002 - all values are finite
        """``acc += V^T P``."""
        c, p = self.c, self.p
        v = transposed_block(c, p, "v", self.batch, self.head, k0), i64(2 * BLOCK)
        right = self.weights.start, i64(self.weights.step)
        to = self.acc.start, i64(self.acc.step)
        bf16_matmul(self.kernel, c, self.used, p.Dv, n, v, right, to, add=True)


class BackwardBf16:
    """K and V in vector lanes, in pairs; rows of Q and dO in place, and transposed."""

    def __init__(self, kernel: Kernel, c: Code, p: Params, memory: Scratch) -> None:
        self.kernel, self.c, self.p = kernel, c, p
        self.W = kernel.target.vectors * c.lanes
        self.k, self.v = (_pairs(c, memory, columns) for columns in (p.D, p.Dv))
        self.dk, self.dv = (memory.tile(c.rounded_up(columns, TERMS)) for columns in (p.D, p.Dv))
        self.pairs, self.ds_rows = memory.tile(ROWS // 2), memory.tile(ROWS // 2)
        self.q_rows = _bf16_rows(c, memory, ROWS, p.D)
        self.dout_rows = _bf16_rows(c, memory, ROWS, p.Dv)
        self.key_rows = _bf16_rows(c, memory, self.W, c.larger(p.D, p.Dv))
        self.k_pairs = memory.rows(self.W // 2, p.dq_columns)
        self.dq_rows = memory.rows(ROWS, p.dq_columns)

    @property
    def dk_scale(self) -> Any:
        """Factor of the sum of dK."""
        return self.p.scale

    def load_keys(self, batch: Any, head: Any, k0: Any, keys: Any) -> None:
        """Load the keys and values of the block; set dK and dV to 0."""
        c, p = self.c, self.p
        self.keys, self.used = keys, c.vectors_of(keys)
        first, end = keys_in_reach(c, p, batch)
        tiles = ("k", self.k, self.dk, p.D), ("v", self.v, self.dv, p.Dv)
        for name, tile, grad, columns in tiles:
            grad.fill(columns, c.const(0.0))
            source, step = p.row(name, batch, head, k0), getattr(p, f"{name}_j")
            n, hidden = c.smaller(keys, c.b.sub(end, k0)), c.b.sub(first, k0)
            copied = self.key_rows, i64(self.W), hidden
            to_step = copy_rows(c, partial(c.row, source, step), n, columns, *copied)
            transpose_pairs(c, self.key_rows, to_step, self.W, columns, tile)
            if name == "k":
                width = c.bytes_of(p.dq_columns)
                pair_rows(c, source, step, n, columns, self.k_pairs, width, self.W, hidden)

    def load_queries(self, batch: Any, h: Any, i0: Any, n: Any) -> None:
        """Set the rows of Q and dO of a tile."""
        self.batch, self.h, self.i0, self.n = batch, h, i0, n

        def rows(name: str, columns: Any, to: Any) -> tuple[Any, Any]:
            source, step = self.p.row(name, batch, h, i0), getattr(self.p, f"{name}_i")
            return whole_rows(self.kernel, self.c, source, step, n, columns, to)

        self.q = rows("q", self.p.D, self.q_rows)
        self.dout = rows("dout", self.p.Dv, self.dout_rows)

    def scores(self, s: Tile, dp: Tile) -> None:
        """``S = scale Q K^T`` and ``dP = dO V^T``, a row for each query."""
        products = (self.q, self.k, self.p.D, s), (self.dout, self.v, self.p.Dv, dp)
        for left, right, columns, tile in products:
            operands = self.used, self.n, columns, left, (right.start, i64(right.step))
            to = tile.start, i64(tile.step)
            bf16_matmul(self.kernel, self.c, *operands, to, add=False)
        s.multiply(self.n, self.p.scale)

    def add_gradients(self, p: Any, ds: Any, visible: Bits, masked: Any, wait: Any) -> None:  # noqa: ARG002 - all operands are finite
        """``dV += P^T dO``, ``dK += dS^T Q`` and, after a wait, ``dQ += dS K``."""
        c, n = self.c, self.n
        products = ("dout", p, self.dv, self.p.Dv), ("q", ds, self.dk, self.p.D)
        for name, sums, to, columns in products:
            pair_sums(c, Tile(c, sums, self.kernel.target.vectors), n, self.pairs)
            left = transposed_block(c, self.p, name, self.batch, self.h, self.i0), i64(2 * BLOCK)
            right = self.pairs.start, i64(self.pairs.step)
            operands = self.used, columns, n, left, right, (to.start, i64(to.step))
            bf16_matmul(self.kernel, c, *operands, add=True)
        self._round_rows(Tile(c, ds, self.kernel.target.vectors))
        wait()
        self._add_dq()

    def _add_dq(self) -> None:
        """``dQ += dS K``; through scratch memory if the rows of dQ do not fill a register block."""
        c, b, n, columns = self.c, self.c.b, self.n, self.p.dq_columns
        vectors, step = b.sdiv(columns, i64(c.lanes)), c.bytes_of(columns)
        left, right = (self.ds_rows.start, i64(2 * self.W)), (self.k_pairs, step)
        operands = vectors, n, self.keys, left, right
        dq, dq_step = self.p.row("dq_accum", self.batch, self.h, self.i0), self.p.dq_accum_i
        whole = b.icmp_signed("==", b.srem(n, i64(grain(self.kernel.target)[0])), i64(0))

        def row(r: Any) -> None:
            place, more = c.row(dq, dq_step, r), c.row(self.dq_rows, step, r)

            def add(d: Any, _: Any) -> None:
                at = c.at(place, c.bytes_of(d))
                x = c.load(c.at(more, c.bytes_of(d)))
                c.store(b.fadd(c.load(at), x), at)

            c.loop(i64(0), columns, add, step=c.lanes)

        def through_scratch() -> None:
            bf16_matmul(self.kernel, c, *operands, (self.dq_rows, step), add=False)
            c.each(n, row)

        def in_place() -> None:
            bf16_matmul(self.kernel, c, *operands, (dq, dq_step), add=True)

        c.when_else(whole, in_place, through_scratch)

    def _round_rows(self, ds: Tile) -> None:
        """Round dS to rows of bfloat16, padded with 0 past the keys."""
        c = self.c
        width, keys = c.lanes, c.splat(c.b.trunc(self.keys, c.integer))
        lanes = (
            ir.Constant(c.integers, list(range(width * v, width * (v + 1)))) for v in ds.vectors
        )
        inside = [c.b.icmp_signed("<", lane, keys) for lane in lanes]

        def row(r: Any) -> None:
            x = [c.b.select(z, y, c.const(0.0)) for z, y in zip(inside, ds.row(r), strict=True)]
            place = c.at(self.ds_rows.start, c.b.mul(r, i64(2 * self.W)))
            for v in range(0, len(x), 2):
                words = narrowed(c, x[v], x[v + 1])
                c.store(words, c.at(place, 2 * v * width))

        c.each(self.n, row)
