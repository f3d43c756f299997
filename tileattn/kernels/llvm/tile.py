"""Layout layer: tiles in scratch memory, and loads that transpose or convert rows of arrays."""

from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions import Code, i64


class Tile:
    """Rows of vectors in scratch memory.

    Parameters
    ----------
    c : Code
        Where instructions go.
    start : pointer
        Row 0.
    vectors : int
        Vectors of a row.
    """

    def __init__(self, c: Code, start: Any, vectors: int) -> None:
        self.c, self.start, self.vectors = c, start, range(vectors)
        self.step = vectors * c.lanes * c.size  # bytes between rows

    def at(self, row: Any, v: int = 0) -> Any:
        """Address of a vector."""
        offset = i64(row * self.step) if isinstance(row, int) else self.c.b.mul(row, i64(self.step))
        return self.c.at(self.start, offset, v * self.c.lanes * self.c.size)

    def row(self, row: Any, kind: Any = None) -> list[Any]:
        """Load the vectors of a row."""
        return [self.c.load(self.at(row, v), kind) for v in self.vectors]

    def put(self, row: Any, vectors: list[Any]) -> None:
        """Store the vectors of a row."""
        for v, x in zip(self.vectors, vectors, strict=True):
            self.c.store(x, self.at(row, v))

    def fill(self, rows: Any, x: Any) -> None:
        """Fill rows with a vector."""
        self.c.loop(i64(0), rows, lambda n, _: self.put(n, [x for _ in self.vectors]))

    def multiply(self, rows: Any, factor: Any) -> None:
        """Multiply rows by a number."""
        c, x = self.c, self.c.splat(factor)
        one = ir.Constant(c.scalar, 1.0)

        def row(n: Any, _: Any) -> None:
            self.put(n, [c.b.fmul(y, x) for y in self.row(n)])

        c.when(c.b.fcmp_unordered("!=", factor, one), lambda: c.loop(i64(0), rows, row))


def transpose_rows(
    c: Code,
    dtype: str,
    source: Any,
    step: Any,
    rows: Any,
    columns: Any,
    to: Tile,
    scale: Any = None,
) -> None:
    """Load rows of an array, ``step`` bytes apart, into the columns of a tile."""

    def row(r: Any, _: Any) -> None:
        start = c.at(source, c.b.mul(r, step))

        def element(d: Any, _: Any) -> None:
            x = c.load_as(dtype, c.at(start, c.b.mul(d, i64(size_of(dtype)))))
            x = x if scale is None else c.b.fmul(x, scale)
            c.store(x, c.at(to.at(d), c.bytes_of(r)))

        c.loop(i64(0), columns, element)

    c.loop(i64(0), rows, row)


def convert_rows(
    c: Code, dtype: str, source: Any, step: Any, rows: Any, columns: Any, to: Any, to_step: Any,
    scale: Any = None,
) -> None:  # fmt: skip
    """Load rows of an array as sums, times a scale."""

    def row(r: Any, _: Any) -> None:
        start, place = c.at(source, c.b.mul(r, step)), c.at(to, c.b.mul(r, to_step))
        whole = c.b.mul(c.b.sdiv(columns, i64(c.lanes)), i64(c.lanes))
        for first, last, count in ((i64(0), whole, c.lanes), (whole, columns, 1)):

            def some(d: Any, _: Any, count: int = count) -> None:
                x = c.load_as(dtype, c.at(start, c.b.mul(d, i64(size_of(dtype)))), count)
                if scale is not None:
                    x = c.b.fmul(x, c.splat(scale) if count > 1 else scale)
                c.store(x, c.at(place, c.bytes_of(d)))

            c.loop(first, last, some, step=count)

    c.loop(i64(0), rows, row)


def store_columns(
    c: Code, dtype: str, column: Any, step: int, to: Any, columns: Any, scale: Any = None
) -> None:
    """Store a column of a tile, times a scale, as a row of an array."""

    def body(d: Any, _: Any) -> None:
        x = c.load(c.at(column, c.b.mul(d, i64(step))), c.scalar)
        x = x if scale is None else c.b.fmul(x, scale)
        c.store_as(dtype, x, c.at(to, c.b.mul(d, i64(size_of(dtype)))))

    c.loop(i64(0), columns, body)


def all_finite(c: Code, source: Any, step: Any, rows: Any, columns: Any) -> Any:
    """Whether no sum of these rows is NaN or infinite."""
    whole = c.b.mul(c.b.sdiv(columns, i64(c.lanes)), i64(c.lanes))

    def row(r: Any, state: list[Any]) -> list[Any]:
        start = c.at(source, c.b.mul(r, step))

        def add(d: Any, total: list[Any]) -> list[Any]:
            zero = c.const(0.0) if total[0].type == c.vector else ir.Constant(c.scalar, 0.0)
            x = c.load(c.at(start, c.bytes_of(d)), total[0].type)
            return [c.b.fadd(total[0], c.b.fmul(x, zero))]

        many = c.loop(i64(0), whole, add, state[:1], step=c.lanes)
        few = c.loop(whole, columns, add, state[1:])
        return [*many, *few]

    start = [c.const(0.0), ir.Constant(c.scalar, 0.0)]
    many, few = c.loop(i64(0), rows, row, start)
    total = c.b.fadd(few, c.sum(many))
    return c.b.fcmp_ordered("==", total, ir.Constant(c.scalar, 0.0))


def size_of(dtype: str) -> int:
    """Bytes of an element."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)
