"""Terms of the score between the product of q and k and the softmax, with their derivatives."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.mask import Tile, tile_of


@dataclass(frozen=True, slots=True)
class Terms:
    """Softcap, ALiBi and bias of some heads of one batch entry.

    Parameters
    ----------
    softcap : float or None
        Cap of the scaled product.
    slopes : array, shape (Hkv, G, 1, 1), or None
        ALiBi slope for each head.
    bias : array, shape (Hkv or 1, G or 1, Nq or 1, Nk or 1), or None
        Added to the scores.
    offset : int
        Position of query 0 on the key axis.

    Notes
    -----
    The score of query i at position p = i + offset and key j is::

        s = softcap * tanh(scale * q_i . k_j / softcap) - slope * |p - j| + bias_ij

    References
    ----------
    ALiBi: Press et al., arXiv:2108.12409. Softcap: Gemma 2, arXiv:2408.00118.
    """

    softcap: float | None = None
    slopes: NDArray[Any] | None = None
    bias: NDArray[Any] | None = None
    offset: int = 0

    @property
    def plain(self) -> bool:
        """Whether the score is the scaled product and nothing else."""
        return self.softcap is None and self.slopes is None and self.bias is None

    def apply(self, s: NDArray[Any], tile: Tile) -> None:
        """Turn scaled products into scores, in place.

        Parameters
        ----------
        s : array, shape (Hkv, G, q1 - q0, k1 - k0)
            ``scale * q @ k.T`` of the tile; holds the scores afterwards.
        tile : Tile
            Which queries and keys.
        """
        if self.softcap is not None:
            cap = _tanh(s, self.softcap)
            s *= cap
        self._shift(s, tile)

    def apply_with_slope(self, s: NDArray[Any], tile: Tile) -> NDArray[Any] | None:
        """Do what ``apply`` does and return the derivative of the score by the scaled product.

        Parameters
        ----------
        s : array, shape (Hkv, G, q1 - q0, k1 - k0)
            As for ``apply``.
        tile : Tile
            Which queries and keys.

        Returns
        -------
        array of the shape of s, or None
            ``1 - tanh(s / softcap)**2``; None stands for 1.
        """
        slope = None
        if self.softcap is not None:
            cap = _tanh(s, self.softcap)
            slope = s * s
            np.subtract(np.asarray(1, s.dtype), slope, out=slope)
            s *= cap
        self._shift(s, tile)
        return slope

    def _shift(self, s: NDArray[Any], tile: Tile) -> None:
        if self.slopes is not None:
            p = np.arange(tile.q0, tile.q1)[:, None] + self.offset
            distance = np.abs(p - np.arange(tile.k0, tile.k1)).astype(s.dtype)
            s -= self.slopes.astype(s.dtype) * distance
        if self.bias is not None:
            s += tile_of(self.bias, tile).astype(s.dtype, copy=False)


def _tanh(s: NDArray[Any], softcap: float) -> Any:
    """Write ``tanh(s / cap)`` to s and return the cap.

    A cap that scores cannot tell from 0, or from none, stays within the range of the dtype, where
    the quotient is neither 0 / 0 nor below normal.
    """
    ends = np.finfo(s.dtype)
    cap = s.dtype.type(min(max(softcap, float(ends.tiny)), float(ends.max * ends.eps)))
    np.divide(s, cap, out=s)
    np.tanh(s, out=s)
    return cap
