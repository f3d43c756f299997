"""Checks of plain arguments: arrays, flags, numbers and tuples of integers."""

import math
import numbers
import sys
from typing import Any

import numpy as np

from tileattn.dtypes import BFLOAT16, FLOAT8_E4M3FN
from tileattn.messages import called, must_be


def require_array(name: str, x: Any) -> None:
    """Raise TypeError if an argument is not an array, or is a masked array."""
    if isinstance(x, type) or not hasattr(x, "dtype") or not hasattr(x, "strides"):
        raise TypeError(must_be(name, "a NumPy or CuPy array", x, conversion(name, x)))
    refuse_masked(name, x)


def require_numpy(name: str, x: Any) -> None:
    """Raise TypeError if an argument is not a NumPy array, or is a matrix or a masked array."""
    refuse_masked(name, x)
    if not isinstance(x, np.ndarray) or isinstance(x, np.matrix):
        tensor = is_of("torch", x)
        remedy = f"{called(name)}.numpy(force=True) makes one" if tensor else conversion(name, x)
        raise TypeError(must_be(name, "a NumPy array", x, remedy))


# Dtypes of PyTorch that NumPy does not have: integers of their size, and their dtypes here.
_OF_TORCH = {
    "torch.bfloat16": ("int16", BFLOAT16),
    "torch.float8_e4m3fn": ("uint8", FLOAT8_E4M3FN),
}


def on_host(x: Any) -> Any:
    """Copy an array of PyTorch, CuPy or JAX, or a tuple of them, to NumPy; return others as is."""
    if type(x) is tuple:
        return tuple(map(on_host, x))
    if is_of("torch", x) and hasattr(x, "detach"):
        held, dtype = _OF_TORCH.get(str(x.dtype), ("", None))
        found = x.detach().view(getattr(sys.modules["torch"], held)) if held else x
        found = found.numpy(force=True)
        return found.view(dtype) if held else found
    if is_of("cupy", x):
        return x.get()
    if (is_of("jax", x) or is_of("jaxlib", x)) and hasattr(x, "__array__"):
        return np.asarray(x)
    return x


def is_of(library: str, x: Any) -> bool:
    """Return True if the class of an object is of a library, which is not imported."""
    return type(x).__module__.split(".")[0] == library


UNMASKED = "the mask would be lost; {}.filled() makes a plain array"


def conversion(name: str, x: Any) -> str:
    """Say how to make an array of an argument, or what takes it as it is."""
    own = called(name)
    if is_of("torch", x):
        return f"tileattn.torch.attention takes tensors; {own}.numpy(force=True) makes an array"
    if is_of("jax", x) or is_of("jaxlib", x):
        traced = "a tracer of jax.jit, jax.grad or the like" if "Tracer" in type(x).__name__ else ""
        return f"{traced or 'an array of JAX'}: tileattn.jax.attention takes it"
    if is_of("cupy", x):
        return f"cupy.asnumpy({own}) makes one"
    if isinstance(x, np.ma.MaskedArray):
        return UNMASKED.format(own)
    if isinstance(x, np.ndarray) and not isinstance(x, np.matrix):
        return f"cupy.asarray({own}) makes one"
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
        return f"numpy.from_dlpack({own}) makes one of memory of the CPU"
    return f"numpy.asarray({own}) makes one"


def refuse_masked(name: str, x: Any) -> None:
    """Raise TypeError for a masked array, whose mask would be lost."""
    if isinstance(x, np.ma.MaskedArray):
        remedy = UNMASKED.format(called(name))
        raise TypeError(must_be(name, "an array without a mask", x, remedy))


def check_flags(**flags: Any) -> None:
    """Raise TypeError if a flag is not True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(must_be(name, "True or False", flag))


def real(name: str, x: Any, what: str) -> float:
    """Convert a number to a finite float; the error says ``what`` it must be."""
    number = scalar(x)
    plain = isinstance(number, numbers.Real | BFLOAT16.type)
    if not plain or isinstance(number, bool | np.timedelta64):
        raise TypeError(must_be(name, what, x))
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(must_be(name, what, x))
    return value + 0.0  # not -0.0: calls that compare equal have the same bits


def integer(
    name: str, x: Any, what: str, low: int = 0, end: int | None = None, whole: Any = None
) -> int:
    """Convert an integer from ``low`` to ``end - 1``; ``whole`` is the argument it is a part of."""
    number, given = scalar(x), x if whole is None else whole
    if isinstance(number, bool | np.timedelta64) or not isinstance(number, int | np.integer):
        raise TypeError(must_be(name, what, given))
    value = int(number)
    if value < low or (end is not None and value >= end):
        raise ValueError(must_be(name, what, given))
    return value


def integers_of(name: str, x: Any, what: str, count: int, low: int = 0) -> tuple[int, ...]:
    """Convert a tuple of ``count`` integers."""
    if not isinstance(x, tuple | list):
        raise TypeError(must_be(name, what, x))
    if len(x) != count:
        raise ValueError(must_be(name, what, x))
    return tuple(integer(name, n, what, low, whole=x) for n in x)


def scalar(x: Any) -> Any:
    """Take the number out of a NumPy array without axes."""
    return x[()] if isinstance(x, np.ndarray) and not x.shape else x


def lengths_of(name: str, x: Any) -> tuple[int, int, int, int]:
    """Convert the four lengths of a shape."""
    B, Hq, Nq, Nk = integers_of(name, x, "four non-negative integers (B, Hq, Nq, Nk)", 4)
    return B, Hq, Nq, Nk
