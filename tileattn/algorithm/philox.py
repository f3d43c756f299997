"""Counter-based random numbers for dropout: Philox-4x32-10 of (batch, head, query, key).

A bit of the mask is a pure function of the seed and the four indices, so it does not depend on the
backend, the tile size or the order of the tiles. One call of the generator
gives four 32-bit words, for the four elements ``{i, i + 8} x {j, j + 8}`` of a 16 x 16 tile:

* counter: ``(j // 16 * 8 + j % 8, i // 16 * 8 + i % 8, head, batch)``,
* key: ``(seed mod 2**32, seed // 2**32)``,
* word: ``2 * (i // 8 % 2) + j // 8 % 2``,

for query ``i`` and key ``j``. An element is kept if its word is at least
``floor(dropout_p * 2**32)``.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.call.scalars import dropout_of, seed_of
from tileattn.validation import lengths_of

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as 32-bit fractions
_ROUNDS = 10
_WORD = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(32)
_CHUNK = 8192  # counters evaluated at a time: 400 KB of state, which stays in the L2 cache

Words = NDArray[np.uint64]
"""32-bit words, each in the low half of 64 bits: a product of two of them then fits."""


def philox4x32(
    counter: Sequence[Any], key: tuple[int, int]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Encrypt counters, four words that broadcast, with ten rounds of Philox-4x32.

    With ``hi`` and ``lo`` the halves of a 64-bit product, one round is::

        c0, c1, c2, c3 = hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)

    A Weyl sequence moves the key between rounds.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Examples
    --------
    >>> [f"{int(word):08x}" for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    words = [np.asarray(word, np.uint32).astype(np.uint64) for word in counter]
    even, odd = _encrypt(words, key)
    c0, c2 = even.astype(np.uint32)
    c1, c3 = odd.astype(np.uint32)
    return c0, c1, c2, c3


def keep_tile(
    seed: int,
    dropout_p: float,
    batch: int,
    heads: NDArray[np.integer[Any]],
    q_lo: int,
    q_hi: int,
    k_lo: int,
    k_hi: int,
) -> NDArray[np.bool_]:
    """Return the elements of one tile that dropout keeps: (heads, q_hi - q_lo, k_hi - k_lo).

    The generator runs on the smallest range of whole 16 x 16 tiles around the tile, with 8 x 8
    counters for each.
    """
    shape = (len(heads), q_hi - q_lo, k_hi - k_lo)
    threshold = np.uint64(int(dropout_p * 2**32))
    if threshold == 0 or 0 in shape:
        return np.ones(shape, np.bool_)
    rows, columns = _whole_tiles(q_lo, q_hi), _whole_tiles(k_lo, k_hi)
    # (head, tile row, i // 8 % 2, i % 8, tile column, j // 8 % 2): the eight booleans of j % 8 make
    # one 64-bit element, so that the four words are interleaved eight booleans at a time.
    kept = np.empty((len(heads), len(rows), 2, 8, len(columns), 2), np.uint64)
    j = _counters(columns)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    for some_heads, some_rows in _pieces(len(heads), len(rows), j.size * 8):
        i = _counters(rows[some_rows])[:, np.newaxis]
        head = np.asarray(heads[some_heads]).astype(np.uint64)[:, np.newaxis, np.newaxis]
        even_odd = _encrypt([j, i, head, np.array(batch, np.uint64)], key)
        for k_bit, words in enumerate(even_odd):
            eights = (words >= threshold).view(np.uint64)
            for q_bit in range(2):
                part = kept[some_heads, some_rows, q_bit, :, :, k_bit]
                part[...] = eights[q_bit].reshape(part.shape)
    dense = kept.view(np.bool_).reshape(len(heads), len(rows) * 16, len(columns) * 16)
    i0, j0 = q_lo - rows.start * 16, k_lo - columns.start * 16
    return dense[:, i0 : i0 + shape[1], j0 : j0 + shape[2]]


def dropout_mask(
    shape: tuple[int, int, int, int], dropout_p: float, seed: int
) -> NDArray[np.bool_]:
    """Which elements of the probabilities dropout keeps, for a whole problem.

    Parameters
    ----------
    shape : (int, int, int, int)
        ``(B, Hq, Nq, Nk)``.
    dropout_p : float
        Probability of dropping an element, ``0 <= dropout_p < 1``.
    seed : int
        Seed, ``0 <= seed < 2**64``.

    Returns
    -------
    array of bool, shape (B, Hq, Nq, Nk)
        True = kept. Attention divides kept probabilities by ``1 - dropout_p``.

    Raises
    ------
    TypeError
        If ``shape`` is not four integers, ``dropout_p`` not a real number or ``seed`` not an
        integer.
    ValueError
        If a length is negative, or ``dropout_p`` or ``seed`` out of range.

    Examples
    --------
    >>> dropout_mask((1, 1, 2, 6), 0.5, seed=7).astype(int)
    array([[[[1, 0, 0, 0, 0, 0],
             [0, 0, 1, 0, 1, 0]]]])
    """
    B, Hq, Nq, Nk = lengths_of("shape", shape)
    dropout_p, seed = dropout_of(dropout_p), seed_of(seed)
    heads = np.arange(Hq)
    kept = np.empty((B, Hq, Nq, Nk), np.bool_)
    for b in range(B):
        kept[b] = keep_tile(seed, dropout_p, b, heads, 0, Nq, 0, Nk)
    return kept


def _encrypt(counter: Sequence[Words], key: tuple[int, int]) -> tuple[Words, Words]:
    """Run the ten rounds; return the words ``(c0, c2)`` and ``(c1, c3)``, each pair stacked."""
    keys = [
        [np.uint64((k + r * step) & 0xFFFFFFFF) for k, step in zip(key, _WEYL, strict=True)]
        for r in range(_ROUNDS)
    ]
    m0, m1 = map(np.uint64, _MULTIPLIERS)
    c0, c1, c2, c3 = counter
    # Counters that broadcast need two rounds until every word depends on all of them; those two are
    # made at the size of the parts.
    for k0, k1 in keys[:2]:
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (
            (p1 >> _BITS) ^ (c1 ^ k0),
            p1 & _WORD,
            (p0 >> _BITS) ^ (c3 ^ k1),
            p0 & _WORD,
        )
    shape = np.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    # One allocation: three of their own can land a few bytes apart modulo 4096, and then every load
    # waits for a store that it only seems to depend on (two to four times slower, measured).
    even, odd, crossed = np.empty((3, 2, *shape), np.uint64)
    (even0, even1), (odd0, odd1), (cross0, cross1) = map(_halves, (even, odd, crossed))
    even0[...], odd0[...], even1[...], odd1[...] = c0, c1, c2, c3
    for k0, k1 in keys[2:]:
        np.multiply(even1, m1, out=cross0)
        np.multiply(even0, m0, out=cross1)
        np.right_shift(crossed, _BITS, out=even)
        even ^= odd
        even0 ^= k0
        even1 ^= k1
        np.bitwise_and(crossed, _WORD, out=odd)
    return even, odd


def _halves(pair: Words) -> tuple[Words, Words]:
    """Split into two views; the ellipsis keeps them arrays where a counter is one number."""
    return pair[0, ...], pair[1, ...]


def _whole_tiles(lo: int, hi: int) -> range:
    return range(lo // 16, -(-hi // 16))


def _counters(tiles: range) -> Words:
    return np.arange(tiles.start * 8, tiles.stop * 8, dtype=np.uint64)


def _pieces(heads: int, rows: int, counters_per_row: int) -> Iterator[tuple[slice, slice]]:
    """Cut heads and tile rows so that the state of the generator stays in cache."""
    row_step = max(1, min(rows, _CHUNK // counters_per_row))
    head_step = max(1, _CHUNK // (row_step * counters_per_row))
    for h in range(0, heads, head_step):
        for r in range(0, rows, row_step):
            yield slice(h, h + head_step), slice(r, r + row_step)
