"""The attention mask of one tile."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TileMask:
    """The visible pairs of a tile, stored only for the keys at the boundary of the mask."""

    keys: slice  # keys of the tile that some query may not attend to
    pairs: NDArray[np.bool_]  # (..., M, keys), True = visible; all pairs of other keys are visible
    N: int
    is_transposed: bool = False  # whether dense() has keys before queries

    @classmethod
    def of(cls, pairs: NDArray[np.bool_]) -> "TileMask":
        """Return the mask of a tile from all its pairs, shape (..., M, N)."""
        return cls(slice(0, pairs.shape[-1]), pairs, pairs.shape[-1])

    def masked_fill(self, x: NDArray[Any], value: float) -> None:
        """Write a value to the masked-out pairs of ``x``, shape (..., M, N)."""
        np.copyto(x[..., self.keys], value, where=~self.pairs)

    def dense(self) -> NDArray[np.bool_]:
        """Return all pairs of the tile, shape (..., M, N), or (..., N, M) if transposed."""
        dense = np.ones((*self.pairs.shape[:-1], self.N), np.bool_)
        dense[..., self.keys] = self.pairs
        return dense.swapaxes(-1, -2) if self.is_transposed else dense

    def within(self, keys: slice, N: int) -> "TileMask":
        """Return this mask for a tile of N keys, in which this tile has the place ``keys``."""
        first, stop = (keys.start + n for n in (self.keys.start, self.keys.stop))
        return replace(self, keys=slice(first, stop), N=N)

    def transposed(self) -> "TileMask":
        """Return the same pairs, with keys before queries."""
        return replace(self, is_transposed=not self.is_transposed)


def above_minus_infinity(s: NDArray[Any], visible: TileMask | None) -> TileMask | None:
    """Mask out the pairs with a score of -inf, from a bias or a score_mod."""
    above = s != -np.inf
    if above.all():
        return visible
    return TileMask.of(above if visible is None else above & visible.dense())
