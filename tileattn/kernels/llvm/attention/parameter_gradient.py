"""Gradients of elements of ``aux``, as ``algorithm/parameter_gradient.py``.

The table at field ``aux`` ends with two numbers for each learned element: the address of the
array's gradient, in float64, and the offset of the task's private sums, or -1 if the task adds to
the array's gradient directly. A task adds its private sums at its end, after all earlier tasks.
"""

from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import I64, POINTER, Code, i64, same
from tileattn.kernels.llvm.instructions.kernel import Params
from tileattn.kernels.llvm.sizes import ROWS
from tileattn.kernels.llvm.tiles.scratch import Scratch
from tileattn.kernels.llvm.tiles.tile import Tile
from tileattn.kernels.llvm.user_functions import Functions, slots

_SUM = ir.DoubleType()
_BYTES = 8  # bytes of a sum, and of the index of an element


class ElementSums:
    """Sums of one task for the gradients of elements; the end of ``memory`` holds private ones."""

    def __init__(self, functions: Functions, c: Code, p: Params, memory: Scratch) -> None:
        first = slots(functions.aux) + len(functions.cells)
        tables = [c.at(p.aux, _BYTES * (first + 2 * n)) for n, _ in enumerate(functions.learned)]
        self._sums = [_Sums(c, table, memory) for table in tables]
        own = memory.rows(0, i64(0))
        for sums in self._sums:
            sums.place(own)

    @property
    def tiles(self) -> list[Tile]:
        """Derivatives of a tile's scores by the elements; later, dS times them."""
        return [sums.tile for sums in self._sums]

    def keep(self, r: Any, derivatives: list[list[Any]], elements: list[list[Any]]) -> None:
        """Store the derivatives of a row by its elements, and the indices of the elements."""
        for sums, by, numbers in zip(self._sums, derivatives, elements, strict=True):
            sums.tile.put(r, by)
            sums.number(r, numbers)

    def multiply(self, r: Any, ds: list[Any]) -> None:
        """Multiply the derivatives of a row by the gradient of its scores."""
        for tile in self.tiles:
            tile.put(r, list(map(tile.c.b.fmul, ds, tile.row(r))))

    def add(self, rows: Any, keys: Any) -> None:
        """Add one tile of ``rows`` rows and ``keys`` keys; earlier tasks are done with the rows."""
        for sums in self._sums:
            sums.add(rows, keys)

    def finish(self) -> None:
        """Add the private sums to the gradients; earlier tasks are done with all queries."""
        for sums in self._sums:
            sums.finish()


class _Sums:
    """Sums of one element; private sums cover the indices from ``first`` to ``stop``."""

    def __init__(self, c: Code, table: Any, memory: Scratch) -> None:
        self._c = c
        self.tile = memory.tile(ROWS)
        self._vectors = len(self.tile.vectors)
        self._columns = self._vectors * c.lanes
        self._numbers = memory.rows(ROWS, i64(self._columns * _BYTES // c.size))
        self._whole, self._at = c.load(table, POINTER), c.load(c.at(table, _BYTES), I64)
        self._first, self._stop = (c.variable(I64, i64(0)) for _ in range(2))
        self._alike = False

    def place(self, own: Any) -> None:
        """Set the address of the private sums."""
        self._own = self._c.at(own, self._at)

    def number(self, r: Any, numbers: list[Any]) -> None:
        """Store the indices of the elements of a row."""
        c = self._c
        self._alike = not any(isinstance(x.type, ir.VectorType) for x in numbers)
        for v, x in enumerate(numbers):
            wide = x if isinstance(x.type, ir.VectorType) else c.splat(x)
            c.store(wide, self._at_row(r, v))

    def add(self, rows: Any, keys: Any) -> None:
        c, b = self._c, self._c.b
        apart = b.icmp_signed(">=", self._at, i64(0))
        c.when(apart, lambda: self._reach(rows))
        sums = b.select(apart, self._own, self._whole)

        def add(number: Any, x: Any) -> None:
            to = c.at(sums, b.mul(number, i64(_BYTES)))
            wide = x if c.size == _BYTES else b.fpext(x, _SUM)
            c.store(b.fadd(c.load(to, _SUM), wide), to)

        def row(r: Any, _: Any) -> None:
            if self._alike:
                first, *others = self.tile.row(r)
                for x in others:
                    first = b.fadd(first, x)
                add(c.load(self._at_row(r), I64), c.sum(first))
                return

            def pair(j: Any, _: Any) -> None:
                number = c.load(c.at(self._at_row(r), b.mul(j, i64(_BYTES))), I64)
                add(number, c.load(c.at(self.tile.at(r), c.bytes_of(j)), c.scalar))

            c.loop(i64(0), keys, pair)

        c.loop(i64(0), rows, row)

    def finish(self) -> None:
        c, b = self._c, self._c.b

        def add(n: Any, _: Any) -> None:
            to, x = (c.at(start, b.mul(n, i64(_BYTES))) for start in (self._whole, self._own))
            c.store(b.fadd(c.load(to, _SUM), c.load(x, _SUM)), to)

        c.loop(b.load(self._first, typ=I64), b.load(self._stop, typ=I64), add)

    def _at_row(self, r: Any, v: int = 0) -> Any:
        c = self._c
        offset = c.b.mul(r, i64(self._columns * _BYTES))
        return c.at(self._numbers, offset, v * c.lanes * _BYTES)

    def _reach(self, rows: Any) -> None:
        """Set the private sums to 0 that this tile is the first to reach."""
        c, b = self._c, self._c.b
        kind = ir.VectorType(I64, c.lanes)

        def row(r: Any, ends: list[Any]) -> list[Any]:
            low, high = ends
            for v in range(self._vectors):
                x = c.load(self._at_row(r, v), kind)
                low, high = c.smaller(low, x), c.larger(high, x)
            return [low, high]

        most = (1 << 63) - 1
        ends = c.loop(i64(0), rows, row, [same(kind, most), same(kind, -1)])
        low, last = c.fold(ends[0], c.smaller), c.fold(ends[1], c.larger)
        high = b.add(last, i64(1))
        first, stop = (b.load(x, typ=I64) for x in (self._first, self._stop))
        none = b.icmp_signed("==", first, stop)
        first, stop = (b.select(none, low, x) for x in (first, stop))
        low, high = c.smaller(low, first), c.larger(high, stop)

        def clear(n: Any, _: Any) -> None:
            c.store(ir.Constant(_SUM, 0.0), c.at(self._own, b.mul(n, i64(_BYTES))))

        c.loop(low, first, clear)
        c.loop(stop, high, clear)
        b.store(low, self._first)
        b.store(high, self._stop)
