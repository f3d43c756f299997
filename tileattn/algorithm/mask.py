"""Which query sees which key, by elements, by ranges and by blocks; and in what order blocks come.

Everything here is integer arithmetic. ``Band.visible`` and ``Sight.visible`` define the masks;
ranges, kinds and schedules follow from them and are tested against them by brute force.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.block_mask import FULL, PARTIAL, SKIP, BlockMask
from tileattn.algorithm.tile_mask import Seen

_TALL = 256  # rows from which it pays to cut a tile that the band's boundary crosses


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

    def keys_of_all(self, q0: int, q1: int) -> tuple[int, int]:
        """Return the range ``[lo, hi)`` of the keys that each of queries q0 to q1 - 1 sees."""
        lo = 0 if self.left is None else max(0, q1 - 1 + self.offset - self.left)
        hi = self.length
        if self.right is not None:
            hi = min(hi, q0 + self.offset + self.right + 1)
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


@lru_cache(maxsize=16)
def _band_pairs(band: Band, columns: int) -> NDArray[np.bool_]:
    """Evaluate a band that starts at a tile; tiles along the diagonal ask for the same one."""
    pairs = band.visible(np.arange(band.Nq)[:, None], np.arange(columns))
    pairs = np.array(np.broadcast_to(pairs, (1, band.Nq, columns)))
    pairs.setflags(write=False)
    return pairs


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

    def seen(self, tile: Tile) -> Seen | None:
        """Which pairs of a tile are seen, or None where all are.

        Parameters
        ----------
        tile : Tile
            Any tile inside the problem.

        Returns
        -------
        Seen or None
            The part of the tile in which some pair may be hidden.
        """
        if tile.kind == FULL:
            return None
        k0, k1 = tile.k0, tile.k1
        if self.mask is None and self.block_mask is None:
            lo, hi = self.band.keys_of_all(tile.q0, tile.q1)
            if lo <= k0 < hi:
                k0 = min(hi, k1)
            elif lo < k1 <= hi:
                k1 = max(lo, k0)
        pairs = self.visible(tile._replace(k0=k0, k1=k1))
        return Seen(slice(k0 - tile.k0, k1 - tile.k0), pairs, tile.k1 - tile.k0)

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
        band = self.band
        length, offset = band.length - tile.k0, band.offset + tile.q0 - tile.k0
        rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
        here = Band(rows, min(length, columns), offset, band.left, band.right)
        seen = _band_pairs(here, columns)
        if self.mask is not None:
            seen = seen & tile_of(self.mask, tile)
        if self.block_mask is not None:
            h = np.arange(self.heads.start, self.heads.stop)[:, None, None]
            i = np.arange(tile.q0, tile.q1)[:, None]
            seen = seen & self.block_mask.visible(self.batch, h, i, np.arange(tile.k0, tile.k1))
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
        """Tiles that one query block visits, by ascending key blocks.

        Parameters
        ----------
        q0, q1 : int
            The query block.
        block_k : int
            Keys of a block.

        Yields
        ------
        Tile
            Never of kind ``SKIP``; within one key block.
        """
        for k0, k1 in cut_between(*self.band.keys_of(q0, q1), block_k):
            yield from self._tiles(q0, q1, k0, k1)

    def column_tiles(self, k0: int, k1: int, block_q: int) -> Iterator[Tile]:
        """Tiles that one key block visits, by ascending query blocks: transposed ``row_tiles``.

        Parameters
        ----------
        k0, k1 : int
            The key block.
        block_q : int
            Queries of a block.

        Yields
        ------
        Tile
            Never of kind ``SKIP``; within one query block.
        """
        for q0, q1 in cut_between(*self.band.queries_of(k0, k1), block_q):
            yield from self._tiles(q0, q1, k0, k1)

    def _tiles(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
        """Yield the block, a tall one on the boundary in two halves: less of them is hidden."""
        tall = q1 - q0 > _TALL and self.band.kind(q0, q1, k0, k1) == PARTIAL
        middle = (q0 + q1) // 2
        for r0, r1 in ((q0, middle), (middle, q1)) if tall else ((q0, q1),):
            lo, hi = self.band.keys_of(r0, r1)
            yield from self._by_kind(r0, r1, max(k0, lo), min(k1, hi))

    def _by_kind(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
        """Yield the block, or the runs of blocks of one kind that a block mask cuts it into."""
        if self.block_mask is None:
            kind = self.kind(q0, q1, k0, k1)
            if kind != SKIP:
                yield Tile(q0, q1, k0, k1, kind)
            return
        block_q, block_k = self.block_mask.block_size
        for r0, r1 in cut_between(q0, q1, block_q):
            run: Tile | None = None
            for c0, c1 in cut_between(k0, k1, block_k):
                kind = self.kind(r0, r1, c0, c1)
                if run is not None and run.kind == kind:
                    run = run._replace(k1=c1)
                    continue
                if run is not None and run.kind != SKIP:
                    yield run
                run = Tile(r0, r1, c0, c1, kind)
            if run is not None and run.kind != SKIP:
                yield run


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
