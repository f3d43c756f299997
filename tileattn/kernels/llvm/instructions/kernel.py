"""A module under construction: its functions, task loop and parameters."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.bfloat16 import configure_tiles, release_tiles
from tileattn.kernels.llvm.instructions.code import I1, I64, NEVER, POINTER, Code, i64, same
from tileattn.kernels.llvm.params import ARRAYS, BATCHED, FIELDS, FLOATS, OPTIONAL, Layout
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.user_functions import NO_FUNCTIONS, Functions

_AHEAD = 16  # key rows from a copied row of a page to the row that is prefetched
_LINE = 64  # bytes of a cache line

_TOKENS = {"bhi": "cu_seqlens_q", "bhj": "cu_seqlens_k"}
"""Token axes of packed arrays, and the array of their sequence offsets."""


class Params:
    """The fields of the parameter block, and addresses of rows of its arrays.

    A function loads each field once, in its first block, so that no loop loads it again. A packed
    sequence is a batch entry with its own first row and lengths.
    """

    def __init__(self, c: Code, block: Any, layout: Layout) -> None:
        self._c, self._block, self._layout = c, block, layout
        self.paged, self.quantised = layout.paged, layout.kv_dtype is not None

    def __getattr__(self, name: str) -> Any:
        c = self._c
        kind = POINTER if name in ARRAYS else ir.DoubleType() if name in FLOATS else I64

        def load() -> Any:
            x = self._load(name, kind)
            return x if name not in FLOATS or c.size == 8 else c.b.fptrunc(x, c.scalar)

        return c.once(name, load)

    def given(self, name: str) -> Any:
        """Return True if the call has this array, or this number is not 0."""
        c = self._c
        if name in OPTIONAL and not self._layout.optional:
            return NEVER

        def load() -> Any:
            return c.b.icmp_signed("!=", self._load(name, I64), i64(0))

        return c.once(f"given {name}", load)

    def _load(self, name: str, kind: Any) -> Any:
        return self._c.load(self._c.at(self._block, FIELDS[name]), kind)

    def row(self, name: str, *indices: Any) -> Any:
        """Return the address of ``array[indices]``; missing indices are 0."""
        c, at, axes = self._c, getattr(self, name), ARRAYS[name]
        for axis, index in zip(axes, indices, strict=False):
            at = c.at(at, c.b.mul(index, getattr(self, f"{name}_{axis}")))
        if self._layout.packed and axes in _TOKENS and not (self.paged and axes == "bhj"):
            first, _ = self._span(_TOKENS[axes], indices[0])
            at = c.row(at, getattr(self, f"{name}_{axes[-1]}"), first)
        return at

    def key_row(self, name: str, batch: Any, head: Any, j: Any) -> Any:
        """Return the address of the row of key j."""
        if not self.paged:
            return self.row(name, batch, head, j)
        c, b = self._c, self._c.b
        at = self.row("block_table", batch, b.sdiv(j, self.page))
        at = self.row(name, c.load(at, I64), head)
        return c.row(at, getattr(self, f"{name}_j"), b.srem(j, self.page))

    def key_rows(
        self, name: str, batch: Any, head: Any, k0: Any, n: Any, copies: tuple[Any, Any],
        copy: Callable[[Any, Any], None],
    ) -> tuple[Any, Any]:  # fmt: skip
        """Return the address of the first of n key rows, and the row stride.

        If they span several pages, ``copy(row, to)`` gathers them into ``copies``, an address and
        a stride.
        """
        step = getattr(self, f"{name}_j")
        if not self.paged:
            return self.row(name, batch, head, k0), step
        c, b, (to, to_step) = self._c, self._c.b, copies
        last = b.add(b.srem(k0, self.page), n)
        one = b.icmp_signed("<=", last, self.page)
        first = c.variable(POINTER, to)

        def whole() -> None:
            b.store(self.key_row(name, batch, head, k0), first)

        def take(j: Any) -> None:
            ahead = c.smaller(b.add(j, i64(_AHEAD)), b.sub(n, i64(1)))
            next_row = self.key_row(name, batch, head, b.add(k0, ahead))
            c.loop(i64(0), to_step, lambda x, _: c.prefetch(c.at(next_row, x)), step=_LINE)
            copy(self.key_row(name, batch, head, b.add(k0, j)), c.row(to, to_step, j))

        c.when_else(one, whole, lambda: c.each(n, take))
        return b.load(first, typ=POINTER), b.select(one, step, to_step)

    def each_page(
        self, batch: Any, k0: Any, n: Any, body: Callable[[Any, Any, Any, Any], None]
    ) -> None:
        """Run ``body(page, row, j, count)`` for the parts of n keys that lie in one page.

        A part is ``count`` rows of a page, starting at ``row``; the first is key ``k0 + j``.
        """
        c, b, page, end = self._c, self._c.b, self.page, self._c.b.add(k0, n)
        first = b.sdiv(k0, page)

        def part(t: Any) -> None:
            t = b.add(first, t)
            start, stop = b.mul(t, page), b.mul(b.add(t, i64(1)), page)
            low, high = c.larger(start, k0), c.smaller(stop, end)
            number = c.load(self.row("block_table", batch, t), I64)
            body(number, b.sub(low, start), b.sub(low, k0), b.sub(high, low))

        last = b.sdiv(b.sub(end, i64(1)), page)
        c.each(b.add(b.sub(last, first), i64(1)), part)

    def list_rows(self, name: str, batch: Any, head: Any, k0: Any, n: Any, to: Any) -> None:
        """Store the addresses of n key rows, starting at k0."""
        c, step = self._c, getattr(self, f"{name}_j")

        def put(start: Any, j: Any, count: Any) -> None:
            place = c.row(to, i64(8), j)
            c.each(count, lambda r: c.store(c.row(start, step, r), c.row(place, i64(8), r)))

        if self.paged:
            self.each_page(
                batch, k0, n, lambda page, row, *part: put(self.row(name, page, head, row), *part)
            )
        else:
            put(self.row(name, batch, head, k0), i64(0), n)

    def prefetch_descales(self, batch: Any, head: Any, k0: Any, n: Any) -> None:
        """Prefetch the descales of n keys that are in pages, which may lie far apart."""
        for name in self._layout.paged_descales:

            def part(page: Any, row: Any, *_: Any, name: str = name) -> None:
                self._c.prefetch(self.row(name, page, head, row))

            self.each_page(batch, k0, n, part)

    def factor(self, name: str, batch: Any, head: Any, j: Any) -> Any:
        """Return the factor of row j of keys or values; None if they have no descales."""
        if not self.quantised:
            return None
        descale = f"{name}_descale"
        row = self.key_row if self.has_paged(descale) else self.row
        return self._c.load(row(descale, batch, head, j), self._c.scalar)

    def has_paged(self, descale: str) -> bool:
        """Return True if a descale is in pages, as keys are."""
        return descale in self._layout.paged_descales

    def computes(self, batch: Any, head: Any) -> Any:
        """Return True if this target computes a key head: bfloat16 matmuls need usual numbers."""
        c = self._c

        def look() -> list[Any]:
            unusual = c.load(self.row("unusual", batch, head), I64)
            return [c.b.icmp_signed("==" if c.target.bf16 else "!=", unusual, i64(0))]

        return c.values_when(self.given("unusual"), look, same(I1, 1))[0]

    def queries(self, batch: Any) -> Any:
        """Return the number of queries of a batch entry."""
        return self._length("cu_seqlens_q", batch) if self._layout.packed else self.Nq

    def keys(self, batch: Any) -> Any:
        """Return the number of keys of a batch entry."""
        return self._length("cu_seqlens_k", batch) if self._layout.packed else self.Nk

    def _length(self, name: str, batch: Any) -> Any:
        first, end = self._span(name, batch)
        return self._c.b.sub(end, first)

    def _span(self, name: str, batch: Any) -> tuple[Any, Any]:
        """Return the first token of a sequence, and the end."""
        c = self._c
        at = c.row(getattr(self, name), i64(8), batch)
        return c.load(at, I64), c.load(c.at(at, 8), I64)


class Kernel:
    """A module under construction; its arguments are the fields of ``compile.Module``."""

    def __init__(
        self,
        name: str,
        target: Target,
        dtype: str,
        accum_dtype: str,
        functions: Functions = NO_FUNCTIONS,
        layout: Layout = BATCHED,
    ) -> None:
        self.module, self.functions, self.layout = ir.Module(name), functions, layout
        self.target, self.dtype, self.accum_dtype = target, dtype, accum_dtype
        self.kv_dtype = layout.kv_dtype or dtype
        self._functions: dict[str, ir.Function] = {}

    def entry(self, name: str, task: Callable[..., None]) -> None:
        """Emit the entry function (params, counter, scratch), which loops over tasks.

        It returns after its quota of tasks, so that its caller can be interrupted.
        """
        kind = ir.FunctionType(ir.VoidType(), [POINTER] * 3)
        c = Code(ir.Function(self.module, kind, name), self.target, self.accum_dtype)
        block, counter, scratch = c.function.args
        p, b = self.params(c, block), c.b
        tasks = p.tasks
        left = c.variable(I64, p.quota)
        take, work, done = (b.append_basic_block(n) for n in ("take", "work", "done"))
        tiles = self.target.bf16 == "amx"
        if tiles:
            configure_tiles(c)
        b.branch(take)
        b.position_at_end(take)
        number = b.atomic_rmw("add", counter, i64(1), "monotonic")
        b.cbranch(b.icmp_signed("<", number, tasks), work, done)
        b.position_at_end(work)
        task(c, p, block, scratch, number)
        rest = b.sub(b.load(left, typ=I64), i64(1))
        b.store(rest, left)
        b.cbranch(b.icmp_signed(">", rest, i64(0)), take, done)
        b.position_at_end(done)
        if tiles:
            release_tiles(c)
        b.ret_void()

    def params(self, c: Code, block: Any) -> Params:
        """Return the fields of a parameter block."""
        return Params(c, block, self.layout)

    def function(self, name: str, kinds: list[Any], body: Callable[..., None]) -> ir.Function:
        """Return the function of this name; ``body(code, *arguments)`` emits it on first use."""
        if name not in self._functions:
            made = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), name)
            made.linkage = "internal"
            made.attributes.add("noinline")
            self._functions[name] = made
            c = Code(made, self.target, self.accum_dtype)
            body(c, *made.args)
            c.b.ret_void()
        return self._functions[name]
