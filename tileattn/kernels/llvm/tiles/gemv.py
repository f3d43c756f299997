"""Matmuls of a few rows with an array that is read once, in place (K or V when decoding).

Rows of the array are read in order, each from start to end, which hardware prefetches; any other
order took twice the time. Their elements lie in vector lanes; the last vector may be partial.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import I64, POINTER, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel
from tileattn.kernels.llvm.tiles.bits import Bits
from tileattn.kernels.llvm.tiles.tile import size_of

_OPERANDS = [POINTER, I64, POINTER, I64, POINTER, I64, I64, I64, I64]
_VECTORS = 8  # sum vectors of one row: 2 FMAs a cycle times a latency of 4 cycles
_ROWS = 4  # rows of A that share a load of B
_AHEAD = 16  # rows of B from a load to its prefetch: (B, N, H, D) rows may lie pages apart


def dots_of_rows(
    kernel: Kernel, c: Code, rows: Any, n: Any, columns: Any, a: Any, b: Any, to: Any
) -> None:
    """Emit ``C[i, j] = sum over d of A[i, d] * B[j, d]``.

    Rows of A are padded with 0 to whole vectors, and rows of C with anything. Strides are bytes:
    ``a = (A, a_i)``, ``b = (B, b_j)``, ``to = (C, c_i)``.
    """

    def body(
        c: Code, a: Any, a_i: Any, b: Any, b_j: Any, to: Any, c_i: Any, rows: Any, n: Any,
        columns: Any,
    ) -> None:  # fmt: skip
        whole, rest = cut(c, columns)
        ahead = c.b.mul(b_j, i64(_AHEAD))

        def term(left: list[Any], start: Any, lanes: Any, d: Any, sums: list[Any]) -> list[Any]:
            at = c.row(start, i64(size_of(kernel.dtype)), d)
            c.prefetch(c.at(at, ahead))
            y = c.load_as(kernel.dtype, at, c.lanes, lanes)
            x = (c.load(c.at(row, c.bytes_of(d))) for row in left)
            return [c.fma(p, y, total) for p, total in zip(x, sums, strict=True)]

        def square(i: Any, count: int, end: bool, j: Any, _: Any) -> None:
            """Emit one vector of sums; past the end of B, its last row repeats."""
            left = [c.row(a, a_i, c.b.add(i, i64(r))) for r in range(count)]
            start, keys = c.row(b, b_j, j), c.lanes // count
            sums = []
            for t in range(keys):
                part = [c.const(0.0)] * count
                for first, last, lanes in ((i64(0), whole, None), (whole, columns, rest)):
                    part = c.loop(first, last, partial(term, left, start, lanes), part, c.lanes)
                sums.append(part)
                there = c.b.icmp_signed("<", c.b.add(j, i64(t + 1)), n)
                start = c.at(start, c.b.select(there, b_j, i64(0)) if end else b_j)
            found = _sums(c, [x for row in zip(*sums, strict=True) for x in row])
            for r in range(count):
                some = c.shuffle(found, found, [r * keys + t for t in range(keys)])
                c.store(some, c.at(c.row(to, c_i, c.b.add(i, i64(r))), c.bytes_of(j)))

        def vector(end: bool, j: Any, _: Any) -> None:
            def some(i: Any, count: int) -> None:
                after = c.smaller(n, c.b.add(j, i64(c.lanes)))
                c.loop(j, after, partial(square, i, count, end), (), c.lanes // count)

            each_rows(c, rows, _ROWS, some)

        full = c.rounded_down(n, c.lanes)
        c.loop(i64(0), full, partial(vector, False), step=c.lanes)
        c.loop(full, n, partial(vector, True), step=c.lanes)

    function = kernel.function("dots_of_rows", _OPERANDS, body)
    c.b.call(function, [*a, *b, *to, rows, n, columns])


def sums_of_rows(
    kernel: Kernel, c: Code, rows: Any, n: Any, columns: Any, a: Any, b: Any, to: Any,
    visible: Bits | None = None,
) -> None:  # fmt: skip
    """Emit ``C[i, d] = sum over j of A[i, j] * B[j, d]``; arguments as in `dots_of_rows`.

    ``visible`` has a bit for each element of A; an element of B with bit 0 may be NaN or infinite.
    """

    def body(
        c: Code, a: Any, a_i: Any, b: Any, b_j: Any, to: Any, c_i: Any, rows: Any, n: Any,
        columns: Any, *visible: Any,
    ) -> None:  # fmt: skip
        strips = partial(each_strip, c, columns, cut(c, columns))
        ahead, size = c.b.mul(b_j, i64(_AHEAD)), i64(size_of(kernel.dtype))
        pairs = [Bits(c, words, 1) for words in visible]

        def strip(i: Any, count: int, vectors: int, lanes: Any, d: Any, _: Any) -> None:
            """Emit the sums of ``count`` rows in ``vectors`` vectors of columns."""
            starts = [c.row(b, size, c.b.add(d, i64(v * c.lanes))) for v in range(vectors)]
            numbers = [c.b.add(i, i64(r)) for r in range(count)]

            def of_rows(j: Any) -> list[Any]:
                places = (c.at(c.row(a, a_i, r), c.bytes_of(j)) for r in numbers)
                return [c.splat(c.load(place, c.scalar)) for place in places]

            def seen(j: Any) -> list[Any]:
                """Return a condition for each sum: True if its pair is visible."""
                row, lanes = c.b.sdiv(a_i, i64(c.lanes * c.size)), i64(c.lanes)
                places = [c.b.add(c.b.mul(r, row), c.b.sdiv(j, lanes)) for r in numbers]
                bits = [x.get(n, c.b.srem(j, lanes)) for x in pairs for n in places]
                return [c.splat(bit) for bit in bits for _ in starts]

            def term(j: Any, sums: list[Any]) -> list[Any]:
                places = [c.row(start, b_j, j) for start in starts]
                for place in places:
                    c.prefetch(c.at(place, ahead))
                y = [c.load_as(kernel.dtype, place, c.lanes, lanes) for place in places]
                factors = [(p, v) for p in of_rows(j) for v in y]
                new = [c.fma(p, v, total) for (p, v), total in zip(factors, sums, strict=True)]
                return list(map(c.b.select, seen(j), new, sums)) if pairs else new

            sums = iter(c.loop(i64(0), n, term, [c.const(0.0)] * (count * vectors)))
            for r in numbers:
                for v in range(vectors):
                    place = c.at(c.row(to, c_i, r), c.bytes_of(c.b.add(d, i64(v * c.lanes))))
                    c.store(next(sums), place)

        each_rows(c, rows, 1 if visible else _ROWS, partial(strips, strip))

    name, more = "sums_of_rows", []
    if visible is not None:
        name, more = "masked_sums_of_rows", [visible.start]
    function = kernel.function(name, [*_OPERANDS, *(x.type for x in more)], body)
    c.b.call(function, [*a, *b, *to, rows, n, columns, *more])


def each_rows(c: Code, rows: Any, most: int, body: Callable[[Any, int], None]) -> None:
    """Run ``body(first, count)`` until all rows are covered, with large counts first."""
    start, count = i64(0), min(most, c.lanes)
    while count:

        def some(i: Any, _: Any, count: int = count) -> None:
            body(i, count)

        end = c.rounded_down(rows, count)
        c.loop(start, end, some, step=count)
        start, count = end, count // 2


def each_strip(
    c: Code,
    columns: Any,
    parts: tuple[Any, Any],
    strip: Callable[..., None],
    first: Any,
    count: int,
) -> None:
    """Run ``strip(first, count, vectors, lanes, d)`` until all columns are covered.

    ``parts`` is what `cut` returned. Wide strips come first. The last one has one vector, of which
    some ``lanes`` are columns.
    """
    whole, rest = parts
    start, vectors = i64(0), _VECTORS
    while vectors:
        if vectors * count <= c.target.rows * c.target.vectors:
            end, step = c.rounded_down(columns, vectors * c.lanes), vectors * c.lanes
            c.loop(start, end, partial(strip, first, count, vectors, None), (), step)
            start = end
        vectors //= 2
    c.loop(whole, columns, partial(strip, first, count, 1, rest), (), c.lanes)


def cut(c: Code, columns: Any) -> tuple[Any, Any]:
    """Return the columns in whole vectors, and the mask of the lanes of the last, partial one."""
    whole = c.rounded_down(columns, c.lanes)
    lane = ir.Constant(c.integers, list(range(c.lanes)))
    rest = c.splat(c.narrow(c.b.sub(columns, whole)))
    return whole, c.b.icmp_signed("<", lane, rest)


def _sums(c: Code, vectors: list[Any]) -> Any:
    """Return one vector with the lane sum of each given vector, added pairwise in a tree."""
    even, odd = (list(range(n, 2 * c.lanes, 2)) for n in (0, 1))
    while len(vectors) > 1:
        pairs = zip(vectors[0::2], vectors[1::2], strict=True)
        vectors = [c.b.fadd(c.shuffle(x, y, even), c.shuffle(x, y, odd)) for x, y in pairs]
    return vectors[0]
