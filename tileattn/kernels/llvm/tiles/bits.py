"""Bit masks of a tile: one bit for each pair of a query and a key."""

from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import I1, I8, I16, I64, Code, i64, same
from tileattn.kernels.llvm.tiles.tile import Tile

_RUN = 16  # booleans that one load reads


class Bits:
    """A 64-bit word for each row of a tile, with a bit for each lane of its vectors."""

    def __init__(self, c: Code, start: Any, vectors: int) -> None:
        self.c, self.start, self.vectors = c, start, range(vectors)

    def at(self, row: Any) -> Any:
        """Return the address of the word of a row."""
        return self.c.row(self.start, i64(8), row)

    def row(self, row: Any) -> list[Any]:
        """Load the bits of a row: a condition for each lane of its vectors."""
        return [self.vector(row, i64(v)) for v in self.vectors]

    def vector(self, row: Any, v: Any) -> Any:
        """Load the bits of one vector."""
        c, b = self.c, self.c.b
        bits = b.lshr(c.load(self.at(row), I64), b.mul(v, i64(c.lanes)))
        return b.bitcast(b.trunc(bits, ir.IntType(c.lanes)), c.mask)

    def put(self, row: Any, conditions: list[Any]) -> None:
        """Store the bits of a row."""
        c, b, word = self.c, self.c.b, i64(0)
        for v, x in zip(self.vectors, conditions, strict=True):
            bits = b.zext(b.bitcast(x, ir.IntType(c.lanes)), I64)
            word = b.or_(word, b.shl(bits, i64(v * c.lanes)))
        c.store(word, self.at(row))

    def get(self, row: Any, lane: Any) -> Any:
        """Load one bit."""
        return self.c.b.trunc(self.c.b.lshr(self.c.load(self.at(row), I64), lane), I1)

    def clear(self, rows: int) -> None:
        """Clear the bits of rows, a multiple of eight."""
        c, zeros = self.c, ir.Constant(ir.VectorType(I64, 8), None)
        c.loop(i64(0), i64(rows), lambda n, _: c.store(zeros, self.at(n)), step=8)

    def add(self, row: Any, lane: Any, bits: Any, allowed: Any) -> None:
        """Set the bits of 16 lanes that are 1 and allowed; the first lane may be negative."""
        b, place = self.c.b, self.at(row)
        moved = b.and_(shifted(self.c, b.zext(bits, I64), lane), allowed)
        self.c.store(b.or_(self.c.load(place, I64), moved), place)


def ones(c: Code, count: Any) -> Any:
    """Set the lowest bits: 1 to 64 of them."""
    return c.b.lshr(i64(-1), c.b.sub(i64(64), count))


def shifted(c: Code, bits: Any, n: Any) -> Any:
    """Move bits up, or down where n is negative."""
    negative = c.b.icmp_signed("<", n, i64(0))
    return c.b.select(negative, c.b.lshr(bits, c.b.neg(n)), c.b.shl(bits, n))


def packed(c: Code, source: Any, step: Any, count: Any) -> Any:
    """Pack 1 to 64 booleans, ``step`` bytes apart, into bits; a step of 0 repeats the first."""
    b = c.b
    one, none = (b.icmp_signed("==", step, i64(n)) for n in (1, 0))
    count = b.select(none, i64(1), count)
    whole = b.select(one, b.and_(count, i64(-_RUN)), i64(0))

    def run(j: Any, bits: list[Any]) -> list[Any]:
        kind = ir.VectorType(I8, _RUN)
        x = c.load(c.at(source, j), kind)
        seen = b.bitcast(b.icmp_unsigned("!=", x, same(kind, 0)), I16)
        return [b.or_(bits[0], b.shl(b.zext(seen, I64), j))]

    def single(j: Any, bits: list[Any]) -> list[Any]:
        seen = b.icmp_unsigned("!=", c.load(c.row(source, step, j), I8), same(I8, 0))
        return [b.or_(bits[0], b.shl(b.zext(seen, I64), j))]

    bits = c.loop(i64(0), whole, run, [i64(0)], step=_RUN)
    bits = c.loop(whole, count, single, bits)
    return b.select(none, b.neg(bits[0]), bits[0])


def put_column(c: Code, words: Tile, lane: Any, bits: Any) -> None:
    """Store the bits of one lane for 64 rows, in words as wide as a sum."""
    for n in range(8 // c.size):
        word = c.narrow(c.b.lshr(bits, i64(n * 8 * c.size)))
        c.store(word, c.at(words.at(n), c.bytes_of(lane)))


def transpose_bits(c: Code, words: Tile, rows: Any, to: Bits, first: Any) -> None:
    """Transpose words of lanes, for up to 64 rows, to words of rows; the first is ``first``."""
    b, width = c.b, 8 * c.size
    for n in range(8 // c.size):

        def row(r: Any, _: Any, n: int = n) -> None:
            bit = c.splat(b.shl(same(c.integer, 1), c.narrow(b.sub(r, i64(n * width)))))
            given = words.row(n, c.integers)
            seen = [b.icmp_signed("!=", b.and_(word, bit), c.ints(0)) for word in given]
            to.put(b.add(first, r), seen)

        c.loop(i64(n * width), c.smaller(rows, i64((n + 1) * width)), row)
