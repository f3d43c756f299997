"""Functions beyond the gallery: other operations, and indices that count from the end."""

from typing import Any

import numpy as np

B, HQ, NQ, NK = 2, 4, 67, 93
STEPS = np.arange(-9, 3)


def smooth(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    """Return a score of functions that have derivatives."""
    x = np.arctan(s) + np.log1p(t[h] * t[h]) * np.expm1(0.1 * s) + (i - j) * 0.375 % -1.25
    return np.logaddexp(x, t[h] * s) + s.erf() * s.sigmoid()


def stepping(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    """Return a score that jumps, at numbers that are exact in every dtype."""
    distance = (i - j) * 0.25
    x = np.ceil(distance) - np.round(distance) + (j * 0.5 + b) % 3.5 + np.isin(i % 7, (1, 5))
    return s * t[h] + 0.1 * x.clip(-2, max=9).float()


OPERATIONS = {"smooth": smooth, "stepping": stepping}

FROM_THE_END: dict[str, tuple[Any, tuple[int, ...]]] = {
    "distance": (lambda b, h, i, j, steps: (h, i - j), (HQ, NQ + NK)),
    "negative": (lambda b, h, i, j, steps: (-1 - h, j - NK), (HQ, NK)),
    "mixed": (lambda b, h, i, j, steps: (h - 2, (i + j) % 5 - 3), (HQ, 7)),
    "loaded": (lambda b, h, i, j, steps: (steps[(i + j) % 12],), (10,)),
}
"""Indices of which some are negative, and the shape of the array that they index."""


def options_of(name: str, dtype: Any) -> dict[str, Any]:
    """Make the options of a call with B batch entries, HQ heads, NQ queries and NK keys."""
    rng = np.random.default_rng(0)
    if name in OPERATIONS:
        return {"score_mod": OPERATIONS[name], "aux": (rng.normal(size=HQ).astype(dtype),)}
    place, shape = FROM_THE_END[name]
    return {
        "score_mod": lambda s, b, h, i, j, t, _, steps: s + t[place(b, h, i, j, steps)],
        "mask_mod": lambda b, h, i, j, _, m, steps: m[place(b, h, i, j, steps)],
        "aux": (rng.normal(size=shape).astype(dtype), rng.random(shape) < 0.7, STEPS),
    }
