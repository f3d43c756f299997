"""Partial results for tests of ``merge``."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-21, "float64": 2.0**-50}
"""Bound of a rounding error, by the dtype of the results."""


def parts(
    count: int, dtype: Any, shape: tuple[int, ...], seed: int = 0
) -> tuple[list[Array], list[Array]]:
    """Draw partial results, of which some rows have no keys and hold NaN."""
    rng = np.random.default_rng(seed)
    sums = np.float64 if dtype == np.float64 else np.float32
    outs = [np.asarray(rng.normal(size=shape).astype(dtype)) for _ in range(count)]
    lses = [(5 * rng.normal(size=shape[:-1])).astype(sums) for _ in range(count)]
    for out, lse in zip(outs, lses, strict=True):
        empty = rng.random(lse.shape) < 0.3
        lse[empty], out[empty] = -np.inf, np.nan
        lse[..., :1] = -np.inf
    return outs, lses


def special_parts() -> tuple[list[Array], list[Array]]:
    """Return parts whose lses are every triple of special numbers, some with special outputs."""
    special = [np.nan, np.inf, -np.inf, 0.0, 3.0]
    lses = [x.reshape(-1).astype(np.float32) for x in np.meshgrid(*[special] * 3)]
    outs = [np.full((len(x), 4), n, np.float32) for n, x in enumerate(lses)]
    outs[1][:, 1:] = [np.nan, np.inf, -np.inf]
    return outs, lses
