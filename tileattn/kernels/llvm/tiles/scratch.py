"""Bump allocation of tiles in the scratch memory of a worker."""

from typing import Any

from tileattn.kernels.llvm.instructions.code import Code, i64
from tileattn.kernels.llvm.tiles.bits import Bits
from tileattn.kernels.llvm.tiles.tile import Tile


class Scratch:
    """Scratch memory of a worker, aligned to a vector; tiles have rows of ``vectors`` vectors."""

    def __init__(self, c: Code, start: Any, vectors: int) -> None:
        self._c, self._next, self._vectors = c, start, vectors

    def tile(self, rows: Any) -> Tile:
        """Allocate a tile."""
        tile = Tile(self._c, self._next, self._vectors)
        self._next = tile.at(rows)
        return tile

    def rows(self, rows: int, columns: Any) -> Any:
        """Allocate rows of any number of columns; return their address."""
        start = self._next
        self._next = self._c.at(start, self._c.b.mul(columns, i64(rows * self._c.size)))
        return start

    def bits(self, rows: int) -> Bits:
        """Allocate a word of bits for each row of a tile."""
        start = self._next
        self._next = self._c.at(start, 8 * rows)
        return Bits(self._c, start, self._vectors)
