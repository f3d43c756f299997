"""Validation of the options that are one number."""

import math
from collections.abc import Callable
from typing import Any

from tileattn.messages import must_be
from tileattn.validation import integer, real

_CAP = "a positive number, or None for no cap"
_PROBABILITY = "a number from 0 up to, but not including, 1"


def scale_of(scale: Any, D: int) -> float:
    """Return a valid scale; None is ``1 / sqrt(D)``."""
    if scale is None:
        return 1.0 / math.sqrt(D) if D else 1.0
    return real("scale", scale, "a finite number or None")


def softcap_of(softcap: Any) -> float | None:
    """Return a valid softcap; None is no cap."""
    if softcap is None:
        return None
    value = real("softcap", softcap, _CAP)
    if value <= 0.0:
        raise ValueError(must_be("softcap", _CAP, softcap))
    return value


def dropout_of(dropout_p: Any) -> float:
    """Return a valid probability of dropping an entry."""
    value = real("dropout_p", dropout_p, _PROBABILITY)
    if not 0.0 <= value < 1.0:
        raise ValueError(must_be("dropout_p", _PROBABILITY, dropout_p))
    return value


def number_of(name: str, x: Any) -> float:
    """Return a valid floating option by its name."""
    return float(_VALIDATED[name](x))


def seed_of(seed: Any) -> int:
    """Return a valid seed of the dropout generator."""
    return integer("seed", seed, "an integer from 0 to 2**64 - 1", 0, 1 << 64)


_VALIDATED: dict[str, Callable[[Any], Any]] = {
    "scale": lambda x: scale_of(x, 1),
    "softcap": softcap_of,
    "dropout_p": dropout_of,
}
