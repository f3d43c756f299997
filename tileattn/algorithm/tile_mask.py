"""Which pairs of a tile are seen."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Seen:
    """Which pairs of a tile are seen, kept for the keys at the boundary only.

    Parameters
    ----------
    keys : slice
        Keys of the tile, counted from its first, that not every query sees.
    pairs : array of bool, shape (..., M, length of keys)
        True = seen; the pairs of all other keys are.
    N : int
        Keys of the tile.
    turned : bool
        Whether ``whole`` has keys before queries.
    """

    keys: slice
    pairs: NDArray[np.bool_]
    N: int
    turned: bool = False

    @classmethod
    def of(cls, pairs: NDArray[np.bool_]) -> "Seen":
        """Take all pairs of a tile, shape (..., M, N)."""
        return cls(slice(0, pairs.shape[-1]), pairs, pairs.shape[-1])

    def hide(self, x: NDArray[Any], value: float) -> None:
        """Write a value to the hidden pairs of ``x``, of shape (..., M, N)."""
        np.copyto(x[..., self.keys], value, where=~self.pairs)

    def whole(self) -> NDArray[np.bool_]:
        """Write out all pairs of the tile, shape (..., M, N), or (..., N, M) where turned."""
        whole = np.ones((*self.pairs.shape[:-1], self.N), np.bool_)
        whole[..., self.keys] = self.pairs
        return whole.swapaxes(-1, -2) if self.turned else whole

    def transposed(self) -> "Seen":
        """Return the same pairs, with keys before queries."""
        return replace(self, turned=not self.turned)
