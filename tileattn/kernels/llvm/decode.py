"""The decoding kernel: forward for few rows, split over the keys (Flash-Decoding).

A task computes up to DECODE_ROWS rows of one key head over the keys of one split; row
``g * Nq + i`` is query i of the g-th query head of the group. Vector lanes hold keys in scores, and
columns in outputs, so K and V are read once, in place. Splits start at fixed keys, whatever the
batch. The task that ends last merges the splits of its rows, in order.

References
----------
Dao, Haziza, Massa and Sizov, Flash-Decoding for long-context inference, 2023.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.attention.block_mask import (
    NO_TILE,
    kind_if_given,
    merged_kind,
    tile_kind,
)
from tileattn.kernels.llvm.attention.dropout import keep_only, kept_keys
from tileattn.kernels.llvm.attention.expressions import TileFunctions
from tileattn.kernels.llvm.attention.scores import (
    Pairs,
    apply_score_mods,
    load_bias,
    load_descales,
    mask_bits,
    mask_tile,
    masks_given,
    may_be_hidden,
)
from tileattn.kernels.llvm.attention.softmax import CompensatedState, RowState
from tileattn.kernels.llvm.instructions.code import I64, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel, Params
from tileattn.kernels.llvm.params import Layout
from tileattn.kernels.llvm.sizes import DECODE_KEYS, DECODE_ROWS, LISTED_AHEAD
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.tiles.bits import Bits
from tileattn.kernels.llvm.tiles.gemv import dots_of_rows, sums_of_rows
from tileattn.kernels.llvm.tiles.listed_gemv import dots_of_listed_rows, sums_of_listed_rows
from tileattn.kernels.llvm.tiles.scratch import Scratch
from tileattn.kernels.llvm.tiles.tile import (
    Tile,
    all_finite,
    convert_rows,
    copy_bytes,
    size_of,
    store_row,
)
from tileattn.kernels.llvm.user_functions import Functions


def build(
    target: Target, dtype: str, accum_dtype: str, functions: Functions, layout: Layout
) -> ir.Module:
    """Emit the module."""
    kernel = Kernel("decode", target, dtype, accum_dtype, functions, layout)

    def task(c: Code, p: Params, block: Any, scratch: Any, number: Any) -> None:
        split = _Split(kernel, c, block, scratch, number)
        few = c.b.icmp_signed("<=", split.Nq, p.few)
        c.when(c.b.and_(few, c.b.icmp_signed(">", split.rows, i64(0))), split.emit)

    kernel.entry("decode", task)
    return kernel.module


class _Split:
    def __init__(self, kernel: Kernel, c: Code, params: Any, scratch: Any, number: Any) -> None:
        self.kernel, self.c, b = kernel, c, c.b
        self.p = p = kernel.params(c, params)
        self.block, self.number = b.sdiv(number, p.splits), b.srem(number, p.splits)
        heads, n = b.sdiv(self.block, p.blocks), b.srem(self.block, p.blocks)
        self.batch, self.head = b.sdiv(heads, p.Hkv), b.srem(heads, p.Hkv)
        self.r0 = b.mul(n, i64(DECODE_ROWS))
        self.Nq = p.queries(self.batch)
        self.rows = c.smaller(i64(DECODE_ROWS), b.sub(b.mul(p.group, self.Nq), self.r0))
        self.length, self.offset = (
            c.load(c.row(x, i64(8), self.batch), I64) for x in (p.kv_lengths, p.q_offset)
        )
        self.vectors = DECODE_KEYS // c.lanes  # score vectors of a row
        self.score_vectors = b.mul(self.rows, i64(self.vectors))
        memory = Scratch(c, scratch, 1)
        vectors = DECODE_ROWS * self.vectors
        self.s, self.bias = (memory.tile(vectors) for _ in range(2))
        self.visible, self.keep = (memory.bits(vectors) for _ in range(2))
        self.d_step, dv_step = (c.bytes_of(c.rounded_up(n, c.lanes)) for n in (p.D, p.Dv))
        self.q = memory.rows(DECODE_ROWS, c.rounded_up(p.D, c.lanes))
        self.columns = b.sdiv(dv_step, i64(self.s.step))  # vectors of an output row
        self.state_step = b.add(dv_step, i64(2 * self.s.step))
        columns = b.sdiv(self.state_step, i64(c.size))
        self.states = memory.rows(DECODE_ROWS, columns)
        if p.quantised:
            keys = DECODE_KEYS + LISTED_AHEAD
            self.k_list, self.v_list = (memory.rows(keys, i64(8 // c.size)) for _ in range(2))
        else:
            self.k_rows, self.v_rows = (memory.rows(DECODE_KEYS, x) for x in (p.D, p.Dv))

    def emit(self) -> None:
        c, b, p = self.c, self.c.b, self.p
        last, Nq = b.sub(b.add(self.r0, self.rows), i64(1)), self.Nq
        one_head = b.icmp_signed("==", b.sdiv(self.r0, Nq), b.sdiv(last, Nq))
        i0 = b.select(one_head, b.srem(self.r0, Nq), i64(0))
        i1 = b.select(one_head, b.srem(last, Nq), b.sub(Nq, i64(1)))
        low, high = self.low(i0), self.high(i1)
        self.full = self.low(i1), self.high(i0)  # keys that every row attends to
        first = b.sdiv(low, p.split_keys)
        end = b.sdiv(b.add(high, b.sub(p.split_keys, i64(1))), p.split_keys)
        self.splits = c.larger(i64(1), b.sub(end, first))
        start = b.mul(b.add(first, self.number), p.split_keys)

        def work() -> None:
            self.attend(c.larger(low, start), c.smaller(high, b.add(start, p.split_keys)))
            counter = c.row(p.ended, i64(8), self.block)
            others = b.atomic_rmw("add", counter, i64(1), "acq_rel")
            done = b.icmp_signed("==", b.add(others, i64(1)), self.splits)
            c.when(done, lambda: c.each(self.rows, self.finalize))

        c.when(b.icmp_signed("<", self.number, self.splits), work)

    # -- rows ------------------------------------------------------------------------------------

    def query(self, r: Any) -> tuple[Any, Any]:
        """Return head and query of a row of the task."""
        b, p, row = self.c.b, self.p, self.c.b.add(self.r0, r)
        g = b.sdiv(row, self.Nq)
        return b.add(b.mul(self.head, p.group), g), b.sub(row, b.mul(g, self.Nq))

    def low(self, i: Any) -> Any:
        """Return the first key that window and length let query i attend to."""
        first = self.c.b.sub(self.c.b.add(i, self.offset), self.p.left)
        return self.c.larger(i64(0), self.c.smaller(first, self.length))

    def high(self, i: Any) -> Any:
        """Return the end of the keys that query i attends to."""
        last = self.c.b.add(self.c.b.add(i, self.offset), self.p.right)
        end = self.c.b.add(last, i64(1))
        return self.c.larger(i64(0), self.c.smaller(end, self.length))

    def state(self, start: Any) -> RowState:
        """Return the state of one row, stored at an address."""
        state = Tile(self.c, start, 1)
        return RowState(self.c, state, Tile(self.c, state.at(2), 1), self.columns, one_row=True)

    def state_of_split(self, split: Any, r: Any) -> RowState:
        """Return the state of a row over the keys of a split."""
        return self.state(self.p.row("partials", self.block, split, r))

    def state_of_tile(self, r: Any) -> RowState:
        """Return the state of a row over the keys of a tile."""
        return self.state(self.c.row(self.states, self.state_step, r))

    def attend(self, low: Any, high: Any) -> None:
        """Compute the states of all rows over a range of keys."""
        c, b, p = self.c, self.c.b, self.p

        def row(r: Any) -> None:
            self.state_of_split(self.number, r).clear()
            to = c.row(self.q, self.d_step, r)
            Tile(c, to, 1).fill(b.sdiv(self.d_step, i64(self.s.step)), c.const(0.0))
            given = p.row("q", self.batch, *self.query(r)), i64(0), i64(1), p.D
            convert_rows(c, self.kernel.dtype, *given, to, i64(0), p.scale_power)

        def tile(k0: Any, _: Any) -> None:
            k0, k1 = c.larger(k0, low), c.smaller(b.add(k0, i64(DECODE_KEYS)), high)
            some, full = kind_if_given(c, p, partial(self.block_kind, k0, k1))
            c.when(some, lambda: self.add_tile(k0, b.sub(k1, k0), high, full))

        c.each(self.rows, row)
        c.loop(c.rounded_down(low, DECODE_KEYS), high, tile, step=DECODE_KEYS)

    def block_kind(self, k0: Any, k1: Any) -> list[Any]:
        """Return the kind of a tile by the block mask, over all rows."""
        c, b, p = self.c, self.c.b, self.p

        def row(r: Any, kind: list[Any]) -> list[Any]:
            h, i = self.query(r)
            found = tile_kind(c, p, self.batch, h, i, b.add(i, i64(1)), k0, k1)
            return merged_kind(c, kind, found)

        return c.loop(i64(0), self.rows, row, NO_TILE)

    def finalize(self, r: Any) -> None:
        """Merge the splits of a row, divide by the denominator, and store it."""
        c, b, p = self.c, self.c.b, self.p
        h, i = self.query(r)
        first, low = self.state_of_split(i64(0), r), c.row(self.states, self.state_step, r)
        total = CompensatedState(
            c, first.state, first.acc, self.columns, Tile(c, low, 1), one_row=True
        )

        def merge() -> None:
            total.start()
            c.loop(i64(1), self.splits, lambda n, _: total.merge(self.state_of_split(n, r)))
            total.settle(total)

        c.when(b.icmp_signed(">", self.splits, i64(1)), merge)

        def sink() -> None:
            total.sink([c.splat(c.load(p.row("sinks", h), c.scalar))])

        c.when(p.given("sinks"), sink)
        found = total.finalize(p.dropout_scale)
        lse, weight = (b.extract_element(x, i64(0)) for (x,) in found)  # all lanes are equal
        to = p.row("out", self.batch, h, i)
        store_row(c, self.kernel.dtype, total.acc.start, to, p.Dv, weight)
        c.store(lse, p.row("lse", self.batch, h, i))

    # -- tiles -----------------------------------------------------------------------------------

    def add_tile(self, k0: Any, n: Any, end: Any, full: Any) -> None:
        """Merge the state over n keys, starting at k0, into the state of the split.

        ``end`` is the end of its keys.
        """
        c, b, p = self.c, self.c.b, self.p
        s = self.s.start, i64(self.vectors * self.s.step)
        q, sizes = (self.q, self.d_step), (self.kernel, c, self.rows, n)
        if p.quantised:
            v = self.v_list
            self.list_rows(k0, n, end)
            dots_of_listed_rows(*sizes, p.D, q, self.k_list, s, (v, p.Dv))
        else:
            k, v = self.rows_of("k", p.D, k0, n), self.rows_of("v", p.Dv, k0, n)
            dots_of_rows(*sizes, p.D, q, k, s)
        self.s.multiply(self.score_vectors, p.scale_rest)
        self.dequantise("k_descale", k0, n)
        masked = self.modify(k0, n, full)

        def softmax(r: Any) -> None:
            state = self.state_of_tile(r)
            state.clear()
            state.update(Tile(c, c.row(*s, r), 1), i64(self.vectors))

        def merge(r: Any) -> None:
            self.state_of_split(self.number, r).merge(self.state_of_tile(r))

        c.each(self.rows, softmax)
        c.when(p.given("threshold"), lambda: self.drop(k0, n))
        self.dequantise("v_descale", k0, n)
        acc = self.state_of_tile(i64(0)).acc.start, self.state_step
        operands = *sizes, p.Dv, s, v, acc
        multiply = sums_of_listed_rows if p.quantised else sums_of_rows
        multiply(*operands)
        unusual = b.not_(all_finite(c, *acc, self.rows, p.Dv))
        c.when(b.and_(masked, unusual), lambda: multiply(*operands, self.visible))
        c.each(self.rows, merge)

    def list_rows(self, k0: Any, n: Any, end: Any) -> None:
        """List the rows of n keys and values, starting at k0, and more keys up to ``end``.

        Prefetch their descales, which are not read before all products with these keys.
        """
        b, place = self.c.b, (self.batch, self.head, k0)
        more = self.c.smaller(b.add(n, i64(LISTED_AHEAD)), b.sub(end, k0))
        self.p.list_rows("k", *place, more, self.k_list)
        self.p.list_rows("v", *place, n, self.v_list)
        self.p.prefetch_descales(*place, n)

    def rows_of(self, name: str, columns: Any, k0: Any, n: Any) -> tuple[Any, Any]:
        """Return the address of the first row of some keys or values, and the row stride."""
        c, size = self.c, size_of(self.kernel.dtype)
        step = c.b.mul(columns, i64(size))
        copies = getattr(self, f"{name}_rows"), step
        copy = partial(copy_bytes, c, count=step)
        return self.p.key_rows(name, self.batch, self.head, k0, n, copies, copy)

    def dequantise(self, descale: str, k0: Any, n: Any) -> None:
        """Multiply scores or probabilities by the descales of their keys, if these have any."""
        c, b, descales = self.c, self.c.b, self.bias  # its memory is not in use at this time
        if not self.p.quantised:
            return
        load_descales(self.kernel, c, self.p, descale, self.batch, self.head, k0, n, descales.start)

        def vector(m: Any) -> None:
            found = descales.row(b.srem(m, i64(self.vectors)))
            self.s.put(m, list(map(b.fmul, self.s.row(m), found)))

        c.each(self.score_vectors, vector)

    def modify(self, k0: Any, n: Any, full: Any) -> Any:
        """Turn scaled products into scores; return True if some pairs are masked out."""
        c, b, p = self.c, self.c.b, self.p
        c.when(p.given("bias"), lambda: self.load_bias(k0, n))
        pairs = self.pairs(k0, b.add(k0, n))
        apply_score_mods(c, p, self.s, self.score_vectors, pairs, self.bias)
        masked = b.not_(c.all([
            b.icmp_signed("==", n, i64(DECODE_KEYS)),
            b.icmp_signed(">=", k0, self.full[0]),
            b.icmp_signed("<=", b.add(k0, n), self.full[1]),
            full,
            b.not_(p.given("mask")),
            b.not_(may_be_hidden(c, p, pairs.functions)),
        ]))  # fmt: skip

        def mask() -> None:
            load = partial(mask_bits, c, p, self.batch, ahead=(0, DECODE_KEYS))
            c.when(masks_given(c, p), lambda: self.load_bits(self.visible, load, k0, n))
            mask_tile(c, p, self.s, self.score_vectors, pairs, self.visible)

        c.when(masked, mask)
        return masked

    def pairs(self, k0: Any, end: Any) -> Pairs:
        """Return the queries and keys of each vector of scores."""
        c, b, p = self.c, self.c.b, self.p

        def slope(n: Any) -> list[Any]:
            h, _ = self.query_of(n)
            return [c.splat(c.load(p.row("alibi_slopes", self.batch, h), c.scalar))]

        def of_query(number: Any) -> Any:
            return lambda n: [c.splat(number(self.query_of(n)[1]))]

        def indices(n: Any) -> list[dict[str, Any]]:
            h, i = self.query_of(n)
            return [{"b": self.batch, "h": h, "i": i, "j": c.wide(self.keys_of(k0, n))}]

        return Pairs(
            lambda n: [self.keys_of(k0, n)],
            of_query(lambda i: b.add(i, self.offset)),
            of_query(lambda i: c.narrow(self.low(i))),
            of_query(lambda i: c.narrow(c.smaller(end, self.high(i)))),
            slope,
            TileFunctions(c, p, self.kernel.functions, indices),
        )

    def query_of(self, n: Any) -> tuple[Any, Any]:
        """Return head and query of a vector of scores."""
        return self.query(self.c.b.sdiv(n, i64(self.vectors)))

    def keys_of(self, k0: Any, n: Any) -> Any:
        """Return the keys of a vector of scores."""
        c, b = self.c, self.c.b
        first = b.add(k0, b.mul(b.srem(n, i64(self.vectors)), i64(c.lanes)))
        return b.add(c.splat(c.narrow(first)), ir.Constant(c.integers, list(range(c.lanes))))

    def load_bias(self, k0: Any, n: Any) -> None:
        """Load the tile of the bias."""
        c = self.c

        def row(r: Any) -> None:
            to = self.bias.at(c.b.mul(r, i64(self.vectors)))
            pairs = self.batch, *self.query(r), k0, n
            load_bias(self.kernel, c, self.p, *pairs, to, ahead=(0, DECODE_KEYS))

        c.each(self.rows, row)

    def load_bits(self, to: Bits, find: Callable[..., Any], k0: Any, n: Any) -> None:
        """Store bits for each vector of scores; ``find`` returns the bits of 64 keys of a row."""
        c, b = self.c, self.c.b

        def row(r: Any) -> None:
            def run(j: Any, _: Any) -> None:
                bits = find(*self.query(r), b.add(k0, j), c.smaller(i64(64), b.sub(n, j)))
                first = b.add(b.mul(r, i64(self.vectors)), b.sdiv(j, i64(c.lanes)))
                for v in range(64 // c.lanes):
                    c.store(b.lshr(bits, i64(v * c.lanes)), to.at(b.add(first, i64(v))))

            c.loop(i64(0), n, run, step=64)

        c.each(self.rows, row)

    def drop(self, k0: Any, n: Any) -> None:
        """Set the probabilities that dropout drops to 0."""
        c = self.c
        self.load_bits(self.keep, partial(kept_keys, c, self.p, self.batch), k0, n)

        def vector(n: Any) -> None:
            self.s.put(n, keep_only(c, self.s.row(n), self.keep.row(n)))

        c.each(self.score_vectors, vector)
