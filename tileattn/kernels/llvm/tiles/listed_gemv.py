"""Matmuls of a few rows with quantised rows that are read once, in place (K or V when decoding).

As `gemv`, for elements of 8 bits. A list holds the address of each row, so rows in pages need no
copies. A row has half the bytes of a row of 16 bits, so instructions limit the speed: rows of B
share loads of A, and each cache line is prefetched once. K is prefetched LISTED_AHEAD rows ahead,
and V while the products with K are computed.
"""

from functools import partial
from typing import Any

from tileattn.kernels.llvm.instructions.code import I64, POINTER, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel
from tileattn.kernels.llvm.sizes import DECODE_KEYS, LISTED_AHEAD
from tileattn.kernels.llvm.tiles.bits import Bits
from tileattn.kernels.llvm.tiles.gemv import cut, each_rows, each_strip

_LINE = 64  # bytes of a cache line
_ROWS = 4  # rows of A that share a load of B
_ADDRESS = i64(8)  # bytes of an address


def dots_of_listed_rows(
    kernel: Kernel, c: Code, rows: Any, n: Any, columns: Any, a: Any, b: Any, to: Any, later: Any
) -> None:
    """Emit ``C[i, j] = sum over d of A[i, d] * B[j, d]``.

    Rows of A are padded with 0 to whole vectors, and rows of C with anything, to DECODE_KEYS
    elements. ``a = (A, a_i)``, with a stride in bytes; ``b`` lists rows; ``to`` begins with C.
    ``later``, a list and the bytes of a row, are rows that are prefetched, as many as in B.
    """

    def body(
        c: Code, a: Any, a_i: Any, b: Any, to: Any, later: Any, width: Any, rows: Any, n: Any,
        columns: Any,
    ) -> None:  # fmt: skip
        whole, rest = cut(c, columns)
        pairs, last = c.rounded_down(columns, 2 * c.lanes), c.b.sub(n, i64(1))
        parts = (i64(0), pairs, 2, None), (pairs, whole, 1, None), (whole, columns, 1, rest)

        def term(
            left: list[Any], right: list[Any], vectors: int, lanes: Any, d: Any, sums: Any
        ) -> list[Any]:
            y = [_elements(kernel, c, c.at(row, d), vectors, lanes) for row in right]
            for v in range(vectors):
                x = [c.load(c.at(row, c.bytes_of(d), v * c.lanes * c.size)) for row in left]
                products = ((p, of_row[v]) for p in x for of_row in y)
                sums = [c.fma(*factors, z) for factors, z in zip(products, sums, strict=True)]
            return list(sums)

        def square(i: Any, count: int, end: bool, j: Any, _: Any) -> None:
            """Emit one vector of sums; past the end of B, its last row repeats."""
            left = [c.row(a, a_i, c.b.add(i, i64(r))) for r in range(count)]
            keys = c.lanes // count
            numbers = [c.b.add(j, i64(t)) for t in range(keys)]
            right = [_listed(c, b, c.smaller(t, last) if end else t) for t in numbers]
            sums = [c.const(0.0)] * c.lanes
            for first, stop, vectors, lanes in parts:
                body = partial(term, left, right, vectors, lanes)
                sums = c.loop(first, stop, body, sums, vectors * c.lanes)
            found = _sums(c, sums)
            for r in range(count):
                some = c.shuffle(found, found, [r * keys + t for t in range(keys)])
                c.store(some, c.at(_row(c, to, c.b.add(i, i64(r))), c.bytes_of(j)))

        def vector(end: bool, j: Any, _: Any) -> None:
            after = c.smaller(n, c.b.add(j, i64(c.lanes)))

            def prefetch(t: Any, _: Any) -> None:
                ahead = c.b.add(t, i64(LISTED_AHEAD))
                for row, size in ((_listed(c, b, ahead), columns), (_listed(c, later, t), width)):
                    c.loop(i64(0), size, partial(line, row), step=_LINE)

            def line(row: Any, d: Any, _: Any) -> None:
                c.prefetch(c.at(row, d))

            def some(i: Any, count: int) -> None:
                c.loop(j, after, partial(square, i, count, end), (), c.lanes // count)

            c.loop(j, after, prefetch)
            each_rows(c, rows, _ROWS, some)

        full = c.rounded_down(n, c.lanes)
        c.loop(i64(0), full, partial(vector, False), step=c.lanes)
        c.loop(full, n, partial(vector, True), step=c.lanes)

    kinds = [POINTER, I64, *[POINTER] * 3, *[I64] * 4]
    function = kernel.function("dots_of_listed_rows", kinds, body)
    c.b.call(function, [*a, b, to[0], *later, rows, n, columns])


def sums_of_listed_rows(
    kernel: Kernel, c: Code, rows: Any, n: Any, columns: Any, a: Any, b: Any, to: Any,
    visible: Bits | None = None,
) -> None:  # fmt: skip
    """Emit ``C[i, d] = sum over j of A[i, j] * B[j, d]``.

    Rows of A have DECODE_KEYS elements. ``a`` begins with A; ``b`` lists rows; ``to = (C, c_i)``,
    with a stride in bytes. ``visible`` has a bit for each element of A; an element of B with bit 0
    may be NaN or infinite.
    """

    def body(
        c: Code, a: Any, b: Any, to: Any, c_i: Any, rows: Any, n: Any, columns: Any, *visible: Any
    ) -> None:
        strips = partial(each_strip, c, columns, cut(c, columns))
        pairs = [Bits(c, words, 1) for words in visible]

        def strip(i: Any, count: int, vectors: int, lanes: Any, d: Any, _: Any) -> None:
            """Emit the sums of ``count`` rows in ``vectors`` vectors of columns."""
            left = [_row(c, a, c.b.add(i, i64(r))) for r in range(count)]

            def seen(j: Any) -> list[Any]:
                """Return a condition for each sum: True if its pair is visible."""
                first = c.b.add(c.b.mul(i, i64(DECODE_KEYS // c.lanes)), c.b.sdiv(j, i64(c.lanes)))
                words = [c.b.add(first, i64(r * DECODE_KEYS // c.lanes)) for r in range(count)]
                bits = [x.get(word, c.b.srem(j, i64(c.lanes))) for x in pairs for word in words]
                return [c.splat(bit) for bit in bits for _ in range(vectors)]

            def term(j: Any, sums: list[Any]) -> list[Any]:
                y = _elements(kernel, c, c.at(_listed(c, b, j), d), vectors, lanes)
                x = [c.splat(c.load(c.at(row, c.bytes_of(j)), c.scalar)) for row in left]
                products = ((p, v) for p in x for v in y)
                new = [c.fma(*factors, z) for factors, z in zip(products, sums, strict=True)]
                return list(map(c.b.select, seen(j), new, sums)) if pairs else new

            sums = iter(c.loop(i64(0), n, term, [c.const(0.0)] * (count * vectors)))
            for r in range(count):
                start = c.at(c.row(to, c_i, c.b.add(i, i64(r))), c.bytes_of(d))
                for v in range(vectors):
                    c.store(next(sums), c.at(start, v * c.lanes * c.size))

        each_rows(c, rows, 1 if visible else _ROWS, partial(strips, strip))

    name, more = "sums_of_listed_rows", []
    if visible is not None:
        name, more = "masked_sums_of_listed_rows", [visible.start]
    kinds = [*[POINTER] * 3, *[I64] * 4, *(x.type for x in more)]
    function = kernel.function(name, kinds, body)
    c.b.call(function, [a[0], b, *to, rows, n, columns, *more])


def _elements(kernel: Kernel, c: Code, at: Any, vectors: int, lanes: Any) -> list[Any]:
    """Load vectors of elements: if they pass through 16 bits, in pairs, which fill a vector."""
    together = 2 if vectors > 1 and kernel.kv_dtype == "float8_e4m3fn" else 1
    found = []
    for v in range(0, vectors, together):
        x = c.load_as(kernel.kv_dtype, c.at(at, v * c.lanes), together * c.lanes, lanes)
        starts = range(0, together * c.lanes, c.lanes)
        parts = [c.shuffle(x, x, [*range(n, n + c.lanes)]) for n in starts]
        found += parts if together > 1 else [x]
    return found


def _listed(c: Code, rows: Any, j: Any) -> Any:
    """Return the address of row j of a list."""
    return c.load(c.row(rows, _ADDRESS, j), POINTER)


def _row(c: Code, start: Any, i: Any) -> Any:
    """Return the address of row i of a tile with DECODE_KEYS columns."""
    return c.row(start, i64(DECODE_KEYS * c.size), i)


def _sums(c: Code, vectors: list[Any]) -> Any:
    """Return one vector with the lane sum of each given vector, added pairwise in a tree.

    The shuffles of the first two levels stay within 128 bits, which takes one instruction each.
    """
    n, size = c.lanes, 1
    while len(vectors) > 1:
        half = max(size, 2)
        lanes = []
        for first in range(0, n, 2 * half):
            x, y = (list(range(s, s + half)) for s in (first, n + first))
            lanes += x + y if size > 1 else [x[0], y[0], x[1], y[1]]
        pairs = zip(vectors[0::2], vectors[1::2], strict=True)
        vectors = [
            c.b.fadd(c.shuffle(x, y, lanes), c.shuffle(x, y, [i + half for i in lanes]))
            for x, y in pairs
        ]
        size *= 2
    return vectors[0]
