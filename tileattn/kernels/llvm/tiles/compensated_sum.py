"""Layout layer: long sums, whose rounding error does not grow with their length.

A sum of float32 over many tiles loses more the longer it is. So kernels sum up a section, of up to
SECTION keys or queries, and add sections up as ``high + low``, where ``low`` is what rounding took
from ``high`` (Knuth's two-sum).

References
----------
Ogita, Rump and Oishi, Accurate sum and dot product, SIAM J. Sci. Comput. 26, 2005.
"""

from collections.abc import Sequence
from typing import Any

from tileattn.kernels.llvm.instructions.code import Code
from tileattn.kernels.llvm.instructions.numerics import two_sum
from tileattn.kernels.llvm.tiles.tile import Tile


def settled(c: Code, high: Any, low: Any) -> Any:
    """Return ``high + low``; where ``high`` has become infinite or NaN, itself."""
    lost = c.b.fcmp_unordered("uno", low, low)
    return c.b.select(lost, high, c.b.fadd(high, low))


class CompensatedSum:
    """Sums of sections, a tile each of what is added.

    Parameters
    ----------
    c : Code
        Where instructions go.
    high, low : Tile
        Where the sums are.
    """

    def __init__(self, c: Code, high: Tile, low: Tile) -> None:
        self._c, self._high, self._low = c, high, low

    def clear(self, rows: Any) -> None:
        """Start without any section."""
        for tile in (self._high, self._low):
            tile.fill(rows, self._c.const(0.0))

    def add(self, row: Any, terms: Sequence[Any], factors: Sequence[Any] | None = None) -> None:
        """Multiply a row by factors, then add terms."""
        b, highs, lows = self._c.b, self._high.row(row), self._low.row(row)
        if factors is not None:
            highs, lows = (list(map(b.fmul, x, factors)) for x in (highs, lows))
        pairs = [two_sum(self._c, x, y) for x, y in zip(highs, terms, strict=True)]
        self._high.put(row, [total for total, _ in pairs])
        self._low.put(row, [b.fadd(x, e) for x, (_, e) in zip(lows, pairs, strict=True)])

    def value(self, row: Any) -> list[Any]:
        """Return a row of the sum of all sections."""
        rows = zip(self._high.row(row), self._low.row(row), strict=True)
        return [settled(self._c, *pair) for pair in rows]
