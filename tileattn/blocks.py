"""Which query sees which key, by elements, by ranges and by blocks; and in what order blocks come.

Everything here is integer arithmetic. ``Band.visible`` and ``Sight.visible`` define the masks;
ranges, kinds and schedules follow from them and are tested against them by brute force.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.block_mask import FULL, PARTIAL, SKIP, BlockMask


class Tile(NamedTuple):
    """Queries ``q0`` to ``q1 - 1`` against keys ``k0`` to ``k1 - 1``, and the kind of the block."""

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


@dataclass(frozen=True, slots=True)
class Band:
    """The part of a mask that positions decide: length, causal and window.

    Query ``i`` stands at position ``p = i + offset`` on the key axis and sees key ``j`` where
    ``p - left <= j <= p + right`` and ``0 <= j < length``. Causal is ``right = 0``.

    Parameters
    ----------
    Nq, length : int
        Number of queries; keys at and past ``length`` are not seen.
    offset : int
        Position of query 0; may be negative.
    left, right : int or None
        Reach to each side, or None where that side is open.
    """

    Nq: int
    length: int
    offset: int
    left: int | None
    right: int | None

    def visible(self, i: Any, j: Any) -> Any:
        """Whether query ``i`` sees key ``j`` (integers or broadcastable integer arrays)."""
        p = i + self.offset
        seen = (j >= 0) & (j < self.length)
        if self.left is not None:
            seen = seen & (j >= p - self.left)
        if self.right is not None:
            seen = seen & (j <= p + self.right)
        return seen

    def keys_of(self, q0: int, q1: int) -> tuple[int, int]:
        """Smallest range ``[lo, hi)`` holding every key that queries q0 to q1 - 1 see."""
        lo = 0 if self.left is None else max(0, q0 + self.offset - self.left)
        hi = self.length
        if self.right is not None:
            hi = min(hi, q1 + self.offset + self.right)
        return (lo, hi) if q0 < q1 and lo < hi else (0, 0)

    def queries_of(self, k0: int, k1: int) -> tuple[int, int]:
        """Smallest range ``[lo, hi)`` holding every query that sees one of keys k0 to k1 - 1."""
        k1 = min(k1, self.length)
        lo = 0 if self.right is None else max(0, k0 - self.offset - self.right)
        hi = self.Nq
        if self.left is not None:
            hi = min(hi, k1 - self.offset + self.left)
        return (lo, hi) if k0 < k1 and lo < hi else (0, 0)

    def kind(self, q0: int, q1: int, k0: int, k1: int) -> int:
        """Kind of the block of queries q0 to q1 - 1 and keys k0 to k1 - 1."""
        lo, hi = self.keys_of(q0, q1)
        if max(lo, k0) >= min(hi, k1):
            return SKIP
        inside = k1 <= self.length
        if self.left is not None:
            inside = inside and k0 >= q1 - 1 + self.offset - self.left
        if self.right is not None:
            inside = inside and k1 - 1 <= q0 + self.offset + self.right
        return FULL if inside else PARTIAL


@dataclass(frozen=True, slots=True)
class Sight:
    """The whole mask of some heads of one batch entry: the band, a dense mask, a block mask.

    Parameters
    ----------
    band : Band
        What positions decide, the same for every head.
    Nk : int
        Number of keys.
    mask : array of bool, shape (heads or 1, Nq or 1, Nk or 1), or None
        True = seen.
    block_mask : BlockMask or None
        Whole blocks that are skipped.
    batch : int
        The batch entry, which the block mask is asked about.
    heads : slice
        The query heads, which the block mask is asked about.
    """

    band: Band
    Nk: int
    mask: NDArray[np.bool_] | None = None
    block_mask: BlockMask | None = None
    batch: int = 0
    heads: slice = field(default_factory=lambda: slice(0, 1))

    def visible(self, tile: Tile) -> NDArray[np.bool_]:
        """Whether each query of a tile sees each key.

        Parameters
        ----------
        tile : Tile
            Any tile inside the problem.

        Returns
        -------
        array of bool, shape (heads or 1, q1 - q0, k1 - k0)
            True = seen.
        """
        i = np.arange(tile.q0, tile.q1)[:, None]
        j = np.arange(tile.k0, tile.k1)
        seen: NDArray[np.bool_] = np.broadcast_to(self.band.visible(i, j), (1, i.size, j.size))
        if self.mask is not None:
            seen = seen & tile_of(self.mask, tile)
        if self.block_mask is not None:
            h = np.arange(self.heads.start, self.heads.stop)[:, None, None]
            seen = seen & self.block_mask.visible(self.batch, h, i, j)
        return seen

    def kind(self, q0: int, q1: int, k0: int, k1: int) -> int:
        """Kind of a block for all the heads together, without looking into the dense mask.

        Parameters
        ----------
        q0, q1, k0, k1 : int
            Queries q0 to q1 - 1, keys k0 to k1 - 1.

        Returns
        -------
        int
            ``SKIP`` only where no pair is seen, ``FULL`` only where every pair is.
        """
        kind = self.band.kind(q0, q1, k0, k1)
        if kind == SKIP or self.block_mask is None:
            return min(kind, PARTIAL) if self.mask is not None else kind
        sparse = self.block_mask.kind(self.batch, self.heads, q0, q1, k0, k1)
        if sparse == SKIP:
            return SKIP
        return FULL if kind == sparse == FULL and self.mask is None else PARTIAL

    def row_tiles(self, q0: int, q1: int, block_k: int) -> Iterator[Tile]:
        """Tiles that one query block visits, keys ascending.

        The key axis is cut at multiples of ``block_k`` and the ends are clipped to what is seen.

        Parameters
        ----------
        q0, q1 : int
            The query block.
        block_k : int
            Keys of a tile.

        Yields
        ------
        Tile
            Never of kind ``SKIP``.
        """
        lo, hi = self.band.keys_of(q0, q1)
        for start in range(lo - lo % block_k, hi, block_k):
            k0, k1 = max(start, lo), min(start + block_k, hi)
            kind = self.kind(q0, q1, k0, k1)
            if kind != SKIP:
                yield Tile(q0, q1, k0, k1, kind)

    def column_tiles(self, k0: int, k1: int, block_q: int) -> Iterator[Tile]:
        """Tiles that one key block visits, queries ascending: the transpose of ``row_tiles``.

        Parameters
        ----------
        k0, k1 : int
            The key block.
        block_q : int
            Queries of a tile.

        Yields
        ------
        Tile
            Never of kind ``SKIP``.
        """
        lo, hi = self.band.queries_of(k0, k1)
        k1 = min(k1, self.band.length)
        for start in range(lo - lo % block_q, hi, block_q):
            q0, q1 = max(start, lo), min(start + block_q, hi)
            kind = self.kind(q0, q1, k0, k1)
            if kind != SKIP:
                yield Tile(q0, q1, k0, k1, kind)


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
    for start in range(0, length, block):
        yield start, min(start + block, length)


def schedule(sight: Sight, block_q: int, block_k: int, order: str = "query") -> Iterator[Tile]:
    """Order in which the blocks of the score matrix are visited.

    Parameters
    ----------
    sight : Sight
        The mask.
    block_q, block_k : int
        Queries and keys of a block.
    order : {"query", "key"}
        What the outer loop runs over: query blocks (FlashAttention-2) or key blocks
        (FlashAttention, Algorithm 1).

    Yields
    ------
    Tile
        Every block in which some pair may be seen, exactly once.

    Raises
    ------
    ValueError
        Where ``order`` is neither.

    References
    ----------
    Dao et al., arXiv:2205.14135, Algorithm 1; Dao, arXiv:2307.08691, Algorithm 1.
    """
    if order == "query":
        for q0, q1 in cut(sight.band.Nq, block_q):
            yield from sight.row_tiles(q0, q1, block_k)
    elif order == "key":
        for k0, k1 in cut(sight.Nk, block_k):
            yield from sight.column_tiles(k0, k1, block_q)
    else:
        raise ValueError(f"order is {order!r}; 'query' and 'key' are accepted")


def sizes_for_memory(M: int, D: int) -> tuple[int, int]:
    """Block sizes of Algorithm 1 for a fast memory of ``M`` elements.

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
