"""Tensor maps, encoded by the driver: 128 bytes each, which a launch passes by value."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from tileattn.backends.cupy.driver import driver_by
from tileattn.dtypes import tensor_map_type
from tileattn.kernels.cuda.plan.params import POINTERS
from tileattn.kernels.cuda.plan.tensor_map import TensorMap

MAP_BYTES = 128
# Values of the enumerations in cuda.h.
_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS = 0, 3, 3, 0
_ONES = ctypes.byref((ctypes.c_uint32 * 4)(1, 1, 1, 1))
_MODES = _INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS


class EncodedMaps:
    """Memory for the tensor maps of a launch, and the driver's arguments for each.

    ``start`` is the address of the first map.
    """

    def __init__(self, boxes: Sequence[tuple[str, int]]) -> None:
        # Room for one more, to align the maps to their size.
        self._memory = ctypes.create_string_buffer(MAP_BYTES * (len(boxes) + 1))
        self.start = -(-ctypes.addressof(self._memory) // MAP_BYTES) * MAP_BYTES
        self._encoders = [
            _Encoder(POINTERS.index(name), self.start + n * MAP_BYTES)
            for n, (name, _) in enumerate(boxes)
        ]

    def encode(self, maps: Sequence[TensorMap], cells: Any) -> None:
        """Write the maps of arrays, whose addresses are in the cells of the parameter block."""
        for encoder, one in zip(self._encoders, maps, strict=True):
            encoder.encode(one, cells[encoder.slot])


class _Encoder:
    """One place for a map, and what the driver reads to write it."""

    def __init__(self, slot: int, place: int) -> None:
        self.slot = slot  # of its address in the parameter block
        self._function = _driver_function()
        self._place = ctypes.c_void_p(place)
        self._sizes: Any = (ctypes.c_uint64 * 4)()
        self._strides: Any = (ctypes.c_uint64 * 3)()
        self._box: Any = (ctypes.c_uint32 * 4)()
        self._at = tuple(ctypes.byref(x) for x in (self._sizes, self._strides, self._box))

    def encode(self, described: TensorMap, address: int) -> None:
        """Write the map of an array at an address."""
        name, dtype, self._sizes[:], self._strides[:], self._box[:] = described
        # ctypes takes half the time without a list of argument types.
        kind, at = tensor_map_type(dtype), ctypes.c_void_p(address)
        arguments = self._place, kind, 4, at, *self._at, _ONES, *_MODES
        status = self._function(*arguments)
        if status:
            from cupy.cuda import runtime

            runtime.setDevice(runtime.getDevice())  # the driver requires a context in this thread
            status = self._function(*arguments)
        if status:
            raise RuntimeError(
                f"the driver could not encode a tensor map of {described}, at {address:#x}: "
                f"cuTensorMapEncodeTiled returned {status}; pass a contiguous array "
                f"(cupy.ascontiguousarray({name}))"
            )


@functools.cache
def _driver_function() -> Any:
    # It keeps the interpreter's lock: a call takes a microsecond, getting the lock back from
    # another thread may take thousands.
    return driver_by(ctypes.PyDLL).cuTensorMapEncodeTiled
