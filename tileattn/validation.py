"""What no argument of any call may be."""

from typing import Any

import numpy as np


def require_array(name: str, x: Any) -> None:
    """Raise TypeError if an argument is no array, or one whose mask would be lost."""
    if not hasattr(x, "dtype") or not hasattr(x, "strides"):
        raise TypeError(
            f"{name} is {type(x).__name__}; a NumPy or CuPy array is accepted "
            f"(numpy.asarray({name}) makes one)"
        )
    refuse_masked(name, x)


def refuse_masked(name: str, x: Any) -> None:
    """Raise TypeError if an argument is a masked array: what it masks would be used."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is numpy.ma.MaskedArray, whose mask would be lost; its filled() makes a plain "
            "array of it"
        )
