"""What travels between ranks: one small protocol, and MPI behind it."""

import pickle
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TIMEOUT = 600.0
"""Seconds that a rank waits for another."""

_NAPS = 20e-6, 1e-3  # seconds between two looks at what is under way, at least and at most
_SHARE = 0.01  # of the time waited so far: a long wait leaves the core to others
_EAGER = 1000  # looks before the first nap


class Transfer(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Wait until its buffer may be used again; raise TimeoutError where it takes too long."""


@runtime_checkable
class Communicator(Protocol):
    """The ranks, and messages between them; ``rank`` is this one's number among ``size``."""

    rank: int
    size: int

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Begin to send a contiguous array, which is not written to until it has arrived."""

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Begin to receive a contiguous array of known shape."""

    def gather(self, x: Any) -> list[Any]:
        """Give every rank the objects of all ranks, in their order."""


class MPI:
    """An mpi4py communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Its ranks; all of them take part in each call.
    timeout : float
        Seconds after which a rank that waits for another gives up.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._comm, self._timeout = comm, timeout

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Begin to send."""
        request = self._comm.Isend(as_bytes(x), to, tag)
        return _Request(request, f"rank {to} to receive", self._timeout)

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Begin to receive."""
        request = self._comm.Irecv(as_bytes(x), source, tag)
        return _Request(request, f"rank {source} to send", self._timeout)

    def gather(self, x: Any) -> list[Any]:
        """Gather pickled objects."""
        own = pickled(x)
        sizes = np.empty(self.size, np.int64)
        self._wait(self._comm.Iallgather(np.array([own.size]), sizes))
        every = np.empty(sizes.sum(), np.uint8)
        self._wait(self._comm.Iallgatherv(own, (every, sizes)))
        return [pickle.loads(part.tobytes()) for part in np.split(every, np.cumsum(sizes)[:-1])]

    def _wait(self, request: Any) -> None:
        _Request(request, "the other ranks to take part", self._timeout).wait()


class _Request:
    def __init__(self, request: Any, what: str, timeout: float) -> None:
        self._request, self._what, self._timeout = request, what, timeout

    def wait(self) -> None:
        start, looks = time.monotonic(), 0
        while not self._request.Test():
            looks += 1
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise too_long(self._what, self._timeout)
            if looks > _EAGER:
                time.sleep(min(max(_SHARE * waited, _NAPS[0]), _NAPS[1]))


def communicator(comm: Any, timeout: float) -> Communicator:
    """Find out what to send messages with."""
    if isinstance(comm, Communicator):
        return comm
    if hasattr(comm, "Isend") and hasattr(comm, "allgather"):
        return MPI(comm, timeout)
    torch = sys.modules.get("torch.distributed")  # loaded where there is a process group
    if isinstance(comm, getattr(torch, "ProcessGroup", ())):
        from tileattn.distributed.process_group import ProcessGroup

        return ProcessGroup(comm, timeout)
    raise TypeError(
        f"comm is {type(comm).__name__}; an mpi4py communicator is accepted, as MPI.COMM_WORLD "
        "(pip install mpi4py mpich), and a torch.distributed.ProcessGroup, as group.WORLD"
    )


def sum_in_order(comm: Communicator, x: Array) -> Array:
    """Sum an array over the ranks, in their order: every rank has the same bits."""
    first, *others = comm.gather(x)
    total = np.array(first)
    for other in others:
        total += other
    return total


def wait(transfers: Sequence[Transfer]) -> None:
    """Wait for all of them."""
    for transfer in transfers:
        transfer.wait()


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
