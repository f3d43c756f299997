"""Device memory of other libraries, as arrays of a backend: what bridges compute in."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tileattn.backends import registry
from tileattn.errors import BackendUnavailableError


class ExternalMemory(Protocol):
    """Memory and streams of another library on one kind of device, used without copies."""

    def current_device(self) -> int:
        """Return the number of the current device."""

    def device(self, index: int) -> AbstractContextManager[Any]:
        """Make a device the current one."""

    def stream(self, handle: int) -> AbstractContextManager[Any]:
        """Return the stream with this handle; within it, work goes to it."""

    def allocator(self, allocate: Callable[[int], tuple[int, Any]], device: int) -> Any:
        """Make an allocator for `using`.

        ``allocate`` takes a number of bytes and returns an address and the owner of the memory.
        """

    def using(self, allocator: Any) -> AbstractContextManager[Any]:
        """Take memory from an allocator; each result gets memory of its own."""

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
        """View memory as an array, which keeps the owner alive. Strides are in bytes."""

    def address_of(self, x: Any) -> int:
        """Return the address of an array."""

    def owner_of(self, x: Any) -> Any:
        """Return the owner of an array's memory."""


def external_memory(kind: str, what: str) -> ExternalMemory:
    """Return the external memory of a kind of device, such as ``"cuda"``, from its backend.

    ``what`` needs it; BackendUnavailableError if the backend cannot run here.
    """
    for name in registry.names():
        backend: Any = registry.get(name)
        if kind in getattr(backend, "external_memory", {}):
            reason = backend.unavailable()
            if reason is not None:
                raise BackendUnavailableError(
                    f"{what} need backend {name!r}, which cannot run here: {reason}"
                )
            found: ExternalMemory = backend.external_memory[kind]()
            return found
    raise BackendUnavailableError(f"{what} need a backend for {kind!r} memory; none is registered")
