"""Error function and logistic function of arrays, which NumPy lacks."""

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.polynomial import Chebyshev
from numpy.typing import NDArray

Array = NDArray[Any]

_NEAR = 1.25  # up to which the Taylor series keeps its digits
_FAR = 6.0  # from which erf is 1 in float64
_TERMS = 22  # the next one is below 2**-60 at _NEAR
_DEGREE = 20
_MIDDLE = 3.0  # of the change of variable, under which the scaled complement is nearly a polynomial

_TAYLOR = [
    2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(_TERMS)
]


def erf(x: Any) -> Any:
    """Compute the error function, to a few units in the last place of float32 or float64.

    Notes
    -----
    A Taylor series up to 1.25; above, ``1 - exp(-x**2) g(x)`` with a Chebyshev series of g.

    References
    ----------
    Abramowitz and Stegun, Handbook of Mathematical Functions, equations 7.1.5 and 7.1.2.
    """
    wide = np.asarray(x, np.float64)
    size = np.abs(wide)
    square = np.minimum(size, _NEAR) ** 2
    series = np.full_like(wide, _TAYLOR[-1])
    for term in _TAYLOR[-2::-1]:
        series = series * square + term
    beyond = np.clip(size, _NEAR, _FAR)
    complement = np.exp(-beyond * beyond) * _scaled_complement()(_variable(beyond))
    found = np.where(size <= _NEAR, wide * series, np.copysign(1 - complement, wide))
    return found.astype(np.result_type(x), copy=False)[()]


def sigmoid(x: Any) -> Any:
    """Compute ``1 / (1 + exp(-x))``."""
    return 1 / (1 + np.exp(-x))


def _variable(x: Any) -> Any:
    return (x - _MIDDLE) / (x + _MIDDLE)


@cache
def _scaled_complement() -> Chebyshev:
    """Interpolate ``exp(x**2) erfc(x)`` from _NEAR to _FAR, in another variable."""

    def of_variable(t: Array) -> Array:
        x = _MIDDLE * (1 + t) / (1 - t)
        return np.array([math.exp(y * y) * math.erfc(y) for y in x])

    domain = [_variable(_NEAR), _variable(_FAR)]
    return Chebyshev.interpolate(of_variable, _DEGREE, domain)
