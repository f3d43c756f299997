"""Block masks in kernels, as ``call/block_mask.py``."""

from collections.abc import Callable, Sequence
from typing import Any

from tileattn.kernels.llvm.instructions.code import I1, I32, I64, Code, i64, same
from tileattn.kernels.llvm.instructions.kernel import Params
from tileattn.kernels.llvm.params import EMPTY, FULL
from tileattn.kernels.llvm.tiles.bits import ones, packed

NO_TILE = same(I1, 0), same(I1, 1)
"""The kind of no tile at all, with which `merged_kind` starts."""


def tile_kind(
    c: Code, p: Params, batch: Any, head: Any, i0: Any, i1: Any, k0: Any, k1: Any
) -> list[Any]:
    """Return the kind of a tile: True if a block is not empty, and True if all are full."""
    b = c.b

    def row(a: Any, state: list[Any]) -> list[Any]:
        def block(n: Any, state: list[Any]) -> list[Any]:
            kind = c.load(p.row("block_kinds", batch, head, a, n), I32)
            some = b.icmp_signed("!=", kind, same(I32, EMPTY))
            return merged_kind(c, state, (some, b.icmp_signed("==", kind, same(I32, FULL))))

        return c.loop(b.sdiv(k0, p.block_k), _after(c, k1, p.block_k), block, state)

    return c.loop(b.sdiv(i0, p.block_q), _after(c, i1, p.block_q), row, NO_TILE)


def merged_kind(c: Code, kind: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Return the kind of two tiles together."""
    return [c.b.or_(kind[0], other[0]), c.b.and_(kind[1], other[1])]


def kind_if_given(c: Code, p: Params, find: Callable[[], Sequence[Any]]) -> list[Any]:
    """Return the kind that ``find`` computes; without a block mask, every tile is full."""
    return c.values_when(p.given("block_kinds"), find, same(I1, 1), same(I1, 1))


def block_bits(c: Code, p: Params, batch: Any, head: Any, i: Any, k0: Any, count: Any) -> Any:
    """Return the bits of up to 64 keys, starting at k0, that a block mask leaves visible."""
    b, end = c.b, c.b.add(k0, count)

    def block(n: Any, bits: list[Any]) -> list[Any]:
        kind = c.load(p.row("block_kinds", batch, head, b.sdiv(i, p.block_q), n), I32)
        first = b.mul(n, p.block_k)
        start, keys = c.larger(k0, first), c.smaller(end, b.add(first, p.block_k))
        keys = b.sub(keys, start)
        full = b.icmp_signed("<=", kind, same(I32, FULL))

        def partial() -> list[Any]:
            number = b.sext(kind, I64)
            at = p.row("block_bits", number, b.srem(i, p.block_q), b.sub(start, first))
            return [packed(c, at, i64(1), keys)]

        whole = b.select(full, ones(c, keys), i64(0))
        (found,) = c.values_when(b.icmp_signed(">=", kind, same(I32, 0)), partial, whole)
        return [b.or_(bits[0], b.shl(found, b.sub(start, k0)))]

    return c.loop(b.sdiv(k0, p.block_k), _after(c, end, p.block_k), block, [i64(0)])[0]


def _after(c: Code, end: Any, block: Any) -> Any:
    """Return the number of the block after the block of ``end - 1``."""
    return c.b.add(c.b.sdiv(c.b.sub(end, i64(1)), block), i64(1))
