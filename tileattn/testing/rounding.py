"""The rounding error that no order of operations avoids: one rounding of each quantity.

An uncertainty here is an array of squared errors, so that those of independent terms add: if ``x``
has the error ``e``, the product ``x y`` has the uncertainty ``e**2 * y**2``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.dtypes import accum_dtype
from tileattn.oracle.dense import Backward, Forward

Array = NDArray[Any]


@dataclass(frozen=True)
class Rounding:
    """The error of a rounded number."""

    relative: float  # of a number in the normal range
    absolute: float  # of a number near zero

    def of(self, x: Array) -> Array:
        """Return the squared error of each element."""
        return np.asarray((self.relative * x) ** 2 + self.absolute**2)


def storing(dtype: np.dtype[Any]) -> Rounding:
    """Return the rounding of a stored number: half a unit in the last place."""
    return Rounding(_unit(dtype) / 2, max(_least(dtype), _flushed(dtype)))


def summing(dtype: np.dtype[Any]) -> Rounding:
    """Return the rounding of a sum of products: two units in the last place of its terms."""
    return Rounding(2 * _unit(dtype), _flushed(dtype))


def _unit(dtype: np.dtype[Any]) -> float:
    return float(np.nextafter(dtype.type(1), dtype.type(2))) - 1.0


def _least(dtype: np.dtype[Any]) -> float:
    return float(np.nextafter(dtype.type(0), dtype.type(1)))


def _flushed(dtype: np.dtype[Any]) -> float:
    """Return the size below which GPUs flush to zero: the least normal float32."""
    return float(np.finfo(accum_dtype(dtype)).tiny)


def norm(x: Array) -> float:
    """Return the Frobenius norm of the finite elements."""
    return float(np.linalg.norm(finite(x)))


def finite(x: Array) -> Array:
    """Replace NaN and infinities by zero."""
    found = np.isfinite(x)
    return x if found.all() else np.where(found, x, 0.0)


def floors(
    f: Forward, b: Backward | None, dlse: Array | None, store: Rounding, sums: Rounding
) -> dict[str, float]:
    """Return the norm of the uncertainty of each result, without that of storing it."""
    with np.errstate(all="ignore"):
        softmax = _softmax(f, store, sums)
        found = _forward_floors(f, softmax, sums)
        return found if b is None else found | _backward_floors(f, b, dlse, softmax, store, sums)


@dataclass(frozen=True)
class _Softmax:
    """Uncertainty of the softmax, which every result depends on.

    Parameters
    ----------
    size : array, shape (B, Hq, Nq, Nk)
        Root of the sum of squares of the modifiers of each score and of ``lse``.
    of_P : array, shape (B, Hq, Nq, Nk)
        Uncertainty of P from storing it and from its score.
    of_sums : array, shape (B, Hq, Nq)
        Uncertainty of ``lse`` from that of the scores. Scores of a row share its query, so their
        errors may have the same sign.
    of_out : array, shape (B, Hq, Nq, Dv)
        Uncertainty of ``out`` from that of P.
    """

    size: Array
    of_P: Array
    of_sums: Array
    of_out: Array


def _softmax(f: Forward, store: Rounding, sums: Rounding) -> _Softmax:
    """Return the uncertainty of the softmax of a call."""
    size = f.scale**2 * (finite(f.q) ** 2 @ _transpose(finite(f.k) ** 2))
    size += finite(f.capped) ** 2
    size += finite(f.scores) ** 2
    size += finite(f.lse)[..., np.newaxis] ** 2
    size = np.sqrt(size)
    P = finite(f.P)
    scaled = P * size
    of_P = np.where(f.attended, store.of(P) + (sums.relative * scaled) ** 2, 0)
    of_sums = (sums.relative * np.sum(scaled, axis=-1)) ** 2
    of_out = (of_P * f.kept**2) @ finite(f.v) ** 2
    return _Softmax(size, of_P, of_sums, of_out)


def _forward_floors(f: Forward, s: _Softmax, sums: Rounding) -> dict[str, float]:
    """Return the floors of ``out`` and ``lse``."""
    largest = finite(np.max(f.scores, axis=-1, initial=-np.inf))
    return {
        "out": _root(s.of_out),
        "lse": _root(sums.of(largest) + sums.of(finite(f.lse)) + s.of_sums),
    }


def _backward_floors(
    f: Forward, b: Backward, dlse: Array | None, s: _Softmax, store: Rounding, sums: Rounding
) -> dict[str, float]:
    """Return the floor of each gradient."""
    P, dS, dout = finite(f.P), finite(b.dS), finite(b.dout)
    squares_of_dP = f.kept**2 * (dout**2 @ _transpose(finite(f.v) ** 2)) + finite(b.dP) ** 2
    of_dP = sums.relative**2 * squares_of_dP
    of_out = store.of(finite(f.out)) + s.of_out
    # If a gradient sums few deltas (of a sink, or of a bias for one row), chance may exceed the
    # root of the sum of squares: allow a whole unit in the last place of out.
    of_delta = 4 * np.sum(dout**2 * of_out, axis=-1)
    if dlse is not None:
        of_delta = of_delta + sums.of(finite(np.reshape(dlse, of_delta.shape)))
    slack = finite(b.dP) + finite(b.dlog)[..., np.newaxis]  # dS = P slack
    of_dS = np.where(f.attended, s.of_P * slack**2 + store.of(dS) + P**2 * of_dP, 0)
    by_score, of_ds = np.ones_like(dS), of_dS
    if f.function is not None:
        # ds = dS by_score
        by_score = np.where(f.attended, finite(f.function.by_score), 0)
        of_ds = of_dS * by_score**2 + dS**2 * sums.of(by_score)
    slope, of_draw = by_score, of_ds
    if f.options.softcap is not None:
        # draw = slope ds, slope = 1 - tanh(raw / softcap)**2
        slope = 1 - finite(f.capped / f.options.softcap) ** 2
        of_slope = sums.of(1 + 2 * slope * s.size / f.options.softcap)
        of_draw = of_ds * slope**2 + (dS * by_score) ** 2 * of_slope
        slope = slope * by_score
    # A row has one error of delta, so it adds over keys before squaring.
    row = of_delta[..., np.newaxis]
    of_draw_k = of_draw @ finite(f.k) ** 2 + row * ((P * slope) @ finite(f.k)) ** 2
    of_draw_q = _transpose(of_draw + row * (P * slope) ** 2) @ finite(f.q) ** 2
    found = {
        "dq": abs(f.scale) * _root(of_draw_k),
        "dk": abs(f.scale) * _root(of_draw_q),
        "dv": _root(_transpose(s.of_P * f.kept**2) @ dout**2),
    }
    if f.options.bias is not None:
        over_keys = np.shape(f.options.bias)[-1:] in ((), (1,))
        part = P * by_score
        weight = np.sum(part, axis=-1) ** 2 if over_keys else np.sum(part**2, axis=-1)
        found["dbias"] = float(np.sqrt(np.sum(of_ds) + np.sum(of_delta * weight)))
    for number in range(len(f.options.aux or ())):
        squares = np.zeros_like(of_delta)
        for read, tangent in ({} if f.function is None else f.function.by_element).items():
            if read[0] == number:
                by = np.where(f.attended, finite(tangent), 0)
                squares += np.sum(of_dS * by**2 + dS**2 * sums.of(by), axis=-1)
                squares += of_delta * np.sum(P * np.abs(by), axis=-1) ** 2
        found[f"daux[{number}]"] = _root(squares)
    if f.options.sinks is not None:
        sinks = np.asarray(f.options.sinks, np.float64)[:, np.newaxis]
        of_exponent = sums.of(1 + np.abs(finite(sinks)) + np.abs(finite(f.lse))) + s.of_sums
        of_sink = of_exponent * finite(b.dlog) ** 2 + of_delta
        found["dsinks"] = _root(finite(np.exp(sinks - f.lse)) ** 2 * of_sink)
    return found


def _root(squares: Array) -> float:
    return float(np.sqrt(np.sum(squares)))


def _transpose(x: Array) -> Array:
    return x.swapaxes(2, 3)
