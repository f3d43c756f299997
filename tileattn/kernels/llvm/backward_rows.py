"""The backward kernels over blocks of query rows: delta before, and dQ after the key blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel, Params
from tileattn.kernels.llvm.sizes import ROWS
from tileattn.kernels.llvm.tiles.compensated_sum import CompensatedSum
from tileattn.kernels.llvm.tiles.tile import Tile, size_of, store_row


def _row_of(c: Code, p: Params, number: Any) -> tuple[Any, Any, Any]:
    """Return batch entry, head and first query of a task of up to ROWS queries of one head."""
    b = c.b
    blocks = b.sdiv(b.add(p.Nq, i64(ROWS - 1)), i64(ROWS))
    head, n = b.sdiv(number, blocks), b.srem(number, blocks)
    return b.sdiv(head, p.Hq), b.srem(head, p.Hq), b.mul(n, i64(ROWS))


def _each_row(
    c: Code, p: Params, batch: Any, head: Any, first: Any, row: Callable[[Any, Any], None]
) -> None:
    """Run ``row(i, _)`` for the queries of a task, if this target computes its head."""
    end = c.smaller(p.queries(batch), c.b.add(first, i64(ROWS)))
    ours = p.computes(batch, c.b.sdiv(head, p.group))
    c.when(ours, lambda: c.loop(first, end, row) and None)


def preprocess(kernel: Kernel, c: Code, p: Params, _: Any, __: Any, number: Any) -> None:
    """``delta = rowsum(dO * O) - dlse``; dQ starts at 0."""
    b = c.b
    batch, head, first = _row_of(c, p, number)
    size = i64(size_of(kernel.dtype))
    whole = c.rounded_down(p.Dv, c.lanes)

    def row(i: Any, _: Any) -> None:
        o, do = (p.row(name, batch, head, i) for name in ("out", "dout"))

        def add(d: Any, total: list[Any], count: int) -> list[Any]:
            x, y = (c.load_as(kernel.dtype, c.at(a, b.mul(d, size)), count) for a in (o, do))
            return [c.fma(x, y, total[0])]

        many = c.loop(i64(0), whole, lambda d, t: add(d, t, c.lanes), [c.const(0.0)], c.lanes)
        few = c.loop(whole, p.Dv, lambda d, t: add(d, t, 1), [ir.Constant(c.scalar, 0.0)])
        rowsum = b.fadd(c.sum(many[0]), few[0])

        def less() -> list[Any]:
            return [b.fsub(rowsum, c.load(p.row("dlse", batch, head, i), c.scalar))]

        (delta,) = c.values_when(p.given("dlse"), less, rowsum)
        c.store(delta, p.row("delta", batch, head, i))
        dq, vectors = p.row("dq_accum", batch, head, i), b.sdiv(p.dq_columns, i64(c.lanes))
        Tile(c, dq, 1).fill(vectors, c.const(0.0))

    _each_row(c, p, batch, head, first, row)


def add_dq_section(
    c: Code, p: Params, batch: Any, head: Any, i: Any, *, settle: bool = False
) -> None:
    """Add the dQ of one query over a section of keys to its total, and start the next section.

    With ``settle``, replace it by the total.
    """
    dq, high, low = (
        Tile(c, p.row(name, batch, head, i), 1) for name in ("dq_accum", "dq_high", "dq_low")
    )
    total, zero = CompensatedSum(c, high, low), [c.const(0.0)]

    def add(n: Any) -> None:
        total.add(n, dq.row(n))
        dq.put(n, total.value(n) if settle else zero)

    c.each(c.b.sdiv(p.dq_columns, i64(c.lanes)), add)


def convert_dq(kernel: Kernel, c: Code, p: Params, _: Any, __: Any, number: Any) -> None:
    """``dQ = scale * sum``, in the dtype of q."""
    batch, head, first = _row_of(c, p, number)
    scale = p.scale

    def row(i: Any, _: Any) -> None:
        settle = partial(add_dq_section, c, p, batch, head, i, settle=True)
        c.when(p.given("dq_section"), settle)
        source, to = p.row("dq_accum", batch, head, i), p.row("dq", batch, head, i)
        store_row(c, kernel.dtype, source, to, p.D, scale)

    _each_row(c, p, batch, head, first, row)
