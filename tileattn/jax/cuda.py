"""A program's arrays on a GPU as the library's arrays, without copies, on XLA's stream.

XLA provides the memory of a call, and reuses it in stream order.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, Self

import numpy as np

from tileattn.backends.external_memory import ExternalMemory, external_memory
from tileattn.jax.xla_ffi import Frame


@cache
def _memory() -> ExternalMemory:
    return external_memory("cuda", "arrays on a GPU")


class Memory(ExitStack):
    """Context in which the library computes on the program's device and stream, in XLA's memory.

    XLA allocates a program's results before the call. An allocation of the library gets the memory
    of the first unused result of its size, so that most results are computed in place.
    """

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame, self._device = frame, frame.device
        self._external = _memory()
        self._left: list[Any] = []

    def __enter__(self) -> Self:
        super().__enter__()
        memory = self._external
        self.enter_context(memory.device(self._device))
        self.enter_context(memory.stream(self._frame.stream))
        self.enter_context(memory.using(memory.allocator(self._allocate, self._device)))
        return self

    def array(self, address: int, spec: tuple[tuple[int, ...], np.dtype[Any]]) -> Any:
        """View memory of the device as an array."""
        shape, dtype = spec
        nbytes = math.prod(shape) * dtype.itemsize
        return self._external.array(address, nbytes, shape, dtype, None, None, self._device)

    def offer(self, results: Sequence[Any]) -> None:
        """Let later allocations use the memory of results."""
        self._left = list(results)

    def place(self, found: Sequence[Any], results: Sequence[Any]) -> None:
        """Copy results that are not in place; one may occupy the memory of another."""
        at = self._external.address_of
        pairs = zip(found, results, strict=True)
        moved = [(result, x.copy()) for x, result in pairs if at(x) != at(result)]
        for result, x in moved:
            result[...] = x

    def _allocate(self, nbytes: int) -> tuple[int, Any]:
        for n, result in enumerate(self._left):
            if result.nbytes == nbytes:
                return self._external.address_of(self._left.pop(n)), None
        if not nbytes:
            return 0, None
        address, allocated = self._frame.allocate(nbytes)
        self.callback(self._frame.free, *allocated)
        return address, None
