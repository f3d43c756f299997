"""Check and transpose whole arrays before a pass with bfloat16 matmuls.

A number is *usual* if it is 0 or between 2^-63 and 2^63 in size: products of two usual numbers
neither underflow nor overflow. A key head of a batch entry with an unusual number is computed in
float32, together with its query heads; the other heads keep their bits. Keys that length and window
hide from every query count as 0. V (backward: Q and dO) is transposed in blocks.
"""

from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.bfloat16 import WORDS
from tileattn.kernels.llvm.instructions.code import I16, I64, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Params
from tileattn.kernels.llvm.params import ARRAYS, BF16_ARRAYS
from tileattn.kernels.llvm.sizes import BLOCK, PAIR, TERMS
from tileattn.kernels.llvm.tiles.bf16_rows import pair_rows
from tileattn.kernels.llvm.tiles.tile import Tile, transpose_rows

_SMALLEST, _END = (127 - 63) << 7, (127 + 63) << 7
"""Bits of ``2**-63`` and ``2**63`` in bfloat16."""


def transposed_block(c: Code, p: Params, name: str, batch: Any, head: Any, row: Any) -> Any:
    """Return the address of a row of an array in its transpose, a column of its block.

    A block has a row for each column, padded to whole vectors. Matmuls that end within a pair read
    past the end of a row: `prepare` writes the next row, or the next block, too.
    """
    b, shape = c.b, BF16_ARRAYS[name]
    heads, length, columns = (getattr(p, x) for x in shape)
    blocks = b.sdiv(c.rounded_up(length, BLOCK), i64(BLOCK))
    block = b.add(b.mul(b.add(b.mul(batch, heads), head), blocks), b.sdiv(row, i64(BLOCK)))
    offset = b.mul(block, b.mul(c.rounded_up(columns, c.lanes), i64(2 * BLOCK)))
    return c.at(getattr(p, f"{name}_t"), offset, b.mul(b.srem(row, i64(BLOCK)), i64(2)))


def keys_in_reach(c: Code, p: Params, batch: Any) -> tuple[Any, Any]:
    """Return the range of keys that length and window leave visible to some query."""
    length, offset = (c.load(c.row(x, i64(8), batch), I64) for x in (p.kv_lengths, p.q_offset))
    end = c.b.add(c.b.add(p.Nq, offset), p.right)
    return c.larger(i64(0), c.b.sub(offset, p.left)), c.smaller(length, end)


def prepare(c: Code, p: Params, _: Any, scratch: Any, number: Any) -> None:
    """Check and transpose one block of rows of one array."""
    b = c.b
    for name, shape in BF16_ARRAYS.items():
        heads, length, columns = (getattr(p, x) for x in shape)
        blocks = b.sdiv(c.rounded_up(length, BLOCK), i64(BLOCK))
        count = b.select(p.given(name), b.mul(b.mul(p.B, heads), blocks), i64(0))
        blocks = c.larger(i64(1), blocks)  # the division also runs without any block
        place = b.sdiv(number, blocks), b.mul(b.srem(number, blocks), i64(BLOCK))
        here = b.and_(b.icmp_signed(">=", number, i64(0)), b.icmp_signed("<", number, count))
        c.when(here, partial(_block, c, p, scratch, name, heads, length, columns, *place))
        number = b.sub(number, count)


def _block(
    c: Code, p: Params, scratch: Any, name: str, heads: Any, length: Any, columns: Any, entry: Any,
    row: Any,
) -> None:  # fmt: skip
    b = c.b
    batch, head = b.sdiv(entry, heads), b.srem(entry, heads)
    first, end, axis = i64(0), length, "i"
    if name in ("k", "v"):
        (first, end), axis = keys_in_reach(c, p, batch), "j"
    n = c.larger(i64(0), c.smaller(i64(BLOCK), b.sub(end, row)))
    first = c.larger(i64(0), b.sub(first, row))
    source, step = p.row(name, batch, head, row), getattr(p, f"{name}_{axis}")
    unusual = b.not_(_all_usual(c, c.row(source, step, first), step, b.sub(n, first), columns))
    flag = p.row("unusual", batch, b.sdiv(b.mul(head, p.Hkv), heads))
    c.when(unusual, lambda: b.atomic_rmw("xchg", flag, i64(1), "monotonic") and None)

    def transpose() -> None:
        whole, pairs = c.rounded_up(columns, c.lanes), i64(BLOCK // 2)
        to_step = b.mul(whole, i64(PAIR))
        pair_rows(c, source, step, n, columns, scratch, to_step, BLOCK, first)
        to = Tile(c, transposed_block(c, p, name, batch, head, row), BLOCK // (2 * c.lanes))
        transpose_rows(c, "float32", partial(c.row, scratch, to_step), pairs, whole, to)

    if f"{name}_t" in ARRAYS:
        c.when(p.given(f"{name}_t"), transpose)


def _all_usual(c: Code, source: Any, step: Any, rows: Any, columns: Any) -> Any:
    """Return True if all numbers of some rows are usual."""
    b = c.b
    whole = c.rounded_down(columns, TERMS)

    def of(kind: Any, n: int) -> Any:
        return ir.Constant(kind, [n] * TERMS) if kind is WORDS else ir.Constant(kind, n)

    def row(r: Any, state: list[Any]) -> list[Any]:
        start = c.at(source, b.mul(r, step))

        def look(d: Any, ends: list[Any]) -> list[Any]:
            kind = ends[0].type
            x = b.and_(c.load(c.at(start, b.mul(d, i64(2))), kind), of(kind, 0x7FFF))
            suffix = f"v{TERMS}i16" if kind is WORDS else "i16"
            less = b.sub(x, of(kind, 1))  # 0 becomes the largest
            return [
                c.intrinsic(f"llvm.umin.{suffix}", kind, ends[0], less),
                c.intrinsic(f"llvm.umax.{suffix}", kind, ends[1], x),
            ]

        many = c.loop(i64(0), whole, look, state[:2], step=TERMS)
        return [*many, *c.loop(whole, columns, look, state[2:])]

    start = [of(kind, n) for kind in (WORDS, I16) for n in (0xFFFF, 0)]
    state = c.loop(i64(0), rows, row, start)
    usual = []
    for least, most in (state[:2], state[2:]):
        kind = least.type
        usual.append(b.icmp_unsigned(">=", least, of(kind, _SMALLEST - 1)))
        usual.append(b.icmp_unsigned("<", most, of(kind, _END)))
    bits = [b.bitcast(x, ir.IntType(TERMS)) for x in usual[:2]]
    all_of = [b.icmp_signed("==", x, ir.Constant(x.type, -1)) for x in bits]
    return c.all([*all_of, *usual[2:]])
