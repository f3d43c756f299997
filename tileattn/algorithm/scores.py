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
    """One modifier of the scores of a tile."""

    can_mask: ClassVar[bool] = False  # whether it may give -inf, which masks the pair out

    def apply(self, s: Array, tile: Tile) -> None:
        """Modify the scores of a tile in place."""

    def apply_with_grad(self, s: Array, tile: Tile) -> Array | None:
        """Do what ``apply`` does; return the derivative of new by old scores, None for 1."""
        self.apply(s, tile)
        return None


class Softcap(ScoreMod):
    """``s -> softcap * tanh(s / softcap)``, from Gemma 2, arXiv:2408.00118."""

    def __init__(self, softcap: float) -> None:
        self._softcap = softcap

    def apply(self, s: Array, tile: Tile) -> None:  # noqa: ARG002 - the protocol's argument
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


class ALiBi(ScoreMod):
    """``s -> s - slope * |p - j|``, slopes of (Hkv, G, 1, 1): Press et al., arXiv:2108.12409."""

    def __init__(self, slopes: Array, offset: int = 0) -> None:
        self._slopes = slopes
        self._offset = offset

    def apply(self, s: Array, tile: Tile) -> None:
        p = np.arange(tile.q0, tile.q1)[:, None] + self._offset
        distance = np.abs(p - np.arange(tile.k0, tile.k1)).astype(s.dtype)
        s -= self._slopes.astype(s.dtype) * distance


class Bias(ScoreMod):
    """``s -> s + bias``, a bias of shape (Hkv or 1, G or 1, Nq or 1, Nk or 1)."""

    can_mask: ClassVar[bool] = True

    def __init__(self, bias: Array) -> None:
        self._bias = bias

    def apply(self, s: Array, tile: Tile) -> None:
        s += tile_of(self._bias, tile).astype(s.dtype, copy=False)


class ScoreMods(tuple[ScoreMod, ...]):
    """The modifiers of some heads, in order; without any, the score is ``scale * q @ k.T``.

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
        """Make the modifiers of a call, in the order of the formula; None leaves one out."""
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
        """Turn scaled products of a tile, shape (Hkv, G, queries, keys), into scores, in place."""
        for mod in self:
            mod.apply(s, tile)

    def apply_with_grad(self, s: Array, tile: Tile) -> Array | None:
        """Do what ``apply`` does; return the derivative by the products, None for 1."""
        whole: Array | None = None
        for mod in self:
            grad = mod.apply_with_grad(s, tile)
            if grad is not None:
                whole = grad if whole is None else whole * grad
        return whole
