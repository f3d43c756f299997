"""Inputs of the functions of splitting.cuh."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.splitting import power_of_two

Array = NDArray[Any]


def largest_elements() -> Array:
    """Return the first, second and last float32 number of each finite exponent, from 0 on."""
    fractions = np.array([0, 1, 2**23 - 1], np.uint32)
    return (np.arange(255, dtype=np.uint32)[:, None] << 23 | fractions).ravel().view(np.float32)


def elements_and_factors() -> tuple[Array, Array]:
    """Draw elements of all exponents and signs, NaN and infinities, and factors of larger elements.

    Half of the elements are at most 2**40 times smaller; the products of others may be subnormal.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 2**18, np.uint32).view(np.float32)
    x[:6] = 0.0, -0.0, -1e-45, 1e-45, np.inf, np.nan
    own = power_of_two(np.where(np.isfinite(x), np.abs(x), 0))
    times = np.where(
        np.arange(x.size) % 2, rng.integers(0, 40, x.size), rng.integers(0, 240, x.size)
    )
    return x, np.maximum(np.ldexp(own, -times), np.float32(2.0**-113))
