"""What travels between ranks: one small protocol, and MPI behind it."""

import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.arrays import is_on_gpu, library

Array = NDArray[Any]

TIMEOUT = 600.0
"""Seconds that a rank waits for another."""

_NAPS = 20e-6, 1e-3  # seconds between two looks at what is under way, at least and at most
_SHARE = 0.01  # of the time waited so far: a long wait leaves the core to others
_EAGER = 1000  # looks before the first nap


class Transfer(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Wait until its buffer may be used again; raise TimeoutError where it takes too long.

        On a GPU what follows on the current stream waits, and not the host.
        """


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

    def together(self) -> AbstractContextManager[None]:
        """Begin messages one by one: none waits for another."""
        return nullcontext()

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


def communicator(comm: Any, timeout: float, like: Any = None) -> Communicator:
    """Find out what to send messages with, which are arrays of one kind."""
    if isinstance(comm, Communicator):
        return comm
    torch = sys.modules.get("torch.distributed")  # loaded where there is a process group
    of_torch = isinstance(comm, getattr(torch, "ProcessGroup", ()))
    if is_on_gpu(like):
        return _between_gpus(comm, timeout, of_torch=of_torch)
    if hasattr(comm, "Isend") and hasattr(comm, "allgather"):
        return MPI(comm, timeout)
    if of_torch:
        from tileattn.distributed.process_group import ProcessGroup

        return ProcessGroup(comm, timeout)
    raise TypeError(
        f"comm is {type(comm).__name__}; an mpi4py communicator is accepted, as MPI.COMM_WORLD "
        "(pip install mpi4py mpich), and a torch.distributed.ProcessGroup, as group.WORLD"
    )


def _between_gpus(comm: Any, timeout: float, *, of_torch: bool) -> Communicator:
    if of_torch:
        from tileattn.distributed import nccl

        return nccl.of_torch(comm, timeout)
    if all(hasattr(comm, name) for name in ("rank_id", "recv", "allGather")):
        from tileattn.distributed import nccl

        return nccl.of_cupy(comm, timeout)
    raise TypeError(
        f"comm is {type(comm).__name__}; CuPy arrays need a cupy.cuda.nccl.NcclCommunicator, or a "
        "torch.distributed.ProcessGroup of NCCL"
    )


def sum_in_order(comm: Communicator, x: Array) -> Array:
    """Sum an array over the ranks, in their order: every rank has the same bits."""
    first, *others = gathered(comm, x)
    total = first.copy()
    for other in others:
        total += other
    return total


def gathered(comm: Communicator, x: Array) -> list[Array]:
    """Give every rank the arrays of all ranks, which have one shape, in their order."""
    if not is_on_gpu(x):
        return comm.gather(x)
    x = library(x).ascontiguousarray(x)
    every = [x if n == comm.rank else library(x).empty_like(x) for n in range(comm.size)]
    others = [n for n in range(comm.size) if n != comm.rank]
    with comm.together():
        under_way = [comm.receive(every[n], n, 0) for n in others]
        under_way += [comm.send(x, n, 0) for n in others]
    wait(under_way)
    return every


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
