"""Memory and streams of another library, as CuPy's."""

import functools
from typing import Any, NamedTuple

from tileattn.backends.cupy.backend import CupyBackend
from tileattn.errors import BackendUnavailableError


class _Handle(NamedTuple):
    """A stream, as CuPy asks for it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@functools.cache
def cupy_for(what: str) -> Any:
    """Import CuPy for what needs it; raise BackendUnavailableError where it cannot run."""
    reason = CupyBackend().unavailable()
    if reason is not None:
        raise BackendUnavailableError(f"{what} need CuPy, which cannot run here: {reason}")
    import cupy

    return cupy


@functools.cache
def stream_at(handle: int) -> Any:
    """Give a stream as one of CuPy's; libraries have few of them, and keep them."""
    import cupy

    return cupy.cuda.Stream.from_external(_Handle(handle))


def memory_at(address: int, nbytes: int, owner: Any, device: int) -> Any:
    """View memory that an owner keeps as CuPy's."""
    import cupy

    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, nbytes, owner, device), 0)
