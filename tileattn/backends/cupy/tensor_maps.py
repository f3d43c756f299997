"""Tensor maps that the driver has encoded: 128 bytes each, which a launch passes by value."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from tileattn.backends.cupy.driver import driver_by
from tileattn.dtypes import tensor_map_type
from tileattn.kernels.cuda.plan.params import POINTERS
from tileattn.kernels.cuda.plan.tensor_map import TensorMap
from tileattn.lru import Lru

MAP_BYTES = 128
MAX_ENTRIES = 96  # sets of maps that a launch remembers
# Values of the enumerations in cuda.h.
_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS = 0, 3, 3, 0


class EncodedMaps(Lru):
    """The tensor maps of a launch by the addresses of its arrays, encoded at the first look-up.

    An entry is the memory of the maps, which is not written again, and its aligned start. The
    launching thread keeps a reference to it. ``pick`` selects them from the addresses of all
    arrays, in the order of the parameter block.
    """

    def __init__(self, maps: Sequence[TensorMap]) -> None:
        super().__init__(MAX_ENTRIES)
        self._encoders = tuple(map(_Encoder, maps))
        first, *others = (POINTERS.index(one.name) for one in maps)
        # An itemgetter of one index returns no tuple.
        self.pick: Callable[[Sequence[int]], tuple[int, ...]] = (
            itemgetter(first, *others) if others else lambda cells: (cells[first],)
        )

    def __missing__(self, addresses: tuple[int, ...]) -> tuple[Any, int]:
        found: tuple[Any, int] | None = super().__missing__(addresses)
        if found is not None:
            return found
        from cupy.cuda import runtime

        runtime.setDevice(runtime.getDevice())  # the driver requires a context in this thread
        # Room for one more, to align the maps to their size.
        memory = ctypes.create_string_buffer(MAP_BYTES * (len(addresses) + 1))
        start = -(-ctypes.addressof(memory) // MAP_BYTES) * MAP_BYTES
        for n, (encoder, address) in enumerate(zip(self._encoders, addresses, strict=True)):
            encoder.encode(start + n * MAP_BYTES, address)
        self.keep(addresses, (memory, start))
        return memory, start


class _Encoder:
    """The arguments of the driver's function, except the addresses."""

    def __init__(self, described: TensorMap) -> None:
        self._function = _driver_function()
        self._described = described
        self._dtype = tensor_map_type(described.dtype)
        self._arguments = (
            ctypes.byref((ctypes.c_uint64 * 4)(*described.sizes)),
            ctypes.byref((ctypes.c_uint64 * 3)(*described.strides)),
            ctypes.byref((ctypes.c_uint32 * 4)(*described.box)),
            ctypes.byref((ctypes.c_uint32 * 4)(1, 1, 1, 1)),
            *(_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS),
        )

    def encode(self, place: int, address: int) -> None:
        """Write the map of an array to an address on the host, a multiple of 64."""
        # ctypes takes half the time without a list of argument types.
        pointer = ctypes.c_void_p
        status = self._function(pointer(place), self._dtype, 4, pointer(address), *self._arguments)
        if status:
            raise RuntimeError(
                f"the driver could not encode a tensor map of {self._described}, at {address:#x}: "
                f"cuTensorMapEncodeTiled returned {status}; pass a contiguous array "
                f"(cupy.ascontiguousarray({self._described.name}))"
            )


@functools.cache
def _driver_function() -> Any:
    # It keeps the interpreter's lock: a call takes a microsecond, getting the lock back from
    # another thread may take thousands.
    return driver_by(ctypes.PyDLL).cuTensorMapEncodeTiled
