"""Score modifiers: what turns ``scale * q @ k.T`` into scores, with their derivatives.

A modifier is one class here, one function in ``score_mod.cuh`` and one line in ``ScoreMods.of``.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.tiles import Tile, tile_of

Array = NDArray[Any]


class ScoreMod(Protocol):
    """One modifier of the scores of a tile.

    Attributes
    ----------
    can_mask : bool
        Whether it may give a score of -inf, which masks the pair out.
    """

    can_mask: ClassVar[bool]

    def apply(self, s: Array, tile: Tile) -> None:
        """Modify the scores of a tile in place."""

    def apply_with_grad(self, s: Array, tile: Tile) -> Array | None:
        """Do what ``apply`` does; return the derivative of new by old scores, None for 1."""


class Softcap:
    """``s -> softcap * tanh(s / softcap)``, from Gemma 2, arXiv:2408.00118.

    Parameters
    ----------
    softcap : float
        Bound of the scores.
    """

    can_mask: ClassVar[bool] = False

    def __init__(self, softcap: float) -> None:
        self._softcap = softcap

    def apply(self, s: Array, tile: Tile) -> None:  # noqa: ARG002 - the protocol's argument
        """Cap the scores."""
        cap = self._tanh(s)
        s *= cap

    def apply_with_grad(self, s: Array, tile: Tile) -> Array:  # noqa: ARG002 - as above
        """Cap the scores; return ``1 - tanh(s / softcap)**2``."""
        cap = self._tanh(s)
        grad = s * s
        np.subtract(np.asarray(1, s.dtype), grad, out=grad)
        s *= cap
        return grad

    def _tanh(self, s: Array) -> Any:
        """Write ``tanh(s / cap)`` to s and return the cap.

        A cap that scores cannot tell from 0, or from none, stays within the range of the dtype,
        where the quotient is neither 0 / 0 nor below normal.
        """
        ends = np.finfo(s.dtype)
        cap = s.dtype.type(min(max(self._softcap, float(ends.tiny)), float(ends.max * ends.eps)))
        np.divide(s, cap, out=s)
        np.tanh(s, out=s)
        return cap


class ALiBi:
    """``s -> s - slope * |p - j|``, from Press et al., arXiv:2108.12409.

    Parameters
    ----------
    slopes : array, shape (Hkv, G, 1, 1)
        One for each head.
    offset : int
        Position of query 0 on the key axis.
    """

    can_mask: ClassVar[bool] = False

    def __init__(self, slopes: Array, offset: int = 0) -> None:
        self._slopes = slopes
        self._offset = offset

    def apply(self, s: Array, tile: Tile) -> None:
        """Subtract the distances, times the slope."""
        p = np.arange(tile.q0, tile.q1)[:, None] + self._offset
        distance = np.abs(p - np.arange(tile.k0, tile.k1)).astype(s.dtype)
        s -= self._slopes.astype(s.dtype) * distance

    def apply_with_grad(self, s: Array, tile: Tile) -> None:
        """Do what ``apply`` does; the derivative is 1."""
        self.apply(s, tile)


class Bias:
    """``s -> s + bias``.

    Parameters
    ----------
    bias : array, shape (Hkv or 1, G or 1, Nq or 1, Nk or 1)
        What is added.
    """

    can_mask: ClassVar[bool] = True

    def __init__(self, bias: Array) -> None:
        self._bias = bias

    def apply(self, s: Array, tile: Tile) -> None:
        """Add the bias of the tile."""
        s += tile_of(self._bias, tile).astype(s.dtype, copy=False)

    def apply_with_grad(self, s: Array, tile: Tile) -> None:
        """Do what ``apply`` does; the derivative is 1."""
        self.apply(s, tile)


class ScoreMods(tuple[ScoreMod, ...]):
    """The modifiers of some heads, in order; without any, the score is ``scale * q @ k.T``.

    Notes
    -----
    The score of query i at position p = i + offset and key j is::

        s = softcap * tanh(scale * q_i . k_j / softcap) - slope * |p - j| + bias_ij
    """

    __slots__ = ()

    @classmethod
    def of(
        cls,
        softcap: float | None = None,
        slopes: Array | None = None,
        bias: Array | None = None,
        offset: int = 0,
    ) -> "ScoreMods":
        """Make the modifiers of a call; None leaves one out.

        Parameters
        ----------
        softcap : float or None
            Of ``Softcap``.
        slopes : array, shape (Hkv, G, 1, 1), or None
            Of ``ALiBi``.
        bias : array, shape (Hkv or 1, G or 1, Nq or 1, Nk or 1), or None
            Of ``Bias``.
        offset : int
            Position of query 0 on the key axis.

        Returns
        -------
        ScoreMods
            In the order of the formula.
        """
        mods: Iterable[ScoreMod | None] = (
            None if softcap is None else Softcap(softcap),
            None if slopes is None else ALiBi(slopes, offset),
            None if bias is None else Bias(bias),
        )
        return cls(mod for mod in mods if mod is not None)

    @property
    def can_mask(self) -> bool:
        """Whether a score may be -inf, which masks its pair out."""
        return any(mod.can_mask for mod in self)

    def apply(self, s: Array, tile: Tile) -> None:
        """Turn scaled products into scores, in place.

        Parameters
        ----------
        s : array, shape (Hkv, G, q1 - q0, k1 - k0)
            ``scale * q @ k.T`` of the tile; holds the scores afterwards.
        tile : Tile
            Which queries and keys.
        """
        for mod in self:
            mod.apply(s, tile)

    def apply_with_grad(self, s: Array, tile: Tile) -> Array | None:
        """Do what ``apply`` does and return the derivative of the scores by the products.

        Parameters
        ----------
        s : array, shape (Hkv, G, q1 - q0, k1 - k0)
            As for ``apply``.
        tile : Tile
            Which queries and keys.

        Returns
        -------
        array of the shape of s, or None
            The product of all derivatives; None stands for 1.
        """
        whole: Array | None = None
        for mod in self:
            grad = mod.apply_with_grad(s, tile)
            if grad is not None:
                whole = grad if whole is None else whole * grad
        return whole
