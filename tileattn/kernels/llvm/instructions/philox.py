"""Emit Philox-4x32-10 for a vector of counters, as ``algorithm/philox.py``."""

from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import I64, Code, i64, same

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_LANES = 8  # counters, of 64 bits each


def round_keys(c: Code, key: tuple[Any, Any]) -> list[list[Any]]:
    """Return both words of the key of each round, as vectors."""
    b = c.b
    return [
        [
            c.splat(b.and_(b.add(k, i64(n * weyl)), i64(_WORD)), _LANES)
            for k, weyl in zip(key, _WEYL, strict=True)
        ]
        for n in range(_ROUNDS)
    ]


def philox4x32(c: Code, counter: list[Any], keys: list[list[Any]]) -> list[Any]:
    """Encrypt counters: four vectors of 64-bit lanes, each with a word in its lower half."""
    b, kind = c.b, ir.VectorType(I64, _LANES)
    word, half, *factors = (same(kind, n) for n in (_WORD, 32, *_MULTIPLIERS))
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        # Where only lower halves are multiplied, upper ones need not be clear elsewhere.
        first, second = (b.mul(m, b.and_(x, word)) for m, x in zip(factors, (c0, c2), strict=True))
        c0, c1, c2, c3 = (
            b.xor(b.xor(b.lshr(second, half), c1), k0),
            second,
            b.xor(b.xor(b.lshr(first, half), c3), k1),
            first,
        )
    return [c0, c1, c2, c3]


def words_of(c: Code, i: Any, head: Any, batch: Any, j: Any, keys: list[list[Any]]) -> list[Any]:
    """Random words of the elements ``{i, i + 8} x {j, j + 8}``, given i and j folded."""
    return philox4x32(c, [j, i, *(c.splat(x, _LANES) for x in (head, batch))], keys)


def folded(c: Code, start: Any) -> Any:
    """``x // 16 * 8 + x % 8`` of the eight numbers from a multiple of 16 on."""
    first = c.splat(c.b.lshr(start, i64(1)), _LANES)
    return c.b.add(first, ir.Constant(first.type, list(range(_LANES))))
