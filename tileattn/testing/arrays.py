"""What arrays for tests hold, and how they lie in memory."""

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
    # Scores of some tens with the default scale: running maxima move, tails vanish.
    "large": _normal(5),
    # Scores of some hundreds: their exponentials overflow float32 where no maximum is taken.
    "huge": _normal(15),
    # Small integers: scores are exact and many of them equal.
    "ties": lambda rng, shape: rng.integers(-1, 2, size=shape).astype(np.float64),
    "equal": lambda rng, shape: np.full(shape, rng.choice([0.5, -2.0])),
}
"""By name: functions of a generator and a shape that fill an array for q or k."""

AMPLITUDES: dict[str, Fill] = {f"{a:g}": _normal(a) for a in (1e-3, 0.1, 1, 10, 100, 1e3, 1e4)}
"""The same for arrays of very different sizes; scores reach some 1e9 with the last."""

LAYOUTS = ("plain", "swapped", "padded", "every other", "reversed", "transposed")
"""Layouts that ``laid_out`` knows."""


def laid_out(x: Array, layout: str) -> Array:
    """Give a contiguous array (B, H, N, D) other strides, by one of ``LAYOUTS``.

    ``"swapped"`` lies in memory as ``(B, N, H, D)``, ``"padded"`` has a gap after each row,
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
    """Largest finite number of a floating dtype."""
    return float(np.nextafter(dtype.type(np.inf), dtype.type(0)))
