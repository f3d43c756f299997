"""Online softmax: the state of some rows while keys come in tile by tile.

References
----------
Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867;
Dao, FlashAttention-2, arXiv:2307.08691, section 3.1.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.tile_mask import Seen

Array = NDArray[Any]


class Scratch:
    """Fast memory: named buffers that are allocated once and used again for every tile."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the buffer of this name, uninitialised, with a shape and dtype."""
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)


@dataclass(slots=True)
class RowState:
    """Softmax of some rows over the keys seen so far.

    Parameters
    ----------
    m : array, shape (..., M)
        Shift of the exponents: the running maximum of the scores, -inf before the first.
    l : array, shape (..., M)
        Sum of ``exp(score - m)``.
    acc : array, shape (..., M, Dv)
        Sum of ``exp(score - m) * value``.
    bounded : bool or array of bool, broadcastable to m
        Rows whose scores are known to be small: their ``m`` stays 0, and where that is every row,
        no maximum is taken.

    Notes
    -----
    For a tile of scores S and values V::

        m' = max(m, rowmax(S))
        P  = exp(S - m')
        l' = exp(m - m') * l + rowsum(P)
        acc' = exp(m - m') * acc + P V

    The state after all tiles does not depend on their order, up to rounding.
    """

    m: Array
    l: Array  # noqa: E741 - the letter of the papers
    acc: Array
    bounded: bool | Array = False

    @classmethod
    def empty(
        cls,
        rows: tuple[int, ...],
        Dv: int,
        dtype: np.dtype[Any],
        bounded: bool | Array = False,
        scratch: Scratch | None = None,
    ) -> "RowState":
        """State of rows that have seen nothing; the identity of ``merge``."""
        m = np.full(rows, -np.inf, dtype)
        if bounded is not False:
            m[...] = np.where(bounded, 0, m)
        acc = (scratch or Scratch()).take("acc", (*rows, Dv), dtype)
        acc.fill(0)
        return cls(m, np.zeros(rows, dtype), acc, bounded)

    @classmethod
    def of_result(cls, out: Array, lse: Array, dtype: np.dtype[Any]) -> "RowState":
        """State whose ``finish`` gives this output and logsumexp: m = lse and l = 1."""
        l = np.where(np.isneginf(lse), 0, 1).astype(dtype)  # noqa: E741 - as above
        weighted = np.where(l[..., None] > 0, out.astype(dtype), l.dtype.type(0))
        return cls(lse.astype(dtype), l, weighted)

    def rows(self, which: slice) -> "RowState":
        """View of some of the rows; what it absorbs, this state has absorbed."""
        return RowState(
            self.m[..., which], self.l[..., which], self.acc[..., which, :], self.bounded
        )

    def absorb(
        self,
        s: Array,
        v: Array,
        seen: Seen | None = None,
        keep: Array | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """Take in one tile.

        Parameters
        ----------
        s : array, shape (..., M, N)
            Scores; overwritten with the unnormalised probabilities.
        v : array, shape (..., N, Dv)
            Values.
        seen : Seen or None
            Which pairs are seen; None where all are.
        keep : array of bool, shape of s, or None
            Which probabilities dropout keeps in the weighted sum (never in ``l``).
        scratch : Scratch or None
            Where the tile's weighted sum is kept for a moment.
        """
        first = not self.l.any()
        if self.bounded is True:
            np.exp(s, out=s)
            if seen is not None:
                seen.hide(s, 0)
        else:
            if seen is not None:
                seen.hide(s, -np.inf)
            m = np.maximum(self.m, s.max(axis=-1))
            if self.bounded is not False:
                m = np.where(self.bounded, self.m, m)
            shift = _finite(m)
            np.subtract(s, shift[..., None], out=s)
            np.exp(s, out=s)
            if not first:
                rescale = np.exp(self.m - shift)
                self.l *= rescale
                self.acc *= rescale[..., None]
            self.m[...] = m
        total = s @ np.ones(s.shape[-1], s.dtype)
        if keep is not None:
            np.multiply(s, keep, out=s)
        if self.bounded is True:
            seen = None  # all that is in reach is finite
        if first:
            self.l[...] = total
            weigh(s, v, seen, self.acc)
        else:
            self.l += total
            tile = (scratch or Scratch()).take("weighted", self.acc.shape, self.acc.dtype)
            self.acc += weigh(s, v, seen, tile)

    def merge(self, other: "RowState") -> None:
        """Take in the state of the same rows over other keys.

        Parameters
        ----------
        other : RowState
            Left as it is.

        Notes
        -----
        Associative and commutative up to rounding, with ``empty`` as identity.
        """
        m = np.maximum(self.m, other.m)
        shift = _finite(m)
        mine, theirs = np.exp(self.m - shift), np.exp(other.m - shift)
        self.l *= mine
        self.l += other.l * theirs
        self.acc *= mine[..., None]
        self.acc += other.acc * theirs[..., None]
        self.m[...] = m

    def sink(self, logits: Array) -> None:
        """Let logits join the denominator: a state with ``l = 1`` and no values.

        Parameters
        ----------
        logits : array, broadcastable to m
            One for each head.
        """
        logits = logits.astype(self.m.dtype)
        m = np.maximum(self.m, logits)
        shift = _finite(m)
        mine = np.exp(self.m - shift)
        self.l *= mine
        self.l += np.exp(logits - shift)
        self.acc *= mine[..., None]  # no values: 0 times the weight of an infinite sink is NaN
        self.m[...] = m

    def finish(self, gain: float = 1.0, out: Array | None = None) -> tuple[Array, Array]:
        """Divide by the denominator.

        Parameters
        ----------
        gain : float
            ``1 / (1 - dropout_p)``.
        out : array, shape (..., M, Dv), or None
            Where the output is written; ``acc`` itself will do.

        Returns
        -------
        out : array, shape (..., M, Dv)
            The weighted mean of the values; 0 for rows that saw nothing.
        lse : array, shape (..., M)
            ``m + log(l)``; -inf for rows that saw nothing.
        """
        with np.errstate(divide="ignore"):
            lse = self.m + np.log(self.l)
        # A row that saw nothing keeps its 0, which times infinity would be NaN.
        least = self.l.dtype.type(gain * np.finfo(self.l.dtype).tiny)
        weight = self.l.dtype.type(gain) / np.maximum(self.l, least)
        return np.multiply(self.acc, weight[..., None], out=out), lse


def _finite(m: Array) -> Array:
    """Clip infinities, which cannot be subtracted from themselves, to the largest numbers."""
    largest = np.finfo(m.dtype).max
    clipped: Array = np.minimum(np.maximum(m, -largest), largest)
    return clipped


def weigh(p: Array, x: Array, seen: Seen | None, out: Array) -> Array:
    """Product ``p @ x`` in which hidden pairs never meet.

    Parameters
    ----------
    p : array, shape (..., M, N)
        Weights, 0 where hidden.
    x : array, shape (..., N, C)
        Rows to be summed.
    seen : Seen or None
        Which pairs are seen, with the axes of p; None where all are.
    out : array, shape (..., M, C)
        Where the product is written.

    Returns
    -------
    array, shape (..., M, C)
        ``out``.

    Notes
    -----
    A weight of 0 does not hide a NaN, for ``0 * NaN`` is NaN. Where some pair of a tile is hidden
    and the product is not finite, rows of x that are not finite are taken out of the product and
    added for the rows that see them.
    """
    np.matmul(p, x, out=out)
    if seen is None or np.isfinite(out.sum()):
        return out
    finite: Array = np.asarray(np.isfinite(x).all(axis=-1))
    np.matmul(p, np.where(finite[..., None], x, 0).astype(x.dtype, copy=False), out=out)
    bad, pairs = np.logical_not(finite), seen.whole()
    for j in np.flatnonzero(bad.reshape(-1, bad.shape[-1]).any(axis=0)):
        term = p[..., j, None] * x[..., None, j, :]
        out += np.where(pairs[..., j, None] & bad[..., None, None, j], term, 0)
    return out
