"""The rounding that no order of operations escapes: one rounding of each quantity.

An uncertainty here is an array of squares: that of a product ``x y`` with relative uncertainty
``e`` is ``(e x y)**2``, and the uncertainties of the terms of a sum add. ``unit`` is the largest
relative error of rounding to the dtype of the arrays, and ``unit_sums`` to that of the sums, which
is finer for the 16-bit types.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.reference import Backward, Forward

Array = NDArray[Any]


def roundoff(dtype: np.dtype[Any]) -> float:
    """Return the largest relative error of one rounding: half a unit in the last place of 1."""
    return (float(np.nextafter(dtype.type(1), dtype.type(2))) - 1.0) / 2


def norm(x: Array) -> float:
    """Frobenius norm of the finite elements."""
    return float(np.linalg.norm(finite(x)))


def finite(x: Array) -> Array:
    """Replace everything that is not finite by zero."""
    return np.where(np.isfinite(x), x, 0.0)


def forward_floors(f: Forward, unit: float, unit_sums: float) -> dict[str, float]:
    """Norms of the uncertainty of ``out`` and ``lse``, apart from that of storing them."""
    with np.errstate(all="ignore"):
        P = finite(f.P) * f.kept
        of_P = (P * _relative(f, unit, unit_sums)) ** 2
        of_scores = (finite(f.P) * unit_sums * _size(f)) ** 2
        largest = finite(np.max(f.scores, axis=-1, initial=-np.inf))
        return {
            "out": _root(of_P @ finite(f.v) ** 2),
            "lse": float(np.sqrt(np.sum(of_scores) + np.sum((unit_sums * largest) ** 2))),
        }


def backward_floors(
    f: Forward, b: Backward, dlse: Array | None, unit: float, unit_sums: float
) -> dict[str, float]:
    """Norms of the uncertainty of each gradient, apart from that of storing it."""
    with np.errstate(all="ignore"):
        P, dout = finite(f.P), finite(b.dout)
        of_P = (P * f.kept * _relative(f, unit, unit_sums)) ** 2
        of_dP = (unit_sums * f.kept) ** 2 * (dout**2 @ _transpose(finite(f.v) ** 2))
        of_delta = np.sum((unit * dout * finite(f.out)) ** 2, axis=-1)
        if dlse is not None:
            of_delta = of_delta + (unit_sums * finite(np.reshape(dlse, of_delta.shape))) ** 2
        of_dS = (finite(b.dS) * _relative(f, unit, unit_sums)) ** 2
        of_dS = of_dS + P**2 * (of_dP + of_delta[..., np.newaxis])
        of_draw = of_dS
        if f.options.softcap is not None:
            # draw = slope dS, slope = 1 - tanh(raw / softcap)**2
            slope = 1 - finite(f.capped / f.options.softcap) ** 2
            of_slope = (unit_sums * (1 + 2 * slope * _size(f) / f.options.softcap)) ** 2
            of_draw = of_dS * slope**2 + finite(b.dS) ** 2 * of_slope
        floors = {
            "dq": abs(f.scale) * _root(of_draw @ finite(f.k) ** 2),
            "dk": abs(f.scale) * _root(_transpose(of_draw) @ finite(f.q) ** 2),
            "dv": _root(_transpose(of_P) @ dout**2),
            "dbias": _root(of_dS),
        }
        if f.options.sinks is not None:
            sinks = finite(np.asarray(f.options.sinks, np.float64))[:, np.newaxis]
            P_sink = finite(np.exp(sinks - f.lse))
            relative = unit_sums * (1 + np.abs(sinks) + np.abs(finite(f.lse)))
            of_sink = (relative * finite(b.dlog)) ** 2 + of_delta
            floors["dsinks"] = _root(P_sink**2 * of_sink)
        return floors


def _size(f: Forward) -> Array:
    """Root of the sum of squares of the terms of each score and of ``lse``."""
    squares = f.scale**2 * (finite(f.q) ** 2 @ _transpose(finite(f.k) ** 2))
    squares = squares + finite(f.capped) ** 2 + finite(f.scores) ** 2
    return np.asarray(np.sqrt(squares + finite(f.lse)[..., np.newaxis] ** 2))


def _relative(f: Forward, unit: float, unit_sums: float) -> Array:
    """Relative uncertainty of P: that of storing it and that of its score."""
    return unit + unit_sums * _size(f)


def _root(squares: Array) -> float:
    return float(np.sqrt(np.sum(squares)))


def _transpose(x: Array) -> Array:
    return x.swapaxes(2, 3)
