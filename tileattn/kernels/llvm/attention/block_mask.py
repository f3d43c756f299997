"""Block masks in kernels, as ``call/block_mask.py``."""

from typing import Any

from tileattn.kernels.llvm.instructions.code import I1, I32, I64, Code, i64, same
from tileattn.kernels.llvm.instructions.kernel import Params
from tileattn.kernels.llvm.params import EMPTY, FULL
from tileattn.kernels.llvm.tiles.bits import ones, packed


def tile_kind(
    c: Code, p: Params, batch: Any, head: Any, i0: Any, i1: Any, k0: Any, k1: Any
) -> tuple[Any, Any]:
    """Return whether some block of a tile is not empty, and whether all are full."""
    b = c.b

    def row(a: Any, state: list[Any]) -> list[Any]:
        def block(n: Any, state: list[Any]) -> list[Any]:
            kind = c.load(p.row("block_kinds", batch, head, a, n), I32)
            some = b.icmp_signed("!=", kind, same(I32, EMPTY))
            full = b.icmp_signed("==", kind, same(I32, FULL))
            return [b.or_(state[0], some), b.and_(state[1], full)]

        return c.loop(b.sdiv(k0, p.block_k), _after(c, k1, p.block_k), block, state)

    no, yes = (same(I1, n) for n in (0, 1))
    some, full = c.loop(b.sdiv(i0, p.block_q), _after(c, i1, p.block_q), row, [no, yes])
    return some, full


def block_bits(c: Code, p: Params, batch: Any, head: Any, i: Any, k0: Any, count: Any) -> Any:
    """Bits of the keys from k0 on, up to 64, that a block mask lets query i attend to."""
    b, end = c.b, c.b.add(k0, count)

    def block(n: Any, bits: list[Any]) -> list[Any]:
        kind = c.load(p.row("block_kinds", batch, head, b.sdiv(i, p.block_q), n), I32)
        first = b.mul(n, p.block_k)
        start, keys = c.larger(k0, first), c.smaller(end, b.add(first, p.block_k))
        keys = b.sub(keys, start)
        full = b.icmp_signed("<=", kind, same(I32, FULL))
        found = c.variable(I64, b.select(full, ones(c, keys), i64(0)))

        def partial() -> None:
            number = b.sext(kind, I64)
            at = p.row("block_bits", number, b.srem(i, p.block_q), b.sub(start, first))
            b.store(packed(c, at, i64(1), keys), found)

        c.when(b.icmp_signed(">=", kind, same(I32, 0)), partial)
        return [b.or_(bits[0], b.shl(b.load(found, typ=I64), b.sub(start, k0)))]

    return c.loop(b.sdiv(k0, p.block_k), _after(c, end, p.block_k), block, [i64(0)])[0]


def _after(c: Code, end: Any, block: Any) -> Any:
    """Return the number of the block after the block of ``end - 1``."""
    return c.b.add(c.b.sdiv(c.b.sub(end, i64(1)), block), i64(1))
