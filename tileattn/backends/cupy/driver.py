"""The library of the CUDA driver, for functions that CuPy does not call."""

import os
from collections.abc import Callable
from typing import TypeVar

_Library = TypeVar("_Library")


def driver_by(load: Callable[[str], _Library]) -> _Library:
    """Load the driver's library: by `ctypes.PyDLL` calls keep the interpreter's lock."""
    return load("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
