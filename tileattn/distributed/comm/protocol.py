"""Communicators: the ranks of a call, and the messages between them."""

import pickle
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Transfer(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Wait until its buffer may be used again; raise TimeoutError where it takes too long.

        On a GPU what follows on the current stream waits, and not the host.
        """


@runtime_checkable
class Cancellable(Protocol):
    """A message that can be ended, or asked whether it is over."""

    def cancel(self) -> bool:
        """End it if that is possible; return True if its array is not read or written any more."""


@runtime_checkable
class Communicator(Protocol):
    """The ranks, and messages between them; ``rank`` is this one's number among ``size``."""

    rank: int
    size: int

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Begin to send a contiguous array, which is not written to until it has arrived."""

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Begin to receive a contiguous array of known shape."""

    def together(self) -> AbstractContextManager[None]:
        """Begin messages at once: none of the context waits for another of them.

        All ranks pass the same contexts in the same order. What one rank sends another there, that
        one receives in its own.
        """

    def gather(self, x: Any) -> list[Any]:
        """Give every rank the objects of all ranks, in their order."""


TIMEOUT = 600.0
"""Seconds that a rank waits for another."""


def as_bytes(x: Array) -> Array:
    """View an array as MPI takes it: it knows no float16."""
    return x.reshape(-1).view(np.uint8)


def pickled(x: Any) -> Array:
    """Write an object as bytes to send."""
    return np.frombuffer(bytearray(pickle.dumps(x)), np.uint8)


def too_long(what: str, timeout: float) -> TimeoutError:
    """Make the error of a rank that has waited too long."""
    return TimeoutError(
        f"waited {timeout:g} s for {what}; it has failed, or is slower: timeout= is how long to "
        "wait"
    )
