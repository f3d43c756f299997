"""CUDA memory and streams of other libraries, as CuPy objects."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tileattn.backends.cupy.cached_passes import SeparateAllocations


class _Handle(NamedTuple):
    """A stream in the form that CuPy requires."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@functools.lru_cache(maxsize=1024)
def stream_at(handle: int) -> Any:
    """Return a stream as CuPy's. Libraries have few streams and keep them."""
    import cupy

    return cupy.cuda.Stream.from_external(_Handle(handle))


def memory_at(address: int, nbytes: int, owner: Any, device: int) -> Any:
    """View memory, which its owner keeps alive, as CuPy memory."""
    import cupy

    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, nbytes, owner, device), 0)


class CupyMemory:
    """The `tileattn.backends.external_memory.ExternalMemory` of CUDA devices."""

    def __init__(self) -> None:
        import cupy

        self._ndarray = cupy.ndarray
        self.current_device = cupy.cuda.runtime.getDevice
        self.device = cupy.cuda.Device
        self.stream: Callable[[int], Any] = stream_at
        self.using = cupy.cuda.using_allocator

    def allocator(self, allocate: Callable[[int], tuple[int, Any]], device: int) -> Any:
        def memory(nbytes: int) -> Any:
            address, owner = allocate(nbytes)
            return memory_at(address, nbytes, owner, device)

        return SeparateAllocations(memory)

    def array(
        self,
        address: int,
        nbytes: int,
        shape: Sequence[int],
        dtype: Any,
        strides: Sequence[int] | None,
        owner: Any,
        device: int,
    ) -> Any:
        return self._ndarray(shape, dtype, memory_at(address, nbytes, owner, device), strides)

    def address_of(self, x: Any) -> int:
        address: int = x.data.ptr
        return address

    def owner_of(self, x: Any) -> Any:
        return x.data.mem._owner
