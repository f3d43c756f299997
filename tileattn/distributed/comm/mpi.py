"""MPI communicators of mpi4py."""

import pickle
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tileattn.distributed.comm.failures import wait
from tileattn.distributed.comm.protocol import Array, Transfer, as_bytes, pickled, too_long

_EAGER = 1000  # tests of a request before the first nap
_NAPS = 20e-6, 1e-3  # shortest and longest nap in seconds
_SHARE = 0.01  # nap relative to the time waited so far: long waits free the core


class MPI:
    """An mpi4py communicator."""

    on_gpu = False

    def __init__(self, comm: Any, timeout: float) -> None:
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._comm, self._timeout = comm, timeout

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Start to send."""
        request = self._comm.Isend(as_bytes(x), to, tag)
        return _Request(request, f"rank {to} to receive", self._timeout)

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Start to receive."""
        request = self._comm.Irecv(as_bytes(x), source, tag)
        return _Request(request, f"rank {source} to send", self._timeout, receives=True)

    def together(self) -> AbstractContextManager[None]:
        """Start messages one by one: MPI messages do not wait for one another."""
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
    """An MPI request, which keeps its buffers alive."""

    def __init__(self, request: Any, what: str, timeout: float, *, receives: bool = False) -> None:
        self._request, self._what, self._timeout = request, what, timeout
        self._to_cancel = receives  # MPI cannot cancel collectives; sends are short

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
        """Cancel a receive; a message that is already matched still arrives."""
        if self._to_cancel:
            self._request.Cancel()
            self._to_cancel = False
        return bool(self._request.Test())
