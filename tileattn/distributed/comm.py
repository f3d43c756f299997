"""What travels between ranks: MPI behind the protocol of communicators, and what uses it."""

import math
import numbers
import pickle
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tileattn.distributed.arrays import is_on_gpu, library
from tileattn.distributed.ranks import Array, Communicator, Ranks, Transfer, state_of, wait

TIMEOUT = 600.0
"""Seconds that a rank waits for another."""

_NAPS = 20e-6, 1e-3  # seconds between two looks at what is under way, at least and at most
_SHARE = 0.01  # of the time waited so far: a long wait leaves the core to others
_EAGER = 1000  # looks before the first nap


class MPI:
    """An mpi4py communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Its ranks; all of them take part in each call.
    timeout : float
        Seconds after which a rank that waits for another gives up.
    """

    on_gpu = False

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
        return _Request(request, f"rank {source} to send", self._timeout, receives=True)

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
        wait([_Request(request, "the other ranks to take part", self._timeout)])


class _Request:
    """A request of MPI, which holds its buffers."""

    def __init__(self, request: Any, what: str, timeout: float, *, receives: bool = False) -> None:
        self._request, self._what, self._timeout = request, what, timeout
        self._to_cancel = receives  # MPI cancels no collectives, and sends are not worth it

    def wait(self) -> None:
        start, looks = time.monotonic(), 0
        while not self._request.Test():
            looks += 1
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise too_long(self._what, self._timeout)
            if looks > _EAGER:
                time.sleep(min(max(_SHARE * waited, _NAPS[0]), _NAPS[1]))

    def cancel(self) -> bool:
        """Cancel a receive; a message that has been matched still arrives."""
        if self._to_cancel:
            self._request.Cancel()
            self._to_cancel = False
        return bool(self._request.Test())


def communicator(comm: Any, timeout: float = TIMEOUT, like: Any = None) -> Ranks:
    """Find out what to send messages with, which are arrays of one kind.

    Raise RuntimeError if an earlier call has failed between its messages. A timeout that
    `check_timeout` refuses counts as the default, so that this rank can tell the others.
    """
    link = comm if isinstance(comm, Ranks) else _linked(comm, timeout, like)
    link.ensure_usable()
    return link


def check_timeout(timeout: Any) -> None:
    """Raise if a timeout is no positive number of seconds."""
    must = "must be a positive, finite number of seconds"
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout {must}; got {timeout!r}")
    if not 0.0 < float(timeout) < math.inf:
        raise ValueError(f"timeout {must}; got {timeout!r}")


def _linked(comm: Any, timeout: Any, like: Any) -> Ranks:
    try:
        check_timeout(timeout)
    except (TypeError, ValueError):
        timeout = TIMEOUT
    if isinstance(comm, Communicator):
        return Ranks(comm, state_of(comm))
    torch = sys.modules.get("torch.distributed")  # loaded where there is a process group
    of_torch = isinstance(comm, getattr(torch, "ProcessGroup", ()))
    if hasattr(comm, "Isend") and hasattr(comm, "allgather"):
        return Ranks(MPI(comm, timeout), state_of(comm))
    if of_torch and not is_on_gpu(like):
        from tileattn.distributed.process_group import ProcessGroup

        return Ranks(ProcessGroup(comm, timeout), state_of(comm))
    if of_torch or all(hasattr(comm, name) for name in ("rank_id", "recv", "allGather")):
        from tileattn.distributed import nccl

        ranks = nccl.of_torch(comm, timeout) if of_torch else nccl.of_cupy(comm, timeout)
        return Ranks(ranks, state_of(ranks))
    raise TypeError(
        f"comm is {type(comm).__name__}; an mpi4py communicator is accepted, as MPI.COMM_WORLD "
        "(pip install mpi4py mpich), a torch.distributed.ProcessGroup, as group.WORLD, and for "
        "CuPy arrays a cupy.cuda.nccl.NcclCommunicator"
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
