"""Dropout: the bits of the probabilities that it keeps."""

from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import I16, I32, I64, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Params
from tileattn.kernels.llvm.instructions.philox import folded, round_keys, words_of
from tileattn.kernels.llvm.tiles.bits import Bits, ones, shifted


def keep_pairs(
    c: Code, p: Params, keep: Bits, batch: Any, head: Any, across: tuple[Any, Any], lane: Any,
    down: tuple[Any, Any], queries_across: bool,
) -> None:  # fmt: skip
    """Set the bits of the pairs that dropout keeps; queries or keys lie in lanes.

    ``across`` is the range in lanes, starting at ``lane``; ``down`` is the range in rows, starting
    at row `rows_before`. Bits of up to 15 rows before and after may be set, too.
    """
    b = c.b
    batch0, head0, i, j = origin_of(c, p, batch)
    batch, head = b.add(batch, batch0), b.add(head, head0)
    across = _moved(c, across, i if queries_across else j)
    start, end = _moved(c, down, j if queries_across else i)
    first = b.and_(start, i64(-16))
    allowed = b.shl(ones(c, b.sub(across[1], across[0])), lane)

    def rows(y0: Any, _: Any) -> None:
        def two(n: Any, _: Any) -> None:
            y = b.add(b.lshr(y0, i64(1)), n)

            def square(x0: Any, _: Any) -> None:
                place = b.add(lane, b.sub(x0, across[0]))
                row = b.add(b.sub(y0, first), n)
                for m, bits in enumerate(_kept(c, p, batch, head, x0, y, queries_across)):
                    keep.add(b.add(row, i64(8 * m)), place, bits, allowed)

            c.loop(b.and_(across[0], i64(-16)), across[1], square, step=16)

        c.loop(i64(0), i64(8), two)

    c.loop(first, end, rows, step=16)


def rows_before(c: Code, p: Params, batch: Any, start: Any, *, queries_across: bool) -> Any:
    """Count the rows of bits before the row of the first key, or query."""
    _, _, i, j = origin_of(c, p, batch)
    return c.b.and_(c.b.add(start, j if queries_across else i), i64(15))


def kept_keys(c: Code, p: Params, batch: Any, head: Any, i: Any, k0: Any, count: Any) -> Any:
    """Return the bits of up to 64 keys, starting at k0, that dropout keeps for query i."""
    b = c.b
    start = origin_of(c, p, batch)
    batch, head, i, k0 = (b.add(*x) for x in zip((batch, head, i, k0), start, strict=True))
    upper = b.icmp_signed("!=", b.and_(i, i64(8)), i64(0))
    y = b.or_(b.shl(b.lshr(i, i64(4)), i64(3)), b.and_(i, i64(7)))

    def square(x0: Any, bits: list[Any]) -> list[Any]:
        kept = b.select(upper, *reversed(_kept(c, p, batch, head, x0, y, False)))
        return [b.or_(bits[0], shifted(c, b.zext(kept, I64), b.sub(x0, k0)))]

    return c.loop(b.and_(k0, i64(-16)), b.add(k0, count), square, [i64(0)], step=16)[0]


def origin_of(c: Code, p: Params, batch: Any) -> list[Any]:
    """Return the indices (b, h, i, j) at which the dropout of a sequence starts."""

    def load() -> list[Any]:
        row = c.row(p.origin, i64(32), batch)
        return [c.load(c.at(row, 8 * n), I64) for n in range(4)]

    return c.values_when(p.given("origin"), load, *[i64(0)] * 4)


def keep_only(c: Code, p: list[Any], bits: list[Any]) -> list[Any]:
    """Multiply the probabilities that dropout drops by 0, so that a NaN stays."""
    zero, one = c.const(0.0), c.const(1.0)
    return [c.b.fmul(x, c.b.select(z, one, zero)) for x, z in zip(p, bits, strict=True)]


def _moved(c: Code, span: tuple[Any, Any], by: Any) -> tuple[Any, Any]:
    return c.b.add(span[0], by), c.b.add(span[1], by)


def _kept(
    c: Code, p: Params, batch: Any, head: Any, x0: Any, y: Any, queries_across: bool
) -> tuple[Any, Any]:
    """Return the bits of 16 pairs across, starting at x0, in the two rows that y is folded from."""
    b = c.b
    lines = folded(c, x0), c.splat(y, 8)
    i, j = lines if queries_across else reversed(lines)
    seed, least = (p.seed_low, p.seed_high), p.threshold
    keys = c.once("round keys", lambda: round_keys(c, seed))
    threshold = c.once("thresholds", lambda: c.splat(b.trunc(least, I32), 16))
    w = words_of(c, i, head, batch, j, keys)

    def bits(halves: list[Any]) -> Any:
        low, high = (b.trunc(x, ir.VectorType(I32, 8)) for x in halves)
        words = c.shuffle(low, high, list(range(16)))
        return b.bitcast(b.icmp_unsigned(">=", words, threshold), I16)

    lower, upper = (w[0::2], w[1::2]) if queries_across else (w[:2], w[2:])
    return bits(lower), bits(upper)
