"""Tensor maps: what tells Hopper's copy engine where the boxes of an array lie.

A map holds an address, sizes, strides and the box that one copy moves, in 128 bytes which a launch
passes by value. The driver writes it, on the host.
"""

import ctypes
import functools
import os
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from tileattn.kernels.launch.params import POINTERS

MAP_BYTES = 128
UNIT = 16  # bytes at whose multiples addresses and rows must start
COLUMNS = 64  # of a box: 128 bytes, within which the copy swizzles
MOST_STRIDE = 1 << 40  # bytes; the driver takes what is below

# Values of the enumerations in cuda.h.
_KINDS = {"float16": 6, "bfloat16": 9}
_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS = 0, 3, 3, 0

MOST_MAPS = 64  # sets of maps that a plan keeps


def has_boxes(x: Any) -> bool:
    """Whether copies of boxes can go through an array whose rows start at multiples of `UNIT`.

    Parameters
    ----------
    x : array, shape (B, H, N, D)
        The array.

    Returns
    -------
    bool
        False where an axis is broadcast or reversed, or its steps are too long.
    """
    return all(
        0 < step < MOST_STRIDE for n, step in zip(x.shape[:-1], x.strides, strict=False) if n > 1
    )


class TensorMap:
    """All of a tensor map but the address.

    Parameters
    ----------
    name : str
        Of the array, for messages.
    x : array, shape (B, H, N, D)
        An array of float16 or bfloat16 with the sizes and strides of those to come.
    rows : int
        Rows of a box.
    """

    def __init__(self, name: str, x: Any, rows: int) -> None:
        pitch = -(-x.shape[-1] * x.itemsize // UNIT) * UNIT
        # Where an axis has one entry its stride may be anything, but the driver looks at it.
        steps = [s if n > 1 else pitch for n, s in zip(x.shape[:-1], x.strides, strict=False)]
        self._encode = _driver_function()
        self._kind = _KINDS[x.dtype.name]
        self._layout = (
            ctypes.byref((ctypes.c_uint64 * 4)(*x.shape[::-1])),
            ctypes.byref((ctypes.c_uint64 * 3)(*steps[::-1])),
            ctypes.byref((ctypes.c_uint32 * 4)(COLUMNS, rows, 1, 1)),
            ctypes.byref((ctypes.c_uint32 * 4)(1, 1, 1, 1)),
            *(_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS),
        )
        self._name = name
        self._told = f"of shape {x.shape}, strides {x.strides} bytes, in boxes of {rows} rows"

    def encode(self, place: int, address: int) -> None:
        """Write the map of an array.

        Parameters
        ----------
        place : int
            Address on the host of `MAP_BYTES` bytes, a multiple of 64.
        address : int
            Of the array, a multiple of `UNIT`.

        Raises
        ------
        RuntimeError
            Where the driver refuses.
        """
        # Without a list of types at the function, ctypes takes half the time.
        pointer = ctypes.c_void_p
        status = self._encode(pointer(place), self._kind, 4, pointer(address), *self._layout)
        if status:
            raise RuntimeError(
                f"the driver makes no tensor map of {self._name} {self._told}, at {address:#x}: "
                f"cuTensorMapEncodeTiled returned {status}; arrays with plain strides are "
                f"accepted (cupy.ascontiguousarray({self._name}) makes one)"
            )


class Maps(dict[tuple[int, ...], tuple[Any, Any]]):
    """The tensor maps of a kernel by the addresses of its arrays, encoded at the first look.

    An entry is the memory that holds the maps, which nobody writes to any more, and the argument
    that points there, which a launch passes by value. Who launches holds both. When there are many
    entries all are dropped; single steps are safe among threads.

    Parameters
    ----------
    boxes : tuple of (str, int)
        Names of two arrays or more, each with the rows of its boxes, in the order of the maps.
    arrays : mapping of str to array
        With the sizes and strides of those to come.

    Attributes
    ----------
    pick : callable
        Takes the addresses from those of all arrays, in the order of the parameter block.
    """

    def __init__(self, boxes: tuple[tuple[str, int], ...], arrays: Mapping[str, Any]) -> None:
        self._maps = tuple(TensorMap(name, arrays[name], rows) for name, rows in boxes)
        self.pick = itemgetter(*(POINTERS.index(name) for name, _ in boxes))

    def __missing__(self, addresses: tuple[int, ...]) -> tuple[Any, Any]:
        from cupy.cuda import runtime
        from cupy.cuda.function import CPointer

        runtime.setDevice(runtime.getDevice())  # the driver wants a context in this thread
        # One map more, so that they can begin at a multiple of their size.
        memory = ctypes.create_string_buffer(MAP_BYTES * (len(addresses) + 1))
        start = -(-ctypes.addressof(memory) // MAP_BYTES) * MAP_BYTES
        for n, (one, address) in enumerate(zip(self._maps, addresses, strict=True)):
            one.encode(start + n * MAP_BYTES, address)
        if len(self) >= MOST_MAPS:
            self.clear()
        self[addresses] = made = memory, CPointer(start)
        return made


@functools.cache
def _driver_function() -> Any:
    # It keeps the interpreter's lock: a call takes a microsecond, and to get the lock back from
    # another thread would take thousands.
    driver = ctypes.PyDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    return driver.cuTensorMapEncodeTiled
