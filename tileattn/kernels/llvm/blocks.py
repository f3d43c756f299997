"""Algorithm layer: block masks; twin of ``algorithm/block_mask.py``.

``block_kinds`` holds for each block FULL, EMPTY or its number among the partial blocks, whose pairs
are in ``block_bits``.
"""

from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions import I1, I8, I32, Code, i64
from tileattn.kernels.llvm.kernel import Params

FULL, EMPTY = -2, -1


def tile_kind(
    c: Code, p: Params, batch: Any, head: Any, i0: Any, i1: Any, k0: Any, k1: Any
) -> tuple[Any, Any]:
    """Whether some block of a tile is not empty, and whether all are full."""
    b = c.b

    def row(a: Any, state: list[Any]) -> list[Any]:
        def block(n: Any, state: list[Any]) -> list[Any]:
            kind = c.load(p.row("block_kinds", batch, head, a, n), I32)
            some = b.icmp_signed("!=", kind, ir.Constant(I32, EMPTY))
            full = b.icmp_signed("==", kind, ir.Constant(I32, FULL))
            return [b.or_(state[0], some), b.and_(state[1], full)]

        return c.loop(b.sdiv(k0, p.block_k), _after(c, k1, p.block_k), block, state)

    no, yes = (ir.Constant(I1, n) for n in (0, 1))
    some, full = c.loop(b.sdiv(i0, p.block_q), _after(c, i1, p.block_q), row, [no, yes])
    return some, full


def mask_row(
    c: Code, p: Params, batch: Any, head: Any, i: Any, k0: Any, k1: Any, to: Any, step: int
) -> None:
    """Clear what a block mask masks out among a run of keys of query i: a word for each key."""
    b = c.b
    zero = ir.Constant(c.integer, 0)

    def block(n: Any, _: Any) -> None:
        kind = c.load(p.row("block_kinds", batch, head, b.sdiv(i, p.block_q), n), I32)
        first = b.mul(n, p.block_k)
        start, end = c.larger(k0, first), c.smaller(k1, b.add(first, p.block_k))

        def place(j: Any) -> Any:
            return c.at(to, b.mul(b.sub(j, k0), i64(step)))

        def partial(j: Any, _: Any) -> None:
            number = b.sext(kind, i64(0).type)
            at = p.row("block_bits", number, b.srem(i, p.block_q), b.sub(j, first))
            seen = b.icmp_signed("!=", c.load(at, I8), ir.Constant(I8, 0))
            c.store(b.select(seen, c.load(place(j), c.integer), zero), place(j))

        empty = b.icmp_signed("==", kind, ir.Constant(I32, EMPTY))
        c.when(empty, lambda: c.loop(start, end, lambda j, _: c.store(zero, place(j))))
        listed = b.icmp_signed(">=", kind, ir.Constant(I32, 0))
        c.when(listed, lambda: c.loop(start, end, partial))

    c.loop(b.sdiv(k0, p.block_k), _after(c, k1, p.block_k), block)


def _after(c: Code, end: Any, block: Any) -> Any:
    """Give the number of the block after the one that holds ``end - 1``."""
    return c.b.add(c.b.sdiv(c.b.sub(end, i64(1)), block), i64(1))
