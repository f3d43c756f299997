"""The pairs of partial blocks: an expression, or stored bits. Arrays of a caller are not kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.nodes import INDICES
from tileattn.expressions.parameters import Expression

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Kinds of a block: no, some or all pairs are visible. Combining masks relies on the order."""

Pairs = Callable[[Any, Any, Any, Any], Any]
"""``pairs(b, h, i, j)`` says whether query i attends to key j."""

_PAIRS_AT_ONCE = 1 << 20  # pairs of undecided blocks; each index array takes 8 MB


@dataclass(frozen=True)
class Traced:
    """Pairs of a traced predicate."""

    visible: Expression

    def __call__(self, *indices: Any) -> NDArray[np.bool_]:
        """Evaluate the expression."""
        inputs = dict(zip(INDICES, map(np.asarray, indices), strict=True))
        node, dtype = self.visible.node, np.dtype(np.float64)
        return evaluate([node], inputs, (), dtype, self.visible.constants)[0]


@dataclass(frozen=True, eq=False)
class Stored:
    """Pairs of partial blocks, one bit each.

    Parameters
    ----------
    slots : array of int32, shape (B, Hq, blocks of queries, blocks of keys)
        Index in ``bits`` of each partial block.
    bits : array of uint8, shape (partial blocks, bq, ceil(bk / 8))
        Made by ``numpy.packbits``.
    block_size : (int, int)
        Queries and keys of a block.
    """

    slots: NDArray[np.int32]
    bits: NDArray[np.uint8]
    block_size: tuple[int, int]

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> NDArray[np.bool_]:
        """Look up bits; pairs outside partial blocks have arbitrary ones."""
        bq, bk = self.block_size
        i, j = np.asarray(i), np.asarray(j)
        column = j % bk
        byte = self.bits[self.slots[b, h, i // bq, j // bk], i % bq, column >> 3]
        return np.asarray(byte & (128 >> (column & 7)).astype(np.uint8) != 0)

    def __invert__(self) -> "Stored":
        return Stored(self.slots, ~self.bits, self.block_size)


class Recorder:
    """Stores the pairs of partial blocks during classification."""

    def __init__(self, kinds: NDArray[np.int8], block_size: tuple[int, int]) -> None:
        self._slots = np.zeros(kinds.shape, np.int32)
        self._bits: list[NDArray[np.uint8]] = []
        self._count = 0
        self._block_size = block_size

    def keep(self, place: tuple[NDArray[Any], ...], pairs: NDArray[np.bool_]) -> None:
        """Store the pairs (blocks, bq, bk) of the blocks at ``place``."""
        if len(pairs):
            self._slots[place] = np.arange(self._count, self._count + len(pairs))
            self._bits.append(np.packbits(pairs, axis=-1))
            self._count += len(pairs)

    def pairs(self) -> Stored | None:
        """Return the stored pairs; None without partial blocks."""
        if not self._bits:
            return None
        return Stored(self._slots, np.concatenate(self._bits), self._block_size)


def decide(
    kinds: NDArray[np.int8],
    pairs: Pairs,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    which: NDArray[np.bool_],
) -> Stored | None:
    """Classify the chosen blocks by their pairs; return the pairs of the partial ones."""
    (bq, bk), (Nq, Nk) = block_size, lengths
    undecided, recorder = np.nonzero(which), Recorder(kinds, block_size)
    step = max(1, _PAIRS_AT_ONCE // (bq * bk))
    for lo in range(0, len(undecided[0]), step):
        part = tuple(x[lo : lo + step] for x in undecided)
        b, h, row, column = (x[:, None, None] for x in part)
        # Repeat the last query or key past the end: repetition does not change a kind.
        i = np.minimum(row * bq + np.arange(bq)[:, None], Nq - 1)
        j = np.minimum(column * bk + np.arange(bk), Nk - 1)
        found = np.broadcast_to(pairs(b, h, i, j), (len(b), bq, bk))
        some, every = found.any(axis=(1, 2)), found.all(axis=(1, 2))
        kinds[part] = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
        mixed = some & ~every
        recorder.keep(tuple(x[mixed] for x in part), found[mixed])
    return recorder.pairs()
