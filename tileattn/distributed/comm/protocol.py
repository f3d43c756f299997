"""Communicators: the ranks of a call, and the messages between them."""

import pickle
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Transfer(Protocol):
    """A pending message."""

    def wait(self) -> None:
        """Wait until its buffer may be used again; raise TimeoutError if it takes too long.

        On a GPU the current stream waits, not the host.
        """


@runtime_checkable
class Cancellable(Protocol):
    """A message that can be cancelled, or asked whether it is complete."""

    def cancel(self) -> bool:
        """Cancel it if possible; return True if its array is no longer read or written."""


@runtime_checkable
class Communicator(Protocol):
    """Messages between ``size`` ranks; this rank is number ``rank``."""

    rank: int
    size: int

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Start to send a contiguous array, which must not change until it has arrived."""

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Start to receive into a contiguous array."""

    def together(self) -> AbstractContextManager[None]:
        """Start the messages of a context together: none waits for another.

        All ranks enter the same contexts in the same order, and a message is sent and received in
        the same context.
        """

    def gather(self, x: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank."""


TIMEOUT = 600.0
"""Seconds that a rank waits for another."""


def as_bytes(x: Array) -> Array:
    """View an array as bytes: MPI has no float16."""
    return x.reshape(-1).view(np.uint8)


def pickled(x: Any) -> Array:
    """Pickle an object into an array of bytes."""
    return np.frombuffer(bytearray(pickle.dumps(x)), np.uint8)


def too_long(what: str, timeout: float) -> TimeoutError:
    """Return the error of a rank that waited too long."""
    return TimeoutError(
        f"waited {timeout:g} s for {what}; it has failed, or needs a longer timeout="
    )
