"""Layout layer: parameters, tasks, and the functions of a module."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.bfloat16 import configure_tiles, release_tiles
from tileattn.kernels.llvm.bits import Bits
from tileattn.kernels.llvm.functions import NO_FUNCTIONS, Functions
from tileattn.kernels.llvm.instructions import I64, POINTER, Code, i64
from tileattn.kernels.llvm.params import ARRAYS, FIELDS, FLOATS
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.tile import Tile


class Params:
    """The fields of the parameter block, loaded once at the start of a function."""

    def __init__(self, c: Code, block: Any) -> None:
        self._c, self._block = c, block

    def __getattr__(self, name: str) -> Any:
        c = self._c
        kind = POINTER if name in ARRAYS else ir.DoubleType() if name in FLOATS else I64
        x = c.load(c.at(self._block, FIELDS[name]), kind)
        return x if name not in FLOATS or c.size == 8 else c.b.fptrunc(x, c.scalar)

    def given(self, name: str) -> Any:
        """Whether the call has this array."""
        c = self._c
        return c.b.icmp_signed("!=", c.load(c.at(self._block, FIELDS[name]), I64), i64(0))

    def row(self, name: str, *indices: Any) -> Any:
        """Address of ``array[indices]``; axes that are left out start at 0."""
        c, at = self._c, getattr(self, name)
        for axis, index in zip(ARRAYS[name], indices, strict=False):
            at = c.at(at, c.b.mul(index, getattr(self, f"{name}_{axis}")))
        return at


class Scratch:
    """Scratch memory of a worker, handed out from the start on.

    Parameters
    ----------
    c : Code
        Where instructions go.
    start : pointer
        Aligned to a vector.
    vectors : int
        Vectors of a row of a tile.
    """

    def __init__(self, c: Code, start: Any, vectors: int) -> None:
        self._c, self._next, self._vectors = c, start, vectors

    def tile(self, rows: Any) -> Tile:
        """Hand out a tile."""
        tile = Tile(self._c, self._next, self._vectors)
        self._next = tile.at(rows)
        return tile

    def rows(self, rows: int, columns: Any) -> Any:
        """Hand out rows of any number of columns; return their address."""
        start = self._next
        self._next = self._c.at(start, self._c.b.mul(columns, i64(rows * self._c.size)))
        return start

    def bits(self, rows: int) -> Bits:
        """Hand out a word of bits for each row of a tile."""
        start = self._next
        self._next = self._c.at(start, 8 * rows)
        return Bits(self._c, start, self._vectors)


class Kernel:
    """A module under construction, and what its functions share.

    Parameters
    ----------
    name : str
        Of the kernel.
    target : Target
        What it is compiled for.
    dtype, accum_dtype : str
        Of q, k and v, and of sums.
    functions : Functions
        The caller's own.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        dtype: str,
        accum_dtype: str,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        self.module, self.functions = ir.Module(name), functions
        self.target, self.dtype, self.accum_dtype = target, dtype, accum_dtype
        self._functions: dict[str, ir.Function] = {}

    def entry(self, name: str, task: Callable[..., None]) -> None:
        """Make the function that takes tasks: (params, counter, scratch).

        It returns where there are none left, or it has its quota: its caller can be interrupted.
        """
        kind = ir.FunctionType(ir.VoidType(), [POINTER] * 3)
        c = Code(ir.Function(self.module, kind, name), self.target, self.accum_dtype)
        block, counter, scratch = c.function.args
        p, b = Params(c, block), c.b
        tasks = p.tasks
        if self.target.dot:  # unusual numbers are for another target
            usual = b.icmp_signed("==", c.load(p.unusual, I64), i64(0))
            tasks = b.select(usual, tasks, i64(0))
        left = c.variable(I64, p.quota)
        take, work, done = (b.append_basic_block(n) for n in ("take", "work", "done"))
        tiles = self.target.dot == "amx"
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

    def function(self, name: str, kinds: list[Any], body: Callable[..., None]) -> ir.Function:
        """Return the function of this name, made from ``body(code, *arguments)`` at first."""
        if name not in self._functions:
            made = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), name)
            made.linkage = "internal"
            made.attributes.add("noinline")
            self._functions[name] = made
            c = Code(made, self.target, self.accum_dtype)
            body(c, *made.args)
            c.b.ret_void()
        return self._functions[name]
