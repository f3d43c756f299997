"""Tiles in scratch memory; copies between tiles and arrays that transpose or convert."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import I16, POINTER, Code, i64, same

Row = Callable[[Any], Any]
"""Returns the address of a row."""

_RUN = 64  # bytes that one load and store copies: a cache line


class Tile:
    """Rows of ``vectors`` vectors in scratch memory; row 0 is at ``start``."""

    def __init__(self, c: Code, start: Any, vectors: int) -> None:
        self.c, self.start, self.vectors = c, start, range(vectors)
        self.step = vectors * c.lanes * c.size  # bytes between rows

    def at(self, row: Any, v: int = 0) -> Any:
        """Return the address of a vector."""
        offset = i64(row * self.step) if isinstance(row, int) else self.c.b.mul(row, i64(self.step))
        return self.c.at(self.start, offset, v * self.c.lanes * self.c.size)

    def row(self, row: Any, kind: Any = None) -> list[Any]:
        """Load the vectors of a row."""
        return [self.c.load(self.at(row, v), kind) for v in self.vectors]

    def put(self, row: Any, vectors: list[Any]) -> None:
        """Store the vectors of a row."""
        for v, x in zip(self.vectors, vectors, strict=True):
            self.c.store(x, self.at(row, v))

    def set_rows(self, rows: Any, row: Callable[[Any], list[Any]]) -> None:
        """Store ``row(n)`` in each row n."""
        self.c.each(rows, lambda n: self.put(n, row(n)))

    def fill(self, rows: Any, x: Any) -> None:
        """Fill rows with a vector."""
        self.set_rows(rows, lambda _: [x for _ in self.vectors])

    def apply(self, rows: Any, function: Callable[..., Any], *others: "Tile") -> None:
        """Replace the vectors of rows by a function of them, and of the same ones of others."""
        tiles = self, *others
        self.set_rows(rows, lambda n: list(map(function, *(x.row(n) for x in tiles))))

    def multiply(self, rows: Any, factor: Any) -> None:
        """Multiply rows by a number."""
        c, x = self.c, self.c.splat(factor)
        different = c.b.fcmp_unordered("!=", factor, ir.Constant(c.scalar, 1.0))
        c.when(different, lambda: self.apply(rows, lambda y: c.b.fmul(y, x)))


def transpose(c: Code, rows: list[Any]) -> list[Any]:
    """Transpose a square of lanes: exchange its off-diagonal blocks of 1, 2, 4, ... lanes."""
    rows, n, size = list(rows), c.lanes, 1
    while size < n:
        upper = [n + j - size if j & size else j for j in range(n)]
        lower = [n + j if j & size else j + size for j in range(n)]
        for i in (i for i in range(n) if not i & size):
            pair = rows[i], rows[i + size]
            rows[i], rows[i + size] = (c.shuffle(*pair, lanes) for lanes in (upper, lower))
        size *= 2
    return rows


def transpose_rows(
    c: Code, dtype: str, row: Row, rows: Any, columns: Any, tile: Tile, scale: Any = None
) -> None:
    """Load rows of an array, at the addresses ``row(r)``, into the columns of a tile.

    The last row repeats in the lanes that fill the last vector.
    """

    def square(starts: list[Any], r: Any, d: Any, count: int) -> None:
        place = c.b.mul(d, i64(size_of(dtype)))
        given = [c.load_as(dtype, c.at(x, place), count) for x in starts]
        for n, x in enumerate(transpose(c, given) if count > 1 else [c.join(given)]):
            x = x if scale is None else c.b.fmul(x, c.splat(scale))  # noqa: PLW2901 - scaled
            c.store(x, c.at(tile.at(d), n * tile.step, c.bytes_of(r)))

    _each_square(c, row, rows, columns, square)


def store_columns(
    c: Code, dtype: str, row: Row, rows: Any, columns: Any, tile: Tile, weights: Any = None
) -> None:
    """Store the columns of a tile, times the weight of each, as rows of an array."""

    def square(starts: list[Any], r: Any, d: Any, count: int) -> None:
        given = [c.load(c.at(tile.at(d), n * tile.step, c.bytes_of(r))) for n in range(count)]
        if weights is not None:
            weight = c.load(c.at(weights, c.bytes_of(r)))
            given = [c.b.fmul(x, weight) for x in given]
        parts = transpose(c, given) if count > 1 else c.split(given[0])
        place = c.b.mul(d, i64(size_of(dtype)))
        for start, x in reversed(list(zip(starts, parts, strict=True))):  # the last row at last
            c.store_as(dtype, x, c.at(start, place))

    _each_square(c, row, rows, columns, square)


def _each_square(
    c: Code, row: Row, rows: Any, columns: Any, square: Callable[[list[Any], Any, Any, int], None]
) -> None:
    """Run ``square(row addresses, first row, first column, columns)`` for all squares of lanes.

    Past the end, the last row repeats. The last two squares of a row may overlap. Fewer columns
    than lanes are taken one by one.
    """
    last, left = c.b.sub(rows, i64(1)), c.b.sub(columns, i64(c.lanes))
    addresses = c.addresses(c.lanes)

    def some(r: Any, _: Any) -> None:
        def put(n: Any) -> None:
            c.store(row(c.smaller(c.b.add(r, n), last)), c.at(addresses, c.b.mul(n, i64(8))))

        def whole(d: Any, _: Any) -> None:
            square(starts, r, c.smaller(d, left), c.lanes)

        c.each(i64(c.lanes), put)
        starts = [c.load(c.at(addresses, 8 * n), POINTER) for n in range(c.lanes)]
        c.when_else(
            c.b.icmp_signed(">=", left, i64(0)),
            lambda: c.loop(i64(0), columns, whole, step=c.lanes),
            lambda: c.each(columns, lambda d: square(starts, r, d, 1)),
        )

    c.loop(i64(0), rows, some, step=c.lanes)


def convert_rows(
    c: Code, dtype: str, source: Any, step: Any, rows: Any, columns: Any, to: Any, to_step: Any,
    scale: Any = None,
) -> None:  # fmt: skip
    """Convert rows of an array to the accumulation dtype, times a scale."""

    def row(r: Any) -> None:
        start, place = c.row(source, step, r), c.row(to, to_step, r)

        def some(d: Any, lanes: int) -> None:
            x = c.load_as(dtype, c.at(start, c.b.mul(d, i64(size_of(dtype)))), lanes)
            if scale is not None:
                x = c.b.fmul(x, c.splat(scale) if lanes > 1 else scale)
            c.store(x, c.at(place, c.bytes_of(d)))

        c.each_vector(columns, some)

    c.each(rows, row)


def store_row(c: Code, dtype: str, source: Any, to: Any, columns: Any, scale: Any) -> None:
    """Store a row of sums as a row of an array, times a scale."""

    def some(d: Any, lanes: int) -> None:
        x = c.load(c.at(source, c.bytes_of(d)), c.vector if lanes > 1 else c.scalar)
        x = c.b.fmul(x, c.splat(scale) if lanes > 1 else scale)
        c.store_as(dtype, x, c.at(to, c.b.mul(d, i64(size_of(dtype)))))

    c.each_vector(columns, some)


def copy_bytes(c: Code, source: Any, to: Any, count: Any) -> None:
    """Copy ``count`` bytes, a multiple of 2."""
    whole = c.rounded_down(count, _RUN)
    for first, end, kind, step in (
        (i64(0), whole, ir.VectorType(I16, _RUN // 2), _RUN),
        (whole, count, I16, 2),
    ):

        def one(n: Any, _: Any, kind: Any = kind) -> None:
            c.store(c.load(c.at(source, n), kind), c.at(to, n))

        c.loop(first, end, one, step=step)


def all_finite(c: Code, source: Any, step: Any, rows: Any, columns: Any) -> Any:
    """Return True if no element of these rows is NaN or infinite."""
    whole = c.rounded_down(columns, c.lanes)

    def row(r: Any, state: list[Any]) -> list[Any]:
        start = c.at(source, c.b.mul(r, step))

        def largest(d: Any, top: list[Any]) -> list[Any]:
            bits = c.load(c.at(start, c.bytes_of(d)), top[0].type)
            bits = c.b.add(bits, bits)  # without the sign
            return [c.b.select(c.b.icmp_unsigned(">", bits, top[0]), bits, top[0])]

        many = c.loop(i64(0), whole, largest, state[:1], step=c.lanes)
        few = c.loop(whole, columns, largest, state[1:])
        return [*many, *few]

    tops = c.loop(i64(0), rows, row, [same(kind, 0) for kind in (c.integers, c.integer)])
    infinity = int(np.array(np.inf, c.dtype).view(f"u{c.size}")) * 2
    many, few = (c.b.icmp_unsigned("<", x, same(x.type, infinity)) for x in tops)
    lanes = c.b.bitcast(many, ir.IntType(c.lanes))
    return c.b.and_(few, c.b.icmp_signed("==", lanes, same(lanes.type, -1)))


def size_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return {"float64": 8, "float32": 4, "int8": 1, "float8_e4m3fn": 1}.get(dtype, 2)
