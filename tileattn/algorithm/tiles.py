"""Tiles of the score matrix: cutting an axis into blocks, and the sizes of blocks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Tile(NamedTuple):
    """Queries ``q0`` to ``q1 - 1`` against keys ``k0`` to ``k1 - 1``, and the kind of the tile."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: int

    @property
    def queries(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        return slice(self.k0, self.k1)


def cut(length: int, block: int) -> Iterator[tuple[int, int]]:
    """Cut an axis into blocks; the last may be shorter."""
    return cut_between(0, length, block)


def cut_between(lo: int, hi: int, block: int) -> Iterator[tuple[int, int]]:
    """Cut the range ``[lo, hi)`` at the multiples of a block length."""
    for start in range(lo - lo % block, hi, block):
        yield max(start, lo), min(start + block, hi)


def tile_of(x: NDArray[Any], tile: Tile) -> NDArray[Any]:
    """View the tile's part of (..., Nq or 1, Nk or 1); axes of length 1 broadcast."""
    rows = tile.queries if x.shape[-2] > 1 else slice(None)
    keys = tile.keys if x.shape[-1] > 1 else slice(None)
    return x[..., rows, keys]


def sizes_for_memory(M: int, D: int) -> tuple[int, int]:
    """Return queries and keys of a block, ``(Br, Bc)``, for a fast memory of ``M`` elements.

    ``Bc = ceil(M / (4 D))`` and ``Br = min(Bc, D)``: a block each of q, k, v and out fit. Dao et
    al., arXiv:2205.14135, Algorithm 1, line 1.
    """
    Bc = max(1, -(-M // (4 * max(D, 1))))
    return min(Bc, max(D, 1)), Bc
