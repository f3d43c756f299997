"""Compensated sums, whose rounding error does not grow with their length.

The rounding error of a plain float32 sum grows with its length. So kernels sum sections of up to
SECTION keys or queries, and add the sections as ``high + low``, where ``low`` collects the rounding
errors of ``high`` (Knuth's two-sum).

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
    """Return ``high + low``; only ``high`` if it is infinite or NaN."""
    lost = c.b.fcmp_unordered("uno", low, low)
    return c.b.select(lost, high, c.b.fadd(high, low))


class CompensatedSum:
    """A compensated sum of tiles: the sums in ``high``, their rounding errors in ``low``."""

    def __init__(self, c: Code, high: Tile, low: Tile) -> None:
        self._c, self._high, self._low = c, high, low

    def clear(self, rows: Any) -> None:
        """Set the sums to 0."""
        for tile in (self._high, self._low):
            tile.fill(rows, self._c.const(0.0))

    def add(self, row: Any, terms: Sequence[Any], factors: Sequence[Any] | None = None) -> None:
        """Multiply a row of the sums by factors, then add terms."""
        b, highs, lows = self._c.b, self._high.row(row), self._low.row(row)
        if factors is not None:
            highs, lows = (list(map(b.fmul, x, factors)) for x in (highs, lows))
        pairs = [two_sum(self._c, x, y) for x, y in zip(highs, terms, strict=True)]
        self._high.put(row, [total for total, _ in pairs])
        self._low.put(row, [b.fadd(x, e) for x, (_, e) in zip(lows, pairs, strict=True)])

    def value(self, row: Any) -> list[Any]:
        """Return a row of the rounded sums."""
        rows = zip(self._high.row(row), self._low.row(row), strict=True)
        return [settled(self._c, *pair) for pair in rows]
