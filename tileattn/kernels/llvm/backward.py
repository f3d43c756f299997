"""The backward kernel, as ``backward_block`` and ``backward_tile`` in ``algorithm/spec.py``.

A task computes one key block, whose keys lie in vector lanes. A tile of scores has a row for each
query: Q and dO are broadcast element by element, and dK and dV stay in scratch memory, transposed.
Key block n adds to the dQ of a query block after key block n - 1, so sums have one order.
"""

from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.attention.bf16_operands import BackwardBf16
from tileattn.kernels.llvm.attention.bf16_prepare import prepare
from tileattn.kernels.llvm.attention.block_mask import kind_if_given, tile_kind
from tileattn.kernels.llvm.attention.dropout import keep_pairs, rows_before
from tileattn.kernels.llvm.attention.expressions import TileFunctions
from tileattn.kernels.llvm.attention.operands import BackwardBroadcast
from tileattn.kernels.llvm.attention.parameter_gradient import ElementSums
from tileattn.kernels.llvm.attention.scores import (
    Grads,
    Pairs,
    apply_score_mods,
    load_bias,
    mask_bits,
    mask_tile,
    masks_given,
    may_be_hidden,
)
from tileattn.kernels.llvm.backward_rows import add_dq_section, convert_dq, preprocess
from tileattn.kernels.llvm.instructions.code import I1, I64, POINTER, Code, i64, same
from tileattn.kernels.llvm.instructions.kernel import Kernel, Params
from tileattn.kernels.llvm.instructions.numerics import exp
from tileattn.kernels.llvm.params import DBIAS_OF_KEYS, DBIAS_OF_ROWS, DBIAS_OF_TILES, Layout
from tileattn.kernels.llvm.sizes import KEEP_SPARE, ROWS, SECTION
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.tiles.compensated_sum import CompensatedSum
from tileattn.kernels.llvm.tiles.scratch import Scratch
from tileattn.kernels.llvm.tiles.tile import Tile, convert_rows, store_columns
from tileattn.kernels.llvm.user_functions import Functions

_END = (1 << 62) - 1
_AHEAD = ROWS, 0  # from tile to tile, in queries and keys


def build(
    target: Target, dtype: str, accum_dtype: str, functions: Functions, layout: Layout
) -> ir.Module:
    """Emit the module."""
    kernel = Kernel("backward", target, dtype, accum_dtype, functions, layout)

    def task(c: Code, p: Params, block: Any, scratch: Any, number: Any) -> None:
        b, W = c.b, target.vectors * c.lanes
        group, n = _interleaved(c, p, number)
        number = b.add(b.mul(group, p.blocks), n)
        _Block(kernel, c, block, scratch, number, group, b.mul(n, i64(W))).emit()

    if target.bf16:
        kernel.entry("bf16_prepare", prepare)
    kernel.entry("backward", task)
    kernel.entry("backward_preprocess", partial(preprocess, kernel))
    kernel.entry("backward_dq_convert", partial(convert_dq, kernel))
    return kernel.module


def _interleaved(c: Code, p: Params, number: Any) -> tuple[Any, Any]:
    """Return the head group and the key block of a task.

    Key blocks of a group wait for one another, in order. So consecutive tasks belong to different
    groups, as many as there are threads; the last round may have fewer.
    """
    b = c.b
    size = b.mul(p.chains, p.blocks)
    first = b.mul(b.sdiv(number, size), p.chains)
    chains = c.smaller(p.chains, b.sub(b.sdiv(p.tasks, p.blocks), first))
    rest = b.srem(number, size)
    return b.add(first, b.srem(rest, chains)), b.sdiv(rest, chains)


class _Block:
    def __init__(
        self, kernel: Kernel, c: Code, params: Any, scratch: Any, number: Any, group: Any, k0: Any
    ) -> None:  # fmt: skip
        self.kernel, self.c, self.vectors = kernel, c, kernel.target.vectors
        self.p = p = kernel.params(c, params)
        self.number, self.group, self.k0 = number, group, k0
        self.section = c.b.sdiv(k0, i64(SECTION))
        memory = Scratch(c, scratch, self.vectors)
        self.s, self.ds, self.kept, self.bias, self.grad = (memory.tile(ROWS) for _ in range(5))
        self.lanes, self.dbias, self.weights = (memory.tile(1) for _ in range(3))
        self.visible, self.keep = memory.bits(ROWS), memory.bits(ROWS + KEEP_SPARE)
        operands = BackwardBf16 if kernel.target.bf16 else BackwardBroadcast
        self.operands = operands(kernel, c, p, memory)
        self.tiles = c.variable(I64, i64(0))  # of the section whose sums dK and dV are
        self.several = c.variable(I1, same(I1, 0))
        self.dbias_total = CompensatedSum(c, memory.tile(1), memory.tile(1))
        sums = (self.operands.dk, p.D), (self.operands.dv, p.Dv)
        self.sums = [(x, n, CompensatedSum(c, memory.tile(n), memory.tile(n))) for x, n in sums]
        self.elements = ElementSums(kernel.functions, c, p, memory)  # has the rest
        self.grads = Grads(self.grad, self.bias, self.elements)  # the bias is read before

    def emit(self) -> None:
        c, b, p = self.c, self.c.b, self.p
        for v in range(self.vectors):
            lane = ir.Constant(c.integers, list(range(v * c.lanes, (v + 1) * c.lanes)))
            first = c.splat(b.trunc(self.k0, c.integer) if c.size < 8 else self.k0)
            c.store(b.add(first, lane), self.lanes.at(0, v))

        def body(n: Any, _: Any) -> None:
            # Head groups that share sums of the bias are one task; others have one each.
            entry = b.add(b.mul(self.group, p.group_step), b.mul(n, p.sharing_step))
            self.batch, self.head = b.sdiv(entry, p.Hkv), b.srem(entry, p.Hkv)
            self.order = b.mul(n, p.group)
            most = i64(self.vectors * c.lanes)
            self.keys = c.smaller(most, b.sub(p.keys(self.batch), self.k0))
            some = b.icmp_signed(">", self.keys, i64(0))
            c.when(b.and_(some, p.computes(self.batch, self.head)), self.key_head)

        c.loop(i64(0), p.sharing, body)
        self.wait(i64(_END - 1))
        self.elements.finish()
        self.publish(i64(_END))

    def key_head(self) -> None:
        """One key head: load its keys, meet its queries, store its gradients."""
        c, b, p = self.c, self.c.b, self.p
        self.operands.load_keys(self.batch, self.head, self.k0, self.keys)
        b.store(i64(0), self.tiles)
        b.store(same(I1, 0), self.several)
        self.length = c.load(c.at(p.kv_lengths, b.mul(self.batch, i64(8))), I64)
        self.offset = c.load(c.at(p.q_offset, b.mul(self.batch, i64(8))), I64)
        k1 = c.smaller(b.add(self.k0, self.keys), self.length)
        low = c.larger(i64(0), b.sub(b.sub(self.k0, self.offset), p.right))
        high = c.smaller(p.queries(self.batch), b.add(b.sub(k1, self.offset), p.left))
        some = b.and_(b.icmp_signed("<", self.k0, k1), b.icmp_signed("<", low, high))
        low, high = (b.select(some, x, i64(0)) for x in (low, high))

        def head(g: Any, _: Any) -> None:
            h = b.add(b.mul(self.head, p.group), g)
            self.dbias_total.clear(i64(1))

            def body(i0: Any, _: Any) -> None:
                first = c.rounded_down(i0, ROWS)
                i0, i1 = c.larger(first, low), c.smaller(b.add(first, i64(ROWS)), high)

                def look() -> list[Any]:
                    end = b.add(self.k0, self.keys)
                    return tile_kind(c, p, self.batch, h, i0, i1, self.k0, end)

                some, self.full = kind_if_given(c, p, look)

                def compute() -> None:
                    self.tile(g, h, b.sdiv(first, i64(ROWS)), i0, b.sub(i1, i0))
                    tiles = b.add(b.load(self.tiles, typ=I64), i64(1))
                    b.store(tiles, self.tiles)
                    c.when(b.icmp_signed("==", tiles, i64(SECTION // ROWS)), self.add_section)

                c.when(some, compute)

            c.loop(c.rounded_down(low, ROWS), high, body, step=ROWS)

            def store() -> None:
                self.dbias.put(0, self.dbias_total.value(0))
                to, zero = p.row("dbias", self.batch, h, i64(0), self.k0), i64(0)
                convert_rows(c, c.dtype, self.dbias.start, zero, i64(1), self.keys, to, zero)

            c.when(b.icmp_signed("==", p.dbias_kind, i64(DBIAS_OF_KEYS)), store)

        c.loop(i64(0), p.group, head)
        c.when(b.load(self.several, typ=I1), self.settle)

        self.weights.put(0, [c.splat(self.operands.dk_scale)] * self.vectors)
        self.store_keys("dk", self.operands.dk, p.D)
        self.weights.put(0, [c.const(1.0)] * self.vectors)
        self.store_keys("dv", self.operands.dv, p.Dv)

    def add_section(self) -> None:
        """Add dK and dV of this section to the totals, and start the next section."""
        c, b, zero = self.c, self.c.b, [self.c.const(0.0)] * self.vectors
        first = b.not_(b.load(self.several, typ=I1))
        for tile, columns, total in self.sums:
            c.when(first, partial(total.clear, columns))

            def add(d: Any, tile: Tile = tile, total: CompensatedSum = total) -> None:
                total.add(d, tile.row(d))
                tile.put(d, zero)

            c.each(columns, add)
        b.store(same(I1, 1), self.several)
        b.store(i64(0), self.tiles)

    def settle(self) -> None:
        """Replace dK and dV by their totals over all sections."""
        self.add_section()
        for tile, columns, total in self.sums:
            tile.set_rows(columns, total.value)

    def store_keys(self, name: str, tile: Tile, columns: Any) -> None:
        """Store the columns of a tile, times the weight of each, as rows of dK or dV."""
        c, p, kernel = self.c, self.p, self.kernel

        def body(
            c: Code, start: Any, step: Any, rows: Any, columns: Any, tile: Any, weights: Any
        ) -> None:
            row, sums = partial(c.row, start, step), Tile(c, tile, self.vectors)
            store_columns(c, kernel.dtype, row, rows, columns, sums, weights)

        kinds = [POINTER, I64, I64, I64, POINTER, POINTER]
        function = kernel.function("store_columns", kinds, body)
        start, step = p.row(name, self.batch, self.head, self.k0), getattr(p, f"{name}_j")
        operands = start, step, self.keys, columns, tile.start, self.weights.start
        c.b.call(function, operands)

    # -- tiles -----------------------------------------------------------------------------------

    def tile(self, g: Any, h: Any, query_block: Any, i0: Any, n: Any) -> None:
        """Recompute the probabilities of one tile and add to all gradients."""
        b, p = self.c.b, self.p
        self.operands.load_queries(self.batch, h, i0, n)
        self.operands.scores(self.s, self.ds)
        masked = self.probabilities(h, i0, n)
        self.score_gradient(h, i0, n, masked)
        grad = b.select(p.given("softcap"), self.grad.start, self.ds.start)
        weights = b.select(p.given("threshold"), self.kept.start, self.s.start)
        order = b.add(b.mul(b.add(self.order, g), i64(1 << 40)), query_block)
        wait = partial(self.take_turn, order, h, query_block)
        self.operands.add_gradients(weights, grad, self.visible, masked, wait)
        self.add_dbias(h, i0, n)
        self.elements.add(n, self.keys)
        self.publish(b.add(order, i64(1)))

    def probabilities(self, h: Any, i0: Any, n: Any) -> Any:
        """Turn scaled scores into probabilities; return True if some pairs are masked out."""
        c, b, p = self.c, self.c.b, self.p

        def alike(x: Any) -> list[Any]:
            return [c.splat(x)] * self.vectors

        def position(r: Any) -> Any:
            return b.add(b.add(i0, r), self.offset)

        def low(r: Any) -> list[Any]:
            at = c.smaller(b.sub(position(r), p.left), self.length)
            return alike(c.narrow(c.larger(i64(0), at)))

        def high(r: Any) -> list[Any]:
            end = c.smaller(self.length, b.add(b.add(position(r), p.right), i64(1)))
            return alike(c.narrow(c.larger(i64(0), end)))

        def slope(_: Any) -> list[Any]:
            return alike(c.load(p.row("alibi_slopes", self.batch, h), c.scalar))

        keys = self.lanes.row(0, c.integers)

        def indices(r: Any) -> list[dict[str, Any]]:
            place = {"b": self.batch, "h": h, "i": b.add(i0, r)}
            return [{**place, "j": c.wide(j)} for j in keys]

        functions = TileFunctions(c, p, self.kernel.functions, indices)
        pairs = Pairs(lambda _: keys, lambda r: alike(position(r)), low, high, slope, functions)
        c.when(p.given("bias"), lambda: self.load_bias(h, i0, n))
        apply_score_mods(c, p, self.s, n, pairs, self.bias, self.grads)
        last = b.add(i0, b.sub(n, i64(1)))
        inside = c.all([
            b.icmp_signed("<=", b.add(self.k0, self.keys), self.length),
            b.icmp_signed(">=", self.k0, b.sub(b.add(last, self.offset), p.left)),
            b.icmp_signed("<", b.add(self.k0, self.keys),
                          b.add(b.add(b.add(i0, self.offset), p.right), i64(2))),
            self.full,
            b.not_(p.given("mask")),
            b.not_(may_be_hidden(c, p, functions)),
        ])  # fmt: skip
        masked = b.not_(inside)

        def mask() -> None:
            c.when(masks_given(c, p), lambda: self.load_masks(h, i0, n))
            mask_tile(c, p, self.s, n, pairs, self.visible)

        c.when(masked, mask)

        def body(r: Any) -> None:
            places = (p.row(name, self.batch, h, b.add(i0, r)) for name in ("lse", "log_l"))
            lse, log_l = (c.splat(c.load(place, c.scalar)) for place in places)
            self.s.put(r, [exp(c, b.fsub(b.fsub(x, lse), log_l)) for x in self.s.row(r)])

        c.each(n, body)
        return masked

    def score_gradient(self, h: Any, i0: Any, n: Any, masked: Any) -> None:
        """``dS = P (Z dP - delta)``, 0 where masked out; with softcap, times its derivative too."""
        c, b, p = self.c, self.c.b, self.p
        c.when(p.given("threshold"), lambda: self.drop(h, i0, n))
        softcap, zero = p.given("softcap"), c.const(0.0)

        def body(r: Any) -> None:
            delta = c.splat(c.load(p.row("delta", self.batch, h, b.add(i0, r)), c.scalar))
            pairs = zip(self.s.row(r), self.ds.row(r), strict=True)
            # Numbers of one size lie on a grid, on which one delta would round in one direction.
            ds = [c.fma(x, y, b.fneg(b.fmul(x, delta))) for x, y in pairs]
            if self.kernel.functions.score_mod is not None:
                self.elements.multiply(r, ds)
                ds = list(map(b.fmul, ds, self.bias.row(r)))
            self.ds.put(r, ds)

        def clear(r: Any) -> None:
            seen = self.visible.row(r)
            for tile in (self.s, self.kept, self.ds, self.grad, *self.elements.tiles):
                tile.put(r, [b.select(z, x, zero) for z, x in zip(seen, tile.row(r), strict=True)])

        c.each(n, body)
        c.when(softcap, lambda: self.grad.apply(n, b.fmul, self.ds))
        c.when(masked, lambda: c.each(n, clear))

    def drop(self, h: Any, i0: Any, n: Any) -> None:
        """Multiply dP, and a copy of P, by 0 or ``1 / (1 - p)``."""
        c, b, p = self.c, self.c.b, self.p
        zero, scale = c.const(0.0), c.splat(p.dropout_scale)
        lanes, rows = (self.k0, b.add(self.k0, self.keys)), (i0, b.add(i0, n))
        self.keep.clear(ROWS + KEEP_SPARE)
        keep_pairs(c, p, self.keep, self.batch, h, lanes, i64(0), rows, queries_across=False)
        skipped = rows_before(c, p, self.batch, i0, queries_across=False)

        def body(r: Any) -> None:
            z = [b.select(x, scale, zero) for x in self.keep.row(b.add(r, skipped))]
            for source, to in ((self.s, self.kept), (self.ds, self.ds)):
                to.put(r, list(map(b.fmul, source.row(r), z)))

        c.each(n, body)

    def load_bias(self, h: Any, i0: Any, n: Any) -> None:
        """Load the tile of the bias."""

        def body(r: Any) -> None:
            place = self.batch, h, self.c.b.add(i0, r), self.k0, self.keys
            load_bias(self.kernel, self.c, self.p, *place, self.bias.at(r), _AHEAD)

        self.c.each(n, body)

    def load_masks(self, h: Any, i0: Any, n: Any) -> None:
        """Load the bits of the stored masks."""
        c, p = self.c, self.p

        def body(r: Any) -> None:
            place = self.batch, h, c.b.add(i0, r), self.k0, self.keys
            c.store(mask_bits(c, p, *place, _AHEAD), self.visible.at(r))

        c.each(n, body)

    # -- sums ------------------------------------------------------------------------------------

    def add_dbias(self, h: Any, i0: Any, n: Any) -> None:
        """Add dS to the gradient of the bias."""
        c, b, p = self.c, self.c.b, self.p

        def full(r: Any) -> None:
            to, source = p.row("dbias", self.batch, h, b.add(i0, r), self.k0), self.ds.at(r)

            def some(j: Any, lanes: int) -> None:
                at, kind = c.at(to, c.bytes_of(j)), c.vector if lanes > 1 else c.scalar
                x = c.load(c.at(source, c.bytes_of(j)), kind)
                c.store(b.fadd(c.load(at, kind), x), at)

            c.each_vector(self.keys, some)

        def of_rows(r: Any) -> None:
            to, source = p.row("dbias", self.batch, h, b.add(i0, r)), self.ds.at(r)
            wide = ir.DoubleType()  # the sum over all keys is in float64

            def element(j: Any, total: list[Any]) -> list[Any]:
                return [b.fadd(total[0], c.load(c.at(source, c.bytes_of(j)), c.scalar))]

            total = c.loop(i64(0), self.keys, element, [ir.Constant(c.scalar, 0.0)])
            x = total[0] if c.size == 8 else b.fpext(total[0], wide)
            c.store(b.fadd(c.load(to, wide), x), to)

        def of_keys() -> None:
            start = [c.const(0.0)] * self.vectors
            rows = c.loop(i64(0), n, lambda r, x: list(map(b.fadd, x, self.ds.row(r))), start)
            self.dbias_total.add(0, rows)

        for kind, add in (
            (DBIAS_OF_TILES, partial(c.each, n, full)),
            (DBIAS_OF_ROWS, partial(c.each, n, of_rows)),
            (DBIAS_OF_KEYS, of_keys),
        ):
            c.when(b.icmp_signed("==", p.dbias_kind, i64(kind)), add)

    # -- order -----------------------------------------------------------------------------------

    def wait(self, order: Any) -> None:
        """Wait until the key block before this one is done with a query block."""
        c, b, p = self.c, self.c.b, self.p
        before = c.at(p.semaphore, b.mul(b.sub(self.number, i64(1)), i64(8)))

        def done() -> Any:
            return b.icmp_signed(">", b.load_atomic(before, "acquire", 8, typ=I64), order)

        some = b.icmp_signed(">", b.srem(self.number, p.blocks), i64(0))
        c.when(some, lambda: c.spin_until(done))

    def take_turn(self, order: Any, h: Any, query_block: Any) -> None:
        """Wait for earlier key blocks; if they complete a section, add its dQ to the total."""
        c, b, p = self.c, self.c.b, self.p
        self.wait(order)

        def look() -> None:
            place, section = p.row("dq_section", self.batch, h, query_block), self.section

            def add() -> None:
                first = b.mul(query_block, i64(ROWS))
                end = c.smaller(p.queries(self.batch), b.add(first, i64(ROWS)))
                c.loop(first, end, lambda i, _: add_dq_section(c, p, self.batch, h, i))
                c.store(section, place)

            c.when(b.icmp_signed("!=", c.load(place, I64), section), add)

        c.when(p.given("dq_section"), look)

    def publish(self, order: Any) -> None:
        """Publish that this and all earlier key blocks are done with tiles before ``order``."""
        c, b, p = self.c, self.c.b, self.p
        b.atomic_rmw("xchg", c.at(p.semaphore, b.mul(self.number, i64(8))), order, "release")
