"""Tensor maps, encoded by the driver: 128 bytes each, which a launch passes by value."""

import ctypes
import functools
from collections.abc import Sequence
from struct import Struct
from typing import Any

from tileattn.backends.cupy.driver import driver_by
from tileattn.dtypes import tensor_map_type
from tileattn.kernels.cuda.plan.params import POINTERS
from tileattn.kernels.cuda.plan.tensor_map import COLUMNS

MAP_BYTES = 128
MAP_NUMBERS = 7  # four sizes and three strides
# Values of the enumerations in cuda.h.
_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_128_BYTES, _ZEROS_OUT_OF_BOUNDS = 0, 3, 2, 0
_ONES = ctypes.byref((ctypes.c_uint32 * 4)(1, 1, 1, 1))
_MODES = _INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_128_BYTES, _ZEROS_OUT_OF_BOUNDS


class EncodedMaps:
    """Memory for the tensor maps of a launch, and the driver's arguments for each.

    ``boxes`` are the arrays, each with the rows of a box. ``start`` is the address of the first
    map.
    """

    def __init__(self, boxes: Sequence[tuple[str, int]], dtype: str) -> None:
        # Room for one more, to align the maps to their size.
        self._memory = ctypes.create_string_buffer(MAP_BYTES * (len(boxes) + 1))
        self.start = -(-ctypes.addressof(self._memory) // MAP_BYTES) * MAP_BYTES
        self.count = MAP_NUMBERS * len(boxes)
        self._numbers: Any = (ctypes.c_uint64 * self.count)()
        self._pack = Struct(f"={self.count}Q").pack_into
        self._encoders = [
            _Encoder(name, dtype, rows, self.start + n * MAP_BYTES, self._numbers, n * MAP_NUMBERS)
            for n, (name, rows) in enumerate(boxes)
        ]

    def encode(self, numbers: Sequence[int], cells: Any) -> None:
        """Write the maps; the parameter block has the addresses.

        ``numbers`` are the four sizes, then the three strides, of each map.
        """
        self._pack(self._numbers, 0, *numbers)
        for encoder in self._encoders:
            encoder.encode(cells[encoder.slot])


class _Encoder:
    """One place for a map, and what the driver reads to write it."""

    def __init__(
        self, name: str, dtype: str, rows: int, place: int, numbers: Any, first: int
    ) -> None:
        self._name, self.slot = name, POINTERS.index(name)  # cell of its address
        self._function = _driver_function()
        self._numbers, self._at = numbers, first
        box = (ctypes.c_uint32 * 4)(COLUMNS, rows, 1, 1)
        self._first = ctypes.c_void_p(place), tensor_map_type(dtype), 4
        sizes, strides = (ctypes.byref(numbers, 8 * n) for n in (first, first + 4))
        self._last = sizes, strides, ctypes.byref(box), _ONES, *_MODES

    def encode(self, address: int) -> None:
        """Write the map of an array at an address."""
        # ctypes takes half the time without a list of argument types.
        arguments = *self._first, ctypes.c_void_p(address), *self._last
        status = self._function(*arguments)
        if status:
            from cupy.cuda import runtime

            runtime.setDevice(runtime.getDevice())  # the driver requires a context in this thread
            status = self._function(*arguments)
        if status:
            sizes, strides = self._numbers[self._at :][:4], self._numbers[self._at :][4:7]
            raise RuntimeError(
                f"the driver could not encode a tensor map of {self._name} of shape "
                f"{tuple(sizes)[::-1]}, strides {tuple(strides)[::-1]} bytes, at {address:#x}: "
                f"cuTensorMapEncodeTiled returned {status}; pass a contiguous array "
                f"(cupy.ascontiguousarray({self._name}))"
            )


@functools.cache
def _driver_function() -> Any:
    # It keeps the interpreter's lock: a call takes a microsecond, getting the lock back from
    # another thread may take thousands.
    return driver_by(ctypes.PyDLL).cuTensorMapEncodeTiled
