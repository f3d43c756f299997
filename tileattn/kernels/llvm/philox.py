"""Instruction layer: Philox-4x32-10, for a vector of counters; twin of ``algorithm/philox.py``."""

from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions import I64, Code, i64

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(c: Code, counter: list[Any], key: tuple[Any, Any]) -> list[Any]:
    """Encrypt counters: four vectors of 64-bit lanes, each with a 32-bit word."""
    b, kind = c.b, ir.VectorType(I64, c.lanes)
    word = ir.Constant(kind, [_WORD] * c.lanes)
    half = ir.Constant(kind, [32] * c.lanes)
    factors = [ir.Constant(kind, [m] * c.lanes) for m in _MULTIPLIERS]
    c0, c1, c2, c3 = counter
    for n in range(_ROUNDS):
        k0, k1 = (
            c.splat(b.and_(b.add(k, i64(n * weyl)), i64(_WORD)))
            for k, weyl in zip(key, _WEYL, strict=True)
        )
        first, second = b.mul(factors[0], c0), b.mul(factors[1], c2)
        c0, c2 = (
            b.xor(b.xor(b.lshr(second, half), c1), k0),
            b.xor(b.xor(b.lshr(first, half), c3), k1),
        )
        c1, c3 = b.and_(second, word), b.and_(first, word)
    return [c0, c1, c2, c3]


def words_of(c: Code, i: Any, head: Any, batch: Any, j: Any, key: tuple[Any, Any]) -> list[Any]:
    """Random words of the elements ``{i, i + 8} x {j, j + 8}``: vectors of 64-bit lanes."""
    b, kind = c.b, ir.VectorType(I64, c.lanes)

    def folded(x: Any) -> Any:
        """``x // 16 * 8 + x % 8``."""
        three, four, seven = (ir.Constant(kind, [n] * c.lanes) for n in (3, 4, 7))
        return b.or_(b.shl(b.lshr(x, four), three), b.and_(x, seven))

    return philox4x32(c, [folded(j), folded(i), head, batch], key)


def in_upper_half(c: Code, x: Any) -> Any:
    """Whether ``x // 8`` is odd, for a vector of 64-bit lanes."""
    eight = ir.Constant(x.type, [8] * c.lanes)
    return c.b.icmp_unsigned("!=", c.b.and_(x, eight), ir.Constant(x.type, [0] * c.lanes))
