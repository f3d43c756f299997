"""The forward kernel, as ``forward_block`` in ``algorithm/spec.py``.

A task computes up to W rows of one key head, where W is a few vectors: row ``g * Nq + i`` is query
i of the g-th query head of the group. Rows lie in vector lanes. A tile of scores has a row for each
key: K and V are broadcast element by element, and no reduction is horizontal.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.attention.bf16_operands import ForwardBf16
from tileattn.kernels.llvm.attention.bf16_prepare import prepare
from tileattn.kernels.llvm.attention.block_mask import (
    NO_TILE,
    kind_if_given,
    merged_kind,
    tile_kind,
)
from tileattn.kernels.llvm.attention.dropout import keep_only, keep_pairs, rows_before
from tileattn.kernels.llvm.attention.expressions import TileFunctions
from tileattn.kernels.llvm.attention.operands import ForwardBroadcast
from tileattn.kernels.llvm.attention.scores import (
    Pairs,
    apply_score_mods,
    load_bias,
    mask_bits,
    mask_tile,
    masks_given,
    may_be_hidden,
)
from tileattn.kernels.llvm.attention.softmax import CompensatedState, RowState
from tileattn.kernels.llvm.instructions.code import I64, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel, Params
from tileattn.kernels.llvm.params import Layout
from tileattn.kernels.llvm.sizes import KEEP_SPARE, ROW_FACTS, SECTION
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.tiles.bits import put_column, transpose_bits
from tileattn.kernels.llvm.tiles.scratch import Scratch
from tileattn.kernels.llvm.tiles.tile import store_columns, transpose_rows
from tileattn.kernels.llvm.user_functions import Functions

_FAR = 1 << 62  # past every key
_QUERY, _HEAD, _LOW, _HIGH, _SLOPE, _POSITION = range(6)


def build(
    target: Target, dtype: str, accum_dtype: str, functions: Functions, layout: Layout
) -> ir.Module:
    """Emit the module."""
    kernel = Kernel("forward", target, dtype, accum_dtype, functions, layout)

    def task(c: Code, p: Params, block: Any, scratch: Any, number: Any) -> None:
        b, W = c.b, target.vectors * c.lanes
        heads, n = b.sdiv(number, p.blocks), b.srem(number, p.blocks)
        r0 = b.mul(b.sub(b.sub(p.blocks, i64(1)), n), i64(W))  # longest rows first (causal)
        batch, head = b.sdiv(heads, p.Hkv), b.srem(heads, p.Hkv)
        Nq = p.queries(batch)
        rows = c.smaller(i64(W), b.sub(b.mul(p.group, Nq), r0))
        emit = _Block(kernel, c, block, scratch, batch, head, r0, rows).emit
        many = b.icmp_signed(">", Nq, p.few)
        some = b.icmp_signed(">", rows, i64(0))
        c.when(c.all([many, some, p.computes(batch, head)]), emit)

    if target.bf16:
        kernel.entry("bf16_prepare", prepare)
    kernel.entry("forward", task)
    return kernel.module


class _Block:
    def __init__(
        self, kernel: Kernel, c: Code, params: Any, scratch: Any, batch: Any, head: Any, r0: Any,
        rows: Any,
    ) -> None:  # fmt: skip
        self.kernel, self.c, self.vectors = kernel, c, kernel.target.vectors
        self.p = kernel.params(c, params)
        self.batch, self.head, self.r0, self.rows = batch, head, r0, rows
        self.Nq = self.p.queries(batch)
        memory = Scratch(c, scratch, self.vectors)
        self.state, self.facts = memory.tile(4), memory.tile(ROW_FACTS)
        keys = kernel.target.keys
        self.s, self.bias, rows_of_bias = (memory.tile(keys) for _ in range(3))
        self.bias_rows = rows_of_bias.start
        self.mask_words = memory.tile(8 // c.size)
        self.visible, self.keep = memory.bits(keys), memory.bits(keys + KEEP_SPARE)
        total, total_acc = memory.tile(2), memory.tile(self.p.Dv)
        low = memory.tile(c.b.add(self.p.Dv, i64(2)))
        self.total = CompensatedState(c, total, total_acc, self.p.Dv, low)
        # They come last: ForwardBroadcast uses no rows of K and V where it reads them in place.
        operands = ForwardBf16 if kernel.target.bf16 else ForwardBroadcast
        self.operands = operands(kernel, c, self.p, memory, batch, head, c.vectors_of(rows))
        self.acc = self.operands.acc

    def emit(self) -> None:
        c, b, p, total = self.c, self.c.b, self.p, self.total
        span = self.load_rows()
        rows = RowState(c, self.state, self.acc, p.Dv)
        rows.clear()
        (low, high), keys = span[:2], self.kernel.target.keys
        section = c.rounded_down(low, SECTION)
        several = b.icmp_signed("<", b.add(section, i64(SECTION)), high)

        def start() -> None:
            total.clear()
            total.start()

        def tile(k0: Any, _: Any) -> None:
            k0, k1 = c.larger(k0, low), c.smaller(b.add(k0, i64(keys)), high)
            some, full = kind_if_given(c, p, partial(self.block_kind, k0, k1))
            c.when(some, lambda: self.update_tile(rows, k0, b.sub(k1, k0), span, full))

        def add() -> None:
            total.merge(rows)
            rows.clear()

        def tiles(k0: Any, _: Any) -> None:
            end = c.smaller(b.add(k0, i64(SECTION)), high)
            first = c.larger(k0, c.rounded_down(low, keys))
            c.loop(first, end, tile, step=keys)
            c.when(several, add)

        c.when(several, start)
        c.loop(section, high, tiles, step=SECTION)
        c.when(several, lambda: total.settle(rows))
        c.when(p.given("sinks"), lambda: rows.sink(self.of_heads("sinks")))
        self.finalize(rows)

    # -- rows ------------------------------------------------------------------------------------

    def load_rows(self) -> list[Any]:
        """Load the queries and their facts for masks and modifiers; return two ranges of keys.

        Some row attends to each key of the first range; every row attends to each of the second.
        """
        c, b, p = self.c, self.c.b, self.p
        length = c.load(c.at(p.kv_lengths, b.mul(self.batch, i64(8))), I64)
        offset = c.load(c.at(p.q_offset, b.mul(self.batch, i64(8))), I64)
        zero, left, right = i64(0), p.left, p.right
        for facts in range(ROW_FACTS):
            self.facts.put(facts, [c.const(0.0)] * self.vectors)

        def body(r: Any, span: list[Any]) -> list[Any]:
            row = b.add(self.r0, r)
            g = b.sdiv(row, self.Nq)
            i = b.sub(row, b.mul(g, self.Nq))
            h = b.add(b.mul(self.head, p.group), g)
            position = b.add(i, offset)
            low = c.larger(zero, c.smaller(b.sub(position, left), length))
            high = c.larger(low, c.smaller(length, b.add(b.add(position, right), i64(1))))
            for fact, x in ((_QUERY, i), (_HEAD, h), (_LOW, low), (_HIGH, high)):
                self.put_fact(fact, r, b.trunc(x, c.integer) if c.size < 8 else x)
            c.store(position, c.at(self.facts.at(_POSITION), b.mul(r, i64(8))))

            def slope() -> None:
                self.put_fact(_SLOPE, r, c.load(p.row("alibi_slopes", self.batch, h), c.scalar))

            c.when(p.given("alibi_slopes"), slope)
            some = b.icmp_signed("<", low, high)
            first = c.smaller(span[0], b.select(some, low, span[0]))
            last = c.larger(span[1], b.select(some, high, span[1]))
            return [first, last, c.larger(span[2], low), c.smaller(span[3], high)]

        far = i64(_FAR)
        low, high, full_low, full_high = c.loop(zero, self.rows, body, [far, zero, zero, far])
        self.operands.load_queries(partial(self.row, "q"), self.rows)
        return [c.smaller(low, high), high, full_low, full_high]

    def row(self, name: str, r: Any, *columns: Any) -> Any:
        """Return the address of the row of an array that belongs to row r of the task."""
        return self.p.row(name, self.batch, self.fact(_HEAD, r), self.fact(_QUERY, r), *columns)

    def put_fact(self, fact: int, r: Any, x: Any) -> None:
        """Store one number of one row."""
        self.c.store(x, self.c.at(self.facts.at(fact), self.c.bytes_of(r)))

    def fact(self, fact: int, r: Any) -> Any:
        """Load one integer of one row."""
        c = self.c
        x = c.load(c.at(self.facts.at(fact), c.bytes_of(r)), c.integer)
        return c.b.sext(x, I64) if c.size < 8 else x

    def of_heads(self, name: str) -> list[Any]:
        """Load a per-head number for each row."""
        c = self.c

        def load(r: Any) -> None:
            self.put_fact(_SLOPE, r, c.load(self.p.row(name, self.fact(_HEAD, r)), c.scalar))

        c.each(self.rows, load)
        return self.facts.row(_SLOPE)

    def each_head(
        self, body: Callable[[Any, Any, Any, list[Any]], Sequence[Any]], state: Sequence[Any] = ()
    ) -> list[Any]:
        """For each query head, with its range of queries: ``state = body(g, i0, i1, state)``."""
        c, b, Nq = self.c, self.c.b, self.Nq
        end = b.add(self.r0, self.rows)

        def head(g: Any, state: list[Any]) -> Sequence[Any]:
            first = b.mul(g, Nq)
            i0, i1 = c.larger(i64(0), b.sub(self.r0, first)), c.smaller(Nq, b.sub(end, first))
            return body(g, i0, i1, state)

        last = b.sdiv(b.sub(end, i64(1)), Nq)
        return c.loop(b.sdiv(self.r0, Nq), b.add(last, i64(1)), head, state)

    def block_kind(self, k0: Any, k1: Any) -> list[Any]:
        """Return the kind of a tile by the block mask, over all query heads."""
        c, b, p = self.c, self.c.b, self.p

        def head(g: Any, i0: Any, i1: Any, kind: list[Any]) -> list[Any]:
            h = b.add(b.mul(self.head, p.group), g)
            return merged_kind(c, kind, tile_kind(c, p, self.batch, h, i0, i1, k0, k1))

        return self.each_head(head, NO_TILE)

    # -- tiles -----------------------------------------------------------------------------------

    def update_tile(self, rows: RowState, k0: Any, n: Any, span: list[Any], full: Any) -> None:
        """Compute the scores of one tile and update the state of its rows."""
        c, b, p = self.c, self.c.b, self.p
        inside = b.icmp_signed(">=", k0, span[2])
        inside = b.and_(inside, b.icmp_signed("<=", b.add(k0, n), span[3]))
        pairs = self.pairs(k0)
        dense = b.or_(p.given("mask"), may_be_hidden(c, p, pairs.functions))
        masked = b.or_(b.not_(b.and_(inside, full)), dense)
        modified = b.or_(p.given("softcap"), p.given("alibi_slopes"))
        self.operands.scores(k0, n, self.s, b.or_(masked, modified))

        c.when(p.given("bias"), lambda: self.load_bias(k0, n))
        apply_score_mods(c, p, self.s, n, pairs, self.bias)

        def mask() -> None:
            c.when(masks_given(c, p), lambda: self.load_masks(k0, n))
            mask_tile(c, p, self.s, n, pairs, self.visible)

        c.when(masked, mask)
        self.operands.update(rows, n, self.s, lambda: self.drop(k0, n))
        self.operands.add_values(k0, n, self.s, self.visible, masked)

    def pairs(self, k0: Any) -> Pairs:
        """Return the queries and keys of the tile whose first key is k0."""
        c, b = self.c, self.c.b

        def keys(j: Any) -> list[Any]:
            return [c.splat(c.narrow(b.add(k0, j)))] * self.vectors

        def positions(_: Any) -> list[Any]:
            kind, width = ir.VectorType(I64, c.lanes), 8 * c.lanes
            return [c.load(c.at(self.facts.at(_POSITION), v * width), kind) for v in self.s.vectors]

        def of(fact: int) -> Any:
            return lambda _: self.facts.row(fact, c.integers)

        heads, queries = (
            [c.wide(x) for x in self.facts.row(n, c.integers)] for n in (_HEAD, _QUERY)
        )
        places = [{"b": self.batch, "h": h, "i": i} for h, i in zip(heads, queries, strict=True)]

        def indices(j: Any) -> list[dict[str, Any]]:
            return [{**place, "j": b.add(k0, j)} for place in places]

        functions = TileFunctions(c, self.p, self.kernel.functions, indices)
        slopes = partial(self.facts.row, _SLOPE)
        return Pairs(keys, positions, of(_LOW), of(_HIGH), lambda _: slopes(), functions)

    def load_bias(self, k0: Any, n: Any) -> None:
        """Load the tile of the bias, by rows of queries, and transpose it."""
        c, keys = self.c, self.kernel.target.keys

        def row(r: Any) -> Any:
            return c.row(self.bias_rows, i64(keys * c.size), r)

        def load(r: Any) -> None:
            pairs = self.batch, self.fact(_HEAD, r), self.fact(_QUERY, r), k0, n
            load_bias(self.kernel, c, self.p, *pairs, row(r), ahead=(0, keys))

        c.each(self.rows, load)
        transpose_rows(c, c.dtype, row, self.rows, i64(keys), self.bias)

    def load_masks(self, k0: Any, n: Any) -> None:
        """Load the bits of the stored masks."""
        c, b, ahead = self.c, self.c.b, (0, self.kernel.target.keys)

        def run(j: Any, _: Any) -> None:
            count = c.smaller(i64(64), b.sub(n, j))

            def lane(r: Any) -> None:
                pairs = self.batch, self.fact(_HEAD, r), self.fact(_QUERY, r), b.add(k0, j), count
                put_column(c, self.mask_words, r, mask_bits(c, self.p, *pairs, ahead))

            c.each(self.rows, lane)
            transpose_bits(c, self.mask_words, count, self.visible, j)

        c.loop(i64(0), n, run, step=64)

    def drop(self, k0: Any, n: Any) -> None:
        """Set the probabilities that dropout drops to 0."""
        c, b, p = self.c, self.c.b, self.p

        def head(g: Any, i0: Any, i1: Any, _: Any) -> tuple[()]:
            h = b.add(b.mul(self.head, p.group), g)
            lane = b.sub(b.add(b.mul(g, self.Nq), i0), self.r0)
            keys = k0, b.add(k0, n)
            keep_pairs(c, p, self.keep, self.batch, h, (i0, i1), lane, keys, queries_across=True)
            return ()

        self.keep.clear(self.kernel.target.keys + KEEP_SPARE)
        self.each_head(head)
        skipped = rows_before(c, p, self.batch, k0, queries_across=True)

        def key(j: Any) -> None:
            self.s.put(j, keep_only(c, self.s.row(j), self.keep.row(b.add(j, skipped))))

        c.each(n, key)

    def finalize(self, rows: RowState) -> None:
        """Divide by the denominator, and store the rows."""
        c, p = self.c, self.p
        lse, weight = rows.finalize(p.dropout_scale)
        for row, x in ((1, rows.log_l()), (2, lse), (3, weight)):  # m is row 0
            self.state.put(row, x)

        to = partial(self.row, "out"), self.rows, p.Dv
        store_columns(c, self.kernel.dtype, *to, self.acc, self.state.at(3))
        for name, row in (("row_max", 0), ("log_l", 1), ("lse", 2)):

            def put(r: Any, name: str = name, row: int = row) -> None:
                x = c.load(c.at(self.state.at(row), c.bytes_of(r)), c.scalar)
                c.store(x, self.row(name, r))

            c.when(p.given(name), partial(c.each, self.rows, put))
