"""Emit the instructions of a function: vectors, loops, loads and stores of every dtype."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.target import Target

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
POINTER = ir.PointerType()
YIELD = "yield_thread"
"""Symbol of the operating system's function that yields the core to another thread."""

_SPINS = 1000  # rounds of a spin, tens of microseconds, before the core is yielded
_FLOATS: dict[str, Any] = {
    "float16": ir.HalfType(),
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
}


def i64(n: int) -> ir.Constant:
    """Make a 64-bit integer."""
    return ir.Constant(I64, n)


def same(kind: Any, n: int) -> ir.Constant:
    """Make an integer constant of a type; in every lane of a vector type."""
    return ir.Constant(kind, [n] * kind.count if isinstance(kind, ir.VectorType) else n)


NEVER = same(I1, 0)
"""The condition of code that is not emitted."""


class Code:
    """Emits the instructions of a function that has no body yet; sums have the given dtype."""

    def __init__(self, function: ir.Function, target: Target, dtype: str) -> None:
        self.module, self.function, self.target = function.module, function, target
        self.dtype = dtype  # "float32" or "float64"
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self._once: dict[str, Any] = {}  # values of the first block, by name
        self.size = 8 if dtype == "float64" else 4  # bytes of a sum
        self.lanes = target.vector_bytes // self.size
        self.scalar = _FLOATS[dtype]
        self.integer = ir.IntType(8 * self.size)
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.integers = ir.VectorType(self.integer, self.lanes)
        self.mask = ir.VectorType(I1, self.lanes)

    # -- constants -------------------------------------------------------------------------------

    def const(self, x: float) -> Any:
        """Make a vector of one number."""
        return ir.Constant(self.vector, [ir.Constant(self.scalar, x)] * self.lanes)

    def ints(self, n: int) -> Any:
        """Make a vector of one integer as wide as a sum."""
        return same(self.integers, n)

    # -- addresses, loads and stores -------------------------------------------------------------

    def at(self, pointer: Any, *offsets: Any) -> Any:
        """Add byte offsets to a pointer."""
        for offset in offsets:
            given = i64(offset) if isinstance(offset, int) else offset
            pointer = self.b.gep(pointer, [given], source_etype=I8)
        return pointer

    def row(self, start: Any, step: Any, r: Any) -> Any:
        """Return the address of row r of rows that are ``step`` bytes apart."""
        return self.at(start, self.b.mul(r, step))

    def load(self, pointer: Any, kind: Any = None, lanes: Any = None) -> Any:
        """Load a vector or a value of another type; ``lanes`` masks the lanes of a vector."""
        kind = self.vector if kind is None else kind
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        size = _bytes(element)
        if lanes is None:
            return self.b.load(pointer, typ=kind, align=size)
        letter = "i" if isinstance(element, ir.IntType) else "f"
        name = f"llvm.masked.load.v{kind.count}{letter}{8 * size}.p0"
        zero = ir.Constant(kind, None)
        return self.intrinsic(name, kind, pointer, ir.Constant(I32, size), lanes, zero)

    def prefetch(self, pointer: Any) -> None:
        """Prefetch a cache line into L2; an invalid address does nothing."""
        for_reading, locality, data = (ir.Constant(I32, n) for n in (0, 2, 1))
        nothing = ir.VoidType()
        self.intrinsic("llvm.prefetch.p0", nothing, pointer, for_reading, locality, data)

    def store(self, x: Any, pointer: Any) -> None:
        """Store a vector or a scalar."""
        element = x.type.element if isinstance(x.type, ir.VectorType) else x.type
        self.b.store(x, pointer, align=_bytes(element))

    def load_as(self, dtype: str, pointer: Any, count: int = 1, lanes: Any = None) -> Any:
        """Load ``count`` elements of an input dtype, converted to sums; a scalar for 1."""
        wide = ir.VectorType(self.scalar, count) if count > 1 else self.scalar
        if dtype in _BYTES:
            kind = ir.VectorType(I8, count) if count > 1 else I8
            return _BYTES[dtype](self, self.load(pointer, kind, lanes), wide)
        if dtype == "bfloat16":
            narrow, word = (ir.VectorType(t, count) if count > 1 else t for t in (I16, I32))
            bits = self.b.zext(self.load(pointer, narrow, lanes), word)
            single = _FLOATS["float32"]
            single = ir.VectorType(single, count) if count > 1 else single
            x = self.b.bitcast(self.b.shl(bits, same(word, 16)), single)
            return x if self.size == 4 else self.b.fpext(x, wide)
        kind = ir.VectorType(_FLOATS[dtype], count) if count > 1 else _FLOATS[dtype]
        x = self.load(pointer, kind, lanes)
        if dtype == self.dtype:
            return x
        return self.b.fptrunc(x, wide) if dtype == "float64" else self.b.fpext(x, wide)

    def store_as(self, dtype: str, x: Any, pointer: Any) -> None:
        """Store a sum, or a vector of sums, in an input dtype, rounded to nearest."""
        vector = isinstance(x.type, ir.VectorType)
        count = x.type.count if vector else 1
        if dtype == "bfloat16":
            word, narrow = (ir.VectorType(t, count) if vector else t for t in (I32, I16))
            bits, sixteen = self.b.bitcast(x, word), same(word, 16)
            odd = self.b.and_(self.b.lshr(bits, sixteen), same(word, 1))
            rounded = self.b.add(self.b.add(bits, same(word, 0x7FFF)), odd)
            quiet = self.b.or_(bits, same(word, 1 << 22))
            kept = self.b.select(self.b.fcmp_unordered("uno", x, x), quiet, rounded)
            x = self.b.trunc(self.b.lshr(kept, sixteen), narrow)
        elif dtype != self.dtype:
            kind = _FLOATS[dtype]
            x = self.b.fptrunc(x, ir.VectorType(kind, count) if vector else kind)
        self.store(x, pointer)

    # -- arithmetic ------------------------------------------------------------------------------

    def intrinsic(self, name: str, result: Any, *arguments: Any) -> Any:
        """Call an intrinsic of LLVM."""
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [x.type for x in arguments])
            function = ir.Function(self.module, kind, name)
        return self.b.call(function, arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """``x * y + z``, rounded once where the CPU can."""
        if not self.target.fma:
            return self.b.fadd(self.b.fmul(x, y), z)
        suffix = f"f{8 * self.size}"
        suffix = f"v{self.lanes}{suffix}" if isinstance(x.type, ir.VectorType) else suffix
        return self.intrinsic(f"llvm.fma.{suffix}", x.type, x, y, z)

    def splat(self, x: Any, lanes: int | None = None) -> Any:
        """Broadcast a scalar."""
        lanes = lanes or self.lanes
        kind = ir.VectorType(x.type, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(I32, 0))
        return self.shuffle(one, ir.Constant(kind, ir.Undefined), [0] * lanes)

    def shuffle(self, x: Any, y: Any, lanes: list[int]) -> Any:
        """Choose lanes of x and y; the lanes of y follow the lanes of x."""
        kind = ir.VectorType(I32, len(lanes))
        return self.b.shuffle_vector(x, y, ir.Constant(kind, lanes))

    def join(self, parts: Sequence[Any]) -> Any:
        """Make a vector of scalars."""
        x = ir.Constant(ir.VectorType(parts[0].type, len(parts)), ir.Undefined)
        for n, part in enumerate(parts):
            x = self.b.insert_element(x, part, ir.Constant(I32, n))
        return x

    def split(self, x: Any) -> list[Any]:
        """Return the lanes of a vector as scalars."""
        return [self.b.extract_element(x, ir.Constant(I32, n)) for n in range(x.type.count)]

    def maximum(self, x: Any, y: Any) -> Any:
        """Take the larger; y where either is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        """Take the smaller; y where either is NaN."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def narrow(self, x: Any) -> Any:
        """Turn an index into an integer as wide as a sum."""
        return self.b.trunc(x, self.integer) if self.size < 8 else x

    def wide(self, x: Any) -> Any:
        """Widen a vector of integers as wide as a sum to 64-bit integers."""
        return self.b.sext(x, ir.VectorType(I64, self.lanes)) if self.size < 8 else x

    def smaller(self, x: Any, y: Any) -> Any:
        """Take the smaller of two signed integers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def larger(self, x: Any, y: Any) -> Any:
        """Take the larger of two signed integers."""
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def sum(self, x: Any) -> Any:
        """Add up all lanes, in halves."""
        return self.fold(x, self.b.fadd)

    def fold(self, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine all lanes, in halves."""
        count = self.lanes
        while count > 1:
            count //= 2
            halves = list(range(count)), list(range(count, 2 * count))
            x = combine(*(self.shuffle(x, x, lanes) for lanes in halves))
        return self.b.extract_element(x, ir.Constant(I32, 0))

    def all(self, conditions: Sequence[Any]) -> Any:
        """Return True if all conditions hold."""
        return reduce(self.b.and_, conditions)

    def bytes_of(self, n: Any) -> Any:
        """Return the bytes of n sums."""
        return self.b.mul(n, i64(self.size))

    def vectors_of(self, n: Any) -> Any:
        """Count the vectors that hold n numbers, at least 1."""
        return self.b.add(self.b.sdiv(self.b.sub(n, i64(1)), i64(self.lanes)), i64(1))

    def rounded_up(self, n: Any, size: int) -> Any:
        """Round n up to a multiple of ``size``."""
        return self.rounded_down(self.b.add(n, i64(size - 1)), size)

    def rounded_down(self, n: Any, size: int) -> Any:
        """Round n down to a multiple of ``size``."""
        return self.b.mul(self.b.sdiv(n, i64(size)), i64(size))

    # -- control ---------------------------------------------------------------------------------

    def loop(
        self,
        start: Any,
        stop: Any,
        body: Callable[[Any, list[Any]], Sequence[Any] | None],
        state: Sequence[Any] = (),
        step: int = 1,
    ) -> list[Any]:
        """For i from start to stop: ``state = body(i, state)``; return the last state."""
        b, before = self.b, self.b.block
        head, inside, done = (b.append_basic_block(n) for n in ("loop", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(start, before)
        held = [b.phi(x.type) for x in state]
        for phi, x in zip(held, state, strict=True):
            phi.add_incoming(x, before)
        b.cbranch(b.icmp_signed("<", i, stop), inside, done)
        b.position_at_end(inside)
        new = body(i, list(held)) or ()
        i.add_incoming(b.add(i, i64(step)), b.block)
        for phi, x in zip(held, new, strict=True):
            phi.add_incoming(x, b.block)
        b.branch(head)
        b.position_at_end(done)
        return held

    def each_vector(self, count: Any, body: Callable[[Any, int], None]) -> None:
        """Run ``body(first, lanes)`` for whole vectors of elements, then for single ones."""
        whole = self.rounded_down(count, self.lanes)
        self.loop(i64(0), whole, lambda i, _: body(i, self.lanes), step=self.lanes)
        self.loop(whole, count, lambda i, _: body(i, 1))

    def variable(self, kind: Any, start: Any) -> Any:
        """Make a variable, which LLVM keeps in a register."""
        with self.b.goto_entry_block():
            place = self.b.alloca(kind)
        self.b.store(start, place)
        return place

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Compute a value in the function's first block, so that no loop computes it again.

        ``make`` does not call `once` itself.
        """
        if name not in self._once:
            with self.b.goto_entry_block():
                self._once[name] = make()
        return self._once[name]

    def spin_until(self, condition: Callable[[], Any]) -> None:
        """Spin until a condition holds; after a while, yield the core in each round."""
        b, before = self.b, self.b.block
        look, idle, done = (b.append_basic_block(n) for n in ("look", "idle", "done"))
        b.branch(look)
        b.position_at_end(look)
        n = b.phi(I64)
        n.add_incoming(i64(0), before)
        b.cbranch(condition(), done, idle)
        b.position_at_end(idle)
        if self.target.triple.startswith("x86"):
            self.intrinsic("llvm.x86.sse2.pause", ir.VoidType())
        long = b.icmp_signed(">", n, i64(_SPINS))
        self.when(long, lambda: self.intrinsic(YIELD, ir.VoidType()))
        n.add_incoming(b.add(n, i64(1)), b.block)
        b.branch(look)
        b.position_at_end(done)

    def addresses(self, count: int) -> Any:
        """Allocate ``count`` addresses on the stack."""
        with self.b.goto_entry_block():
            place = self.b.alloca(ir.ArrayType(POINTER, count))
        place.type = POINTER  # opaque: llvmlite otherwise expects stores of whole arrays
        return place

    def choose(self, n: Any, bodies: Sequence[Callable[[], Any]]) -> None:
        """Run the n-th body, or the last."""
        b = self.b
        done = b.append_basic_block("chosen")
        cases = [b.append_basic_block("case") for _ in bodies]
        switch = b.switch(n, cases[-1])
        for number, (case, body) in enumerate(zip(cases, bodies, strict=True)):
            if case is not cases[-1]:
                switch.add_case(i64(number), case)
            b.position_at_end(case)
            body()
            b.branch(done)
        b.position_at_end(done)

    def each(self, count: Any, body: Callable[[Any], Any]) -> None:
        """For i from 0 to count: run ``body(i)``."""
        self.loop(i64(0), count, lambda i, _: body(i) and None)

    def when(self, condition: Any, body: Callable[[], Any]) -> None:
        """Run a body if a condition holds; emit nothing for `NEVER`."""
        if condition is NEVER:
            return
        with self.b.if_then(condition):
            body()

    def when_else(self, condition: Any, body: Callable[[], Any], other: Callable[[], Any]) -> None:
        """Run one of two bodies; emit only the other for `NEVER`."""
        if condition is NEVER:
            other()
            return
        with self.b.if_else(condition) as (then, otherwise):
            with then:
                body()
            with otherwise:
                other()

    def values_when(
        self, condition: Any, body: Callable[[], Sequence[Any]], *others: Any
    ) -> list[Any]:
        """Return the values that a body computes if a condition holds, and other values if not."""
        if condition is NEVER:
            return list(others)
        places = [self.variable(x.type, x) for x in others]

        def store() -> None:
            for place, x in zip(places, body(), strict=True):
                self.b.store(x, place)

        self.when(condition, store)
        return [self.b.load(at, typ=x.type) for at, x in zip(places, others, strict=True)]


def _of_int8(c: Code, x: Any, wide: Any) -> Any:
    """Convert elements of int8."""
    return c.b.sitofp(x, wide)


def _of_e4m3(c: Code, x: Any, wide: Any) -> Any:
    """Convert elements of float8_e4m3fn, moved to their places in float16.

    There the exponent is 8 too small. The only NaN has all bits 1 but the sign; in float16 it has
    the largest exponent. Denormal numbers move like others: in float32 they would be slow.
    """
    b = c.b
    word, half, scale = I16, _FLOATS["float16"], ir.Constant(c.scalar, 256.0)
    if isinstance(wide, ir.VectorType):
        word, half = (ir.VectorType(t, wide.count) for t in (word, half))
        scale = ir.Constant(wide, [scale] * wide.count)
    x = b.shl(b.sext(x, word), same(word, 7))
    moved = b.and_(x, same(word, 0xBF80 - (1 << 16)))
    carry = b.add(b.and_(x, same(word, 0x3F80)), same(word, 0x80))  # reaches bit 14 of NaN only
    found = b.bitcast(b.or_(moved, b.and_(carry, same(word, 0x4000))), half)
    return b.fmul(b.fpext(found, wide), scale)


_BYTES: dict[str, Callable[[Code, Any, Any], Any]] = {"int8": _of_int8, "float8_e4m3fn": _of_e4m3}
"""Conversions of elements of 8 bits to sums of float32."""


def _bytes(kind: Any) -> int:
    if isinstance(kind, ir.IntType):
        return max(1, int(kind.width) // 8)
    if isinstance(kind, ir.PointerType):
        return 8
    return {"half": 2, "float": 4, "double": 8}[str(kind)]
