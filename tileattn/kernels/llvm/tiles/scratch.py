"""Scratch memory of a worker: hands out tiles, rows and words of bits, one after another."""

from typing import Any

from tileattn.kernels.llvm.instructions.code import Code, i64
from tileattn.kernels.llvm.tiles.bits import Bits
from tileattn.kernels.llvm.tiles.tile import Tile


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
