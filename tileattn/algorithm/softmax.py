"""Online softmax: the state of some rows while keys come in tile by tile.

References
----------
Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867;
Dao, FlashAttention-2, arXiv:2307.08691, section 3.1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.tile_mask import TileMask

Array = NDArray[Any]


@dataclass(slots=True)
class RowState:
    """Softmax of some rows over the keys so far.

    For a tile of scores S and values V::

        m'   = max(m, rowmax(S))
        P    = exp(S - m')
        l'   = exp(m - m') * l + rowsum(P)
        acc' = exp(m - m') * acc + P V

    The state after all tiles does not depend on their order, up to rounding.
    """

    m: Array  # (..., M), running maximum of the scores, -inf before the first
    l: Array  # noqa: E741 - the letter of the papers
    acc: Array  # (..., M, Dv), sum of exp(score - m) * value

    @classmethod
    def empty(cls, rows: tuple[int, ...], Dv: int, dtype: np.dtype[Any]) -> "RowState":
        """State of rows without any keys; the identity of ``merge``."""
        return cls(
            np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((*rows, Dv), dtype)
        )

    @classmethod
    def of_result(cls, out: Array, lse: Array, dtype: np.dtype[Any]) -> "RowState":
        """Return a state whose ``finalize`` returns this output and logsumexp: m = lse and l = 1.

        If lse is wider than ``dtype``, its rounding error goes into l.
        """
        with np.errstate(all="ignore"):  # of infinities, which keep their place in m
            m = lse.astype(dtype)
            rest = np.where(np.isfinite(m), lse - m, 0)
            l = np.where(np.isneginf(lse), 0, np.exp(rest)).astype(dtype)  # noqa: E741 - as above
            weighted = out.astype(dtype)
            weighted *= l[..., None]
        weighted[l == 0] = 0  # whatever the output of a row without keys holds
        return cls(m, l, weighted)

    def rows(self, which: slice) -> "RowState":
        """View of some of the rows; updating it updates this state."""
        return RowState(self.m[..., which], self.l[..., which], self.acc[..., which, :])

    def update(
        self, s: Array, v: Array, visible: TileMask | None = None, weights: Array | None = None
    ) -> None:
        """Take in one tile of scores (..., M, N), which are overwritten, and values (..., N, Dv).

        ``weights`` multiply the probabilities in the weighted sum, never in ``l``: 0 where dropout
        drops, and descales of quantised values.
        """
        if visible is not None:
            visible.masked_fill(s, -np.inf)
        m = np.maximum(self.m, s.max(axis=-1))
        p = np.exp(s - finite(m)[..., None])
        rescale = np.exp(self.m - finite(m))
        self.l[...] = rescale * self.l + p.sum(axis=-1)
        p = p if weights is None else p * weights
        self.acc[...] = rescale[..., None] * self.acc + masked_matmul(p, v, visible)
        self.m[...] = m

    def merge(self, other: "RowState") -> None:
        """Merge the state of the same rows over other keys.

        Associative and commutative up to rounding, with ``empty`` as identity.
        """
        m = np.maximum(self.m, other.m)
        shift = finite(m)
        mine, theirs = np.exp(self.m - shift), np.exp(other.m - shift)
        self.l *= mine
        self.l += other.l * theirs
        self.acc *= mine[..., None]
        self.acc += other.acc * theirs[..., None]
        self.m[...] = m

    def sink(self, logits: Array) -> None:
        """Add sink logits to the denominator: a state with ``l = 1`` and no values."""
        logits = logits.astype(self.m.dtype)
        m = np.maximum(self.m, logits)
        shift = finite(m)
        mine = np.exp(self.m - shift)
        self.l *= mine
        self.l += np.exp(logits - shift)
        self.acc *= mine[..., None]  # no values: 0 times the weight of an infinite sink is NaN
        self.m[...] = m

    def finalize(self, dropout_scale: float = 1.0, out: Array | None = None) -> tuple[Array, Array]:
        """Divide by the denominator; rows without a key have output 0 and logsumexp -inf.

        The output is written to ``out``, which may be ``acc``, or to a new array.
        """
        with np.errstate(divide="ignore"):
            lse = self.m + np.log(self.l)
        # A row without a key keeps its 0, which times infinity would be NaN.
        least = self.l.dtype.type(dropout_scale * np.finfo(self.l.dtype).tiny)
        weight = self.l.dtype.type(dropout_scale) / np.maximum(self.l, least)
        return np.multiply(self.acc, weight[..., None], out=out), lse


def finite(m: Array) -> Array:
    """Clip infinities, which cannot be subtracted from themselves, to the largest numbers."""
    largest = np.finfo(m.dtype).max
    clipped: Array = np.minimum(np.maximum(m, -largest), largest)
    return clipped


def masked_matmul(p: Array, x: Array, visible: TileMask | None, out: Array | None = None) -> Array:
    """Product ``p @ x`` in which masked-out pairs, where p is 0, never meet.

    A weight of 0 does not mask out a NaN, for ``0 * NaN`` is NaN. If a tile has masked-out pairs
    and the product is not finite, rows of x that are not finite are taken out of the product and
    added for the rows that attend to them.
    """
    out = np.matmul(p, x, out=out)
    if visible is None or np.isfinite(out.sum()):
        return out
    finite: Array = np.asarray(np.isfinite(x).all(axis=-1))
    np.matmul(p, np.where(finite[..., None], x, 0).astype(x.dtype, copy=False), out=out)
    bad, pairs = np.logical_not(finite), visible.dense()
    for j in np.flatnonzero(bad.reshape(-1, bad.shape[-1]).any(axis=0)):
        term = p[..., j, None] * x[..., None, j, :]
        out += np.where(pairs[..., j, None] & bad[..., None, None, j], term, 0)
    return out
