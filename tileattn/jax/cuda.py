"""A program's arrays on a GPU as CuPy arrays: one memory, one stream, one allocator.

XLA gives the memory of a call. The next that has it comes later on the same stream.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

from tileattn.backends.cupy.foreign import cupy_for, memory_at, stream_at
from tileattn.backends.cupy.passes import OwnPieces
from tileattn.jax.xla_ffi import Frame


class Memory(ExitStack):
    """Within it CuPy computes on the program's device, on its stream, in memory of XLA's.

    The results of a program have their memory before the call. What the call allocates is there if
    a result of its size is left, so a result that is allocated before others of its size is in its
    place.
    """

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame, self._device = frame, frame.device
        self._cupy = cupy_for("arrays on a GPU")
        self._left: list[Any] = []

    def __enter__(self) -> Self:
        super().__enter__()
        cuda = self._cupy.cuda
        self.enter_context(cuda.Device(self._device))
        self.enter_context(stream_at(self._frame.stream))
        self.enter_context(cuda.using_allocator(OwnPieces(self._allocate)))
        return self

    def array(self, address: int, spec: tuple[tuple[int, ...], np.dtype[Any]]) -> Any:
        """View memory of the device as an array."""
        shape, dtype = spec
        nbytes = math.prod(shape) * dtype.itemsize
        return self._cupy.ndarray(shape, dtype, memory_at(address, nbytes, None, self._device))

    def offer(self, results: Sequence[Any]) -> None:
        """Let what is allocated from now on be results."""
        self._left = list(results)

    def place(self, found: Sequence[Any], results: Sequence[Any]) -> None:
        """Copy what is not in its place; it may be in that of another result."""
        pairs = zip(found, results, strict=True)
        moved = [
            (result, x if isinstance(x, np.ndarray) else x.copy())
            for x, result in pairs
            if isinstance(x, np.ndarray) or x.data.ptr != result.data.ptr
        ]
        for result, x in moved:
            result[...] = self._cupy.asarray(x)

    def _allocate(self, nbytes: int) -> Any:
        for n, result in enumerate(self._left):
            if result.nbytes == nbytes:
                return self._left.pop(n).data
        if not nbytes:
            return memory_at(0, 0, None, self._device)
        address, allocated = self._frame.allocate(nbytes)
        self.callback(self._frame.free, *allocated)
        return memory_at(address, nbytes, None, self._device)
