"""Rows and pairs of rows of bfloat16, padded with 0 to whole blocks."""

from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions import bfloat16
from tileattn.kernels.llvm.instructions.code import I16, I32, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel
from tileattn.kernels.llvm.sizes import PAIR, TERMS
from tileattn.kernels.llvm.tiles.bf16_matmul import grain
from tileattn.kernels.llvm.tiles.tile import Row, Tile, transpose_rows

_SIZE = 2


def copy_row(c: Code, source: Any, columns: Any, to: Any) -> None:
    """Copy a row, padded with 0 to a multiple of TERMS."""
    whole = c.rounded_down(columns, TERMS)

    def some(d: Any, kind: Any, x: Any = None) -> None:
        offset = c.b.mul(d, i64(_SIZE))
        c.store(c.load(c.at(source, offset), kind) if x is None else x, c.at(to, offset))

    c.loop(i64(0), whole, lambda d, _: some(d, bfloat16.WORDS), step=TERMS)

    def rest() -> None:
        some(whole, bfloat16.WORDS, ir.Constant(bfloat16.WORDS, None))
        c.loop(whole, columns, lambda d, _: some(d, I16))

    c.when(c.b.icmp_signed("<", whole, columns), rest)


def copy_rows(
    c: Code, row: Row, n: Any, columns: Any, to: Any, rows: Any, first: Any = None
) -> Any:
    """Copy rows ``first`` (None: 0) to n - 1; the rest of ``rows`` is 0. Return the row stride."""
    to_step = row_bytes(c, columns)

    def copy(r: Any, _: Any) -> None:
        count = c.b.select(_between(c, first, r, n), columns, i64(0))
        place = c.at(to, c.b.mul(r, to_step))
        copy_row(c, row(r), count, place)

        def clear(d: Any, _: Any) -> None:
            c.store(ir.Constant(bfloat16.WORDS, None), c.row(place, i64(_SIZE), d))

        c.loop(c.rounded_up(count, TERMS), columns, clear, step=TERMS)

    c.loop(i64(0), rows, copy)
    return to_step


def _between(c: Code, first: Any, r: Any, n: Any) -> Any:
    """Return the condition ``first <= r < n``; None is 0."""
    before_end = c.b.icmp_signed("<", r, n)
    return before_end if first is None else c.b.and_(before_end, c.b.icmp_signed("<=", first, r))


def row_bytes(c: Code, columns: Any) -> Any:
    """Return the bytes of a padded row."""
    return c.b.mul(c.rounded_up(columns, TERMS), i64(_SIZE))


def whole_rows(
    kernel: Kernel, c: Code, source: Any, step: Any, n: Any, columns: Any, to: Any
) -> tuple[Any, Any]:
    """Return the left operand of a matmul and its stride: in place, or padded copies in ``to``."""
    rows, terms = grain(kernel.target)

    def copy() -> tuple[Any, Any]:
        row, whole = partial(c.row, source, step), c.rounded_up(n, rows)
        return to, copy_rows(c, row, n, columns, to, whole)

    odd = [c.b.srem(x, i64(size)) for x, size in ((n, rows), (columns, terms))]
    condition = c.b.icmp_signed("!=", c.b.or_(*odd), i64(0))
    place, found = c.values_when(condition, copy, source, step)
    return place, found


def transpose_pairs(c: Code, source: Any, step: Any, rows: int, columns: Any, to: Tile) -> None:
    """Transpose padded rows of neighbouring pairs to a tile of pairs of rows."""
    pairs = c.b.sdiv(c.rounded_up(columns, TERMS), i64(2))
    transpose_rows(c, "float32", partial(c.row, source, step), i64(rows), pairs, to)


def pair_rows(
    c: Code, source: Any, step: Any, n: Any, columns: Any, to: Any, to_step: Any, rows: int,
    first: Any = None,
) -> None:  # fmt: skip
    """Interleave the rows from ``first`` to n in pairs; other rows, and partial vectors, get 0."""
    kind, zero = ir.VectorType(I16, c.lanes), ir.Constant(c.integers, None)
    whole = c.rounded_down(columns, c.lanes)
    odd_row = ir.Constant(c.integers, [16] * c.lanes)

    def pair(r: Any, _: Any) -> None:
        place = c.at(to, c.b.mul(r, to_step))
        numbers = [c.b.add(c.b.mul(r, i64(2)), i64(m)) for m in (0, 1)]
        there = [_between(c, first, number, n) for number in numbers]
        starts = [c.at(source, c.b.mul(number, step)) for number in numbers]

        def vector(d: Any, _: Any) -> None:
            c.store(zero, c.at(place, c.b.mul(d, i64(PAIR))))

        def add(m: int, start: Any) -> None:
            def some(d: Any, _: Any, count: int) -> None:
                narrow, word = (kind, c.integers) if count > 1 else (I16, I32)
                x = c.b.zext(c.load(c.at(start, c.b.mul(d, i64(_SIZE))), narrow), word)
                at = c.at(place, c.b.mul(d, i64(PAIR)))
                if m:
                    x = c.b.shl(x, odd_row if count > 1 else ir.Constant(I32, 16))
                    x = c.b.or_(x, c.load(at, word))
                c.store(x, at)

            c.loop(i64(0), whole, lambda d, s: some(d, s, c.lanes), step=c.lanes)
            c.loop(whole, columns, lambda d, s: some(d, s, 1))

        clear = c.b.select(there[0], whole, i64(0))
        c.loop(clear, columns, vector, step=c.lanes)
        for m, start in enumerate(starts):
            c.when(there[m], partial(add, m, start))

    c.loop(i64(0), i64(rows // 2), pair)


def pair_sums(c: Code, source: Tile, n: Any, to: Tile) -> None:
    """Round sums to pairs of rows, filled up with 0 to a multiple of TERMS rows."""
    end, zero = c.rounded_up(n, TERMS), [c.const(0.0) for _ in source.vectors]
    c.loop(n, end, lambda r, _: source.put(r, zero))

    def pair(r: Any, _: Any) -> None:
        rows = source.row(r), source.row(c.b.add(r, i64(1)))
        new = [bfloat16.paired(c, x, y) for x, y in zip(*rows, strict=True)]
        to.put(c.b.sdiv(r, i64(2)), new)

    c.loop(i64(0), end, pair, step=2)
