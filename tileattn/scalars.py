"""The options that are one number, validated: for all entries of the library."""

import math
import numbers
from typing import Any

import numpy as np

from tileattn.dtypes import BFLOAT16


def scale_of(scale: Any, D: int) -> float:
    """Give the scale of a call; None is ``1 / sqrt(D)``."""
    if scale is None:
        return 1.0 / math.sqrt(D) if D else 1.0
    return _real("scale", scale, "a finite number is")


def softcap_of(softcap: Any) -> float | None:
    """Give the bound of the scaled products; None is no bound."""
    if softcap is None:
        return None
    value = _real("softcap", softcap, "a positive number, or None for no cap, is")
    if value <= 0.0:
        raise ValueError(
            f"softcap is {softcap}; a positive number, or None for no cap, is accepted"
        )
    return value


def dropout_of(dropout_p: Any) -> float:
    """Give the probability of dropping an entry."""
    value = _real("dropout_p", dropout_p, "a probability in [0, 1) is")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}; a probability in [0, 1) is accepted")
    return value


def seed_of(seed: Any) -> int:
    """Give the seed of the dropout generator."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"seed is {type(seed).__name__}; an integer is accepted")
    if not 0 <= int(seed) < 1 << 64:
        raise ValueError(f"seed is {seed}; an integer from 0 to 2**64 - 1 is accepted")
    return int(seed)


def _real(name: str, x: Any, accepted: str) -> float:
    if isinstance(x, bool) or not isinstance(x, numbers.Real | BFLOAT16.type):
        raise TypeError(f"{name} is {type(x).__name__}; {accepted} accepted")
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{name} is {x}; {accepted} accepted")
    return value + 0.0  # not -0.0: calls that compare equal have the same bits
