"""Contents and memory layouts of arrays for tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Fill = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _normal(size: float) -> Fill:
    return lambda rng, shape: rng.normal(size=shape) * size


FILLS: dict[str, Fill] = {
    "normal": _normal(1),
    # Scores of tens with the default scale: running maxima change, tails underflow.
    "large": _normal(5),
    # Scores of hundreds: without a maximum their exponentials overflow float32.
    "huge": _normal(15),
    # Small integers: scores are exact, and many are equal.
    "ties": lambda rng, shape: rng.integers(-1, 2, size=shape).astype(np.float64),
    "equal": lambda rng, shape: np.full(shape, rng.choice([0.5, -2.0])),
}
"""Functions of a generator and a shape that fill an array for q or k, by name."""

AMPLITUDES: dict[str, Fill] = {f"{a:g}": _normal(a) for a in (1e-3, 0.1, 1, 10, 100, 1e3, 1e4)}
"""The same for arrays of very different sizes; with the last, scores reach 1e9."""

LAYOUTS = ("plain", "swapped", "padded", "every other", "reversed", "transposed")
"""Layouts that ``laid_out`` knows."""


def laid_out(x: Array, layout: str) -> Array:
    """Copy a contiguous array (B, H, N, D) to one of ``LAYOUTS``.

    ``"swapped"`` is stored as ``(B, N, H, D)``, ``"padded"`` has a gap after each row,
    ``"every other"`` and ``"reversed"`` step through N by 2 and by -1, and the last axis of
    ``"transposed"`` is not contiguous.
    """
    B, H, N, D = x.shape
    views: dict[str, Callable[[], Array]] = {
        "swapped": lambda: np.empty((B, N, H, D), x.dtype).swapaxes(1, 2),
        "padded": lambda: np.empty((B, H, N, D + 3), x.dtype)[..., :D],
        "every other": lambda: np.empty((B, H, 2 * N, D), x.dtype)[:, :, ::2],
        "reversed": lambda: np.empty((B, H, N, D), x.dtype)[:, :, ::-1],
        "transposed": lambda: np.empty((B, H, D, N), x.dtype).swapaxes(2, 3),
    }
    if layout == "plain":
        return x
    view = views[layout]()
    view[...] = x
    return view


def largest(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a floating dtype."""
    return float(np.nextafter(dtype.type(np.inf), dtype.type(0)))
