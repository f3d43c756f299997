"""Tiles of the score matrix: how an axis is cut, and in what order the tiles come."""

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
        """The queries, as a slice."""
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        """The keys, as a slice."""
        return slice(self.k0, self.k1)


def cut(length: int, block: int) -> Iterator[tuple[int, int]]:
    """Cut an axis into blocks.

    Parameters
    ----------
    length, block : int
        Length of the axis and of a block; the last block may be shorter.

    Yields
    ------
    (int, int)
        First index and one past the last.
    """
    return cut_between(0, length, block)


def cut_between(lo: int, hi: int, block: int) -> Iterator[tuple[int, int]]:
    """Cut a range at the multiples of a block length.

    Parameters
    ----------
    lo, hi : int
        The range ``[lo, hi)``.
    block : int
        Length of a block.

    Yields
    ------
    (int, int)
        First index and one past the last of every part, none of which crosses a multiple.
    """
    for start in range(lo - lo % block, hi, block):
        yield max(start, lo), min(start + block, hi)


def tile_of(x: NDArray[Any], tile: Tile) -> NDArray[Any]:
    """View the part of an array that belongs to a tile; axes of length 1 are left to broadcast.

    Parameters
    ----------
    x : array, shape (..., Nq or 1, Nk or 1)
        A mask or a bias.
    tile : Tile
        The tile.

    Returns
    -------
    array, shape (..., q1 - q0 or 1, k1 - k0 or 1)
        A view.
    """
    rows = tile.queries if x.shape[-2] > 1 else slice(None)
    keys = tile.keys if x.shape[-1] > 1 else slice(None)
    return x[..., rows, keys]


def sizes_for_memory(M: int, D: int) -> tuple[int, int]:
    """Block sizes of FlashAttention's Algorithm 1 for a fast memory of ``M`` elements.

    Parameters
    ----------
    M : int
        Elements that fit in fast memory.
    D : int
        Head dimension.

    Returns
    -------
    (int, int)
        ``(Br, Bc)``, queries and keys of a block.

    Notes
    -----
    ``Bc = ceil(M / (4 D))`` and ``Br = min(Bc, D)``: a block each of q, k, v and out fit.

    References
    ----------
    Dao et al., arXiv:2205.14135, Algorithm 1, line 1.
    """
    Bc = max(1, -(-M // (4 * max(D, 1))))
    return min(Bc, max(D, 1)), Bc
