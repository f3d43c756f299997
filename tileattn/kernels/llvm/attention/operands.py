"""Operands of both passes in the accumulation dtype; one side of a matmul is broadcast.

Q is multiplied by the power of two in the scale, and S by the rest of it. So nothing is rounded
that the plain formula does not round, and matmuls of small integers are exact.
``bf16_operands.py`` has the same methods for bfloat16 instructions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from tileattn.kernels.llvm.attention.softmax import RowState
from tileattn.kernels.llvm.instructions.code import I1, Code, i64, same
from tileattn.kernels.llvm.instructions.kernel import Kernel, Params
from tileattn.kernels.llvm.sizes import ROWS
from tileattn.kernels.llvm.tiles.bits import Bits
from tileattn.kernels.llvm.tiles.matmul import masked_matmul, matmul
from tileattn.kernels.llvm.tiles.scratch import Scratch
from tileattn.kernels.llvm.tiles.tile import Row, Tile, all_finite, convert_rows, transpose_rows


class ForwardBroadcast:
    """Q in vector lanes; K and V are broadcast in place, or converted first.

    Of the vectors of a tile, ``used`` hold rows.
    """

    def __init__(
        self, kernel: Kernel, c: Code, p: Params, memory: Scratch, batch: Any, head: Any, used: Any
    ) -> None:
        self.kernel, self.c, self.p = kernel, c, p
        self.batch, self.head, self.used = batch, head, used
        self.q, self.acc = memory.tile(p.D), memory.tile(p.Dv)
        keys = kernel.target.keys
        self.k_rows, self.v_rows = memory.rows(keys, p.D), memory.rows(keys, p.Dv)

    def load_queries(self, row: Row, rows: Any) -> None:
        """Load the rows at given addresses."""
        c, p = self.c, self.p
        transpose_rows(c, self.kernel.dtype, row, rows, p.D, self.q, p.scale_power)

    def scores(self, k0: Any, n: Any, s: Tile, _: Any) -> None:
        """``S = scale K Q^T``, a row for each key."""
        k, k_step = self._load("k", self.k_rows, k0, n, self.p.D)
        a, to = (k, k_step, i64(self.c.size)), (s.start, i64(s.step))
        right = self.q.start, i64(self.q.step)
        matmul(self.kernel, self.c, self.used, n, self.p.D, a, right, to, add=False)
        s.multiply(n, self.p.scale_rest)

    def update(self, rows: RowState, n: Any, s: Tile, drop: Callable[[], None]) -> None:
        """Turn scores into P."""
        rows.update(s, n)
        self.c.when(self.p.given("threshold"), drop)

    def add_values(self, k0: Any, n: Any, s: Tile, visible: Bits, masked: Any) -> None:
        """``acc += V^T P``, where ``s`` is P; over visible pairs only if V is not finite."""
        c, p = self.c, self.p
        v, v_step = self._load("v", self.v_rows, k0, n, p.Dv)
        (clean,) = c.values_when(masked, lambda: [all_finite(c, v, v_step, n, p.Dv)], same(I1, 1))
        a, to = (v, i64(c.size), v_step), (self.acc.start, i64(self.acc.step))
        operands = self.kernel, c, self.used, p.Dv, n, a, (s.start, i64(s.step))
        c.when_else(
            clean,
            lambda: matmul(*operands, to, add=True),
            lambda: masked_matmul(*operands, visible, to),
        )

    def _load(self, name: str, rows: Any, k0: Any, n: Any, columns: Any) -> tuple[Any, Any]:
        """Return K or V in the accumulation dtype and the row stride: in place, or converted.

        Quantised rows are multiplied by their descales.
        """
        c, p = self.c, self.p
        to_step, dtype = c.bytes_of(columns), self.kernel.kv_dtype
        place = name, self.batch, self.head

        def copy(row: Any, to: Any, factor: Any = None) -> None:
            convert_rows(c, dtype, row, i64(0), i64(1), columns, to, i64(0), factor)

        def key(n: Any) -> None:
            j = c.b.add(k0, n)
            copy(p.key_row(*place, j), c.row(rows, to_step, n), p.factor(*place, j))

        if dtype == c.dtype:
            return p.key_rows(*place, k0, n, (rows, to_step), copy)
        if p.paged or p.quantised:
            c.each(n, key)
        else:
            source, step = p.row(*place, k0), getattr(p, f"{name}_j")
            convert_rows(c, dtype, source, step, n, columns, rows, to_step)
        return rows, to_step


class BackwardBroadcast:
    """K and V in vector lanes; Q and dO are broadcast, and for dQ dS is."""

    def __init__(self, kernel: Kernel, c: Code, p: Params, memory: Scratch) -> None:
        self.kernel, self.c, self.p = kernel, c, p
        self.k, self.dk = memory.tile(p.D), memory.tile(p.D)
        self.v, self.dv = memory.tile(p.Dv), memory.tile(p.Dv)
        self.q_rows, self.dout_rows = memory.rows(ROWS, p.D), memory.rows(ROWS, p.Dv)
        self.W = kernel.target.vectors * c.lanes
        self.k_rows = memory.rows(self.W, p.dq_columns)

    @property
    def dk_scale(self) -> Any:
        """Factor of the sum of dK."""
        return self.p.scale_rest

    def load_keys(self, batch: Any, head: Any, k0: Any, keys: Any) -> None:
        """Load the keys and values of the block; set dK and dV to 0."""
        c, b, p = self.c, self.c.b, self.p
        self.keys, self.used = keys, c.vectors_of(keys)
        dtype, zero = self.kernel.dtype, c.const(0.0)
        tiles = ("k", self.k, self.dk, p.D), ("v", self.v, self.dv, p.Dv)
        for name, tile, grad, columns in tiles:
            for each in (tile, grad):
                each.fill(columns, zero)
            source, step = p.row(name, batch, head, k0), getattr(p, f"{name}_j")
            transpose_rows(c, dtype, partial(c.row, source, step), self.keys, columns, tile)
        c.loop(
            i64(0), b.mul(i64(self.W), p.dq_columns),
            lambda n, _: c.store(zero, c.at(self.k_rows, c.bytes_of(n))), (), c.lanes,
        )  # fmt: skip
        source = p.row("k", batch, head, k0)
        width = c.bytes_of(p.dq_columns)
        convert_rows(c, dtype, source, p.k_j, self.keys, p.D, self.k_rows, width)

    def load_queries(self, batch: Any, h: Any, i0: Any, n: Any) -> None:
        """Load the rows of Q and dO of a tile."""
        self.batch, self.h, self.i0, self.n = batch, h, i0, n
        self.q = self._load("q", self.q_rows, self.p.D, self.p.scale_power)
        self.dout = self._load("dout", self.dout_rows, self.p.Dv, None)

    def scores(self, s: Tile, dp: Tile) -> None:
        """``S = scale Q K^T`` and ``dP = dO V^T``, a row for each query."""
        products = (self.q, self.k, self.p.D, s), (self.dout, self.v, self.p.Dv, dp)
        for (left, step), right, columns, tile in products:
            a, to = (left, step, i64(self.c.size)), (tile.start, i64(tile.step))
            operands = self.used, self.n, columns, a, (right.start, i64(right.step))
            matmul(self.kernel, self.c, *operands, to, add=False)
        s.multiply(self.n, self.p.scale_rest)

    def add_gradients(self, p: Any, ds: Any, visible: Bits, masked: Any, wait: Any) -> None:
        """``dV += P^T dO``, ``dK += dS^T Q`` and, after a wait, ``dQ += dS K``."""
        c = self.c

        def look() -> list[Any]:
            k = self.k_rows, c.bytes_of(self.p.dq_columns)
            rows = (*self.q, self.n, self.p.D), (*self.dout, self.n, self.p.Dv)
            parts = *rows, (*k, self.keys, self.p.D)
            return [c.all([all_finite(c, *part) for part in parts])]

        def add(seen: Any) -> None:
            parts = (self.dv, self.p.Dv, self.dout, p), (self.dk, self.p.D, self.q, ds)
            width = i64(self.dk.step)
            for to, columns, (left, step), right in parts:
                a, sums = (left, i64(c.size), step), (to.start, width)
                self._multiply(self.used, columns, self.n, a, (right, width), sums, seen, False)
            wait()
            self._add_dq(ds, width, seen)

        (clean,) = c.values_when(masked, look, same(I1, 1))
        c.when_else(clean, lambda: add(None), lambda: add(visible))

    def _multiply(
        self, vectors: Any, n_i: Any, n_k: Any, a: Any, b: Any, to: Any, seen: Any, of_a: bool
    ) -> None:
        """Add a matmul; over visible pairs only if an operand is not finite."""
        if seen is None:
            matmul(self.kernel, self.c, vectors, n_i, n_k, a, b, to, add=True)
        else:
            masked_matmul(self.kernel, self.c, vectors, n_i, n_k, a, b, seen, to, of_a=of_a)

    def _add_dq(self, grad: Any, grad_step: Any, seen: Any) -> None:
        """``dQ += dS K``, in parts of a few vectors of columns."""
        c, b, p = self.c, self.c.b, self.p
        most = self.kernel.target.vectors
        step = c.bytes_of(p.dq_columns)
        dq = p.row("dq_accum", self.batch, self.h, self.i0)
        total = b.sdiv(p.dq_columns, i64(c.lanes))
        steps = b.sdiv(b.add(total, i64(most - 1)), i64(most))

        def columns(m: Any) -> None:
            """Take part m of the columns; all parts have nearly the same width."""
            first = b.sdiv(b.mul(total, m), steps)
            count = b.sub(b.sdiv(b.mul(total, b.add(m, i64(1))), steps), first)
            d = c.bytes_of(b.mul(first, i64(c.lanes)))
            a = grad, grad_step, i64(c.size)
            right, to = (c.at(self.k_rows, d), step), (c.at(dq, d), p.dq_accum_i)
            self._multiply(count, self.n, self.keys, a, right, to, seen, True)

        c.each(steps, columns)

    def _load(self, name: str, rows: Any, columns: Any, scale: Any) -> tuple[Any, Any]:
        """Return rows of Q or dO in the accumulation dtype, and their stride."""
        c, p = self.c, self.p
        source, step = p.row(name, self.batch, self.h, self.i0), getattr(p, f"{name}_i")
        if self.kernel.dtype == c.dtype and scale is None:
            return source, step
        to_step = c.bytes_of(columns)
        convert_rows(c, self.kernel.dtype, source, step, self.n, columns, rows, to_step, scale)
        return rows, to_step
