"""NCCL communicators of CuPy and PyTorch, for ranks with a GPU each.

Transfers are dependencies between streams: the host waits only for gathered objects. NCCL has no
tags. Messages between two ranks arrive in order, and the messages of a step start `together`: if
one waited for another, all later messages would be blocked.

For a process group of PyTorch a CuPy communicator is created, if CuPy finds NCCL: a message then
takes a fraction of the host time, and its start is known.
"""

import functools
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tileattn.distributed.comm.protocol import TIMEOUT, Array, Transfer, pickled, too_long

_HEAD, _LENGTH = 4096, 8  # bytes of the first gather, and of the size in it
_NAP = 20e-6  # seconds between two queries of an event


class _Nccl:
    """Messages grouped into steps, for both libraries."""

    rank: int
    size: int
    on_gpu = True

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._step: _Step | None = None
        self.validated: dict[Any, Any] = {}  # cache of validated calls

    def send(self, x: Array, to: int, tag: int) -> Transfer:  # noqa: ARG002 - NCCL has none
        """Start to send."""
        return self._begun(x, to, sends=True)

    def receive(self, x: Array, source: int, tag: int) -> Transfer:  # noqa: ARG002 - as above
        """Start to receive."""
        return self._begun(x, source, sends=False)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start all messages together, at the end of the context."""
        self._step = step = _Step()
        try:
            yield
        finally:
            self._step = None
        if step.messages:
            self._begin(step)

    def gather(self, x: Any) -> list[Any]:
        """Gather pickled objects through the GPU; the host waits for them."""
        own = pickled(x)
        every = self._gathered(_framed(own, _HEAD))
        sizes = every[:, :_LENGTH].copy().view(np.int64)[:, 0]
        if int(sizes.max()) > _HEAD - _LENGTH:
            every = self._gathered(_framed(own, _LENGTH + int(sizes.max())))
        return [
            pickle.loads(part[_LENGTH : _LENGTH + size].tobytes())
            for part, size in zip(every, sizes, strict=True)
        ]

    def _begun(self, x: Array, peer: int, *, sends: bool) -> Transfer:
        if self._step is None:
            with self.together():
                return self._begun(x, peer, sends=sends)
        self._step.messages.append((x, peer, sends))
        return self._step

    def _wait(self, done: Any) -> None:
        """Wait until ``done()`` is true."""
        start = time.monotonic()
        while not done():
            if time.monotonic() - start > self.timeout:
                raise too_long("the other ranks to take part", self.timeout)
            time.sleep(_NAP)

    def _begin(self, step: "_Step") -> None:
        raise NotImplementedError

    def _gathered(self, own: Array) -> Array:
        """Return the bytes of all ranks, as many from each as from this one."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Stop kernels that would wait forever after a failed call."""


class _Step:
    """Messages that start together; they keep their arrays alive."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, int, bool]] = []
        self.dependencies: list[Any] = []  # each makes the current stream wait
        self.is_over: Callable[[], bool] = lambda: True  # nothing has started

    def wait(self) -> None:
        """Make the current stream wait; later work on it may reuse the memory."""
        for wait in self.dependencies:
            wait()

    def cancel(self) -> bool:
        """Return True if it is complete: its communicator was aborted, or is PyTorch's."""
        return self.is_over()


class CupyNccl(_Nccl):
    """A CuPy NCCL communicator."""

    def __init__(self, comm: Any, timeout: float) -> None:
        import cupy
        from cupy.cuda import nccl

        super().__init__(timeout)
        self._cupy, self._nccl, self._comm = cupy, nccl, comm
        self.rank, self.size = int(comm.rank_id()), int(comm.size())
        # High priority: its few thread blocks start even if a kernel fills the GPU.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self._last = self._waited = 0  # last step that has started, and last one waited for

    def _begin(self, step: _Step) -> None:
        current = self._cupy.cuda.get_current_stream()
        self._stream.wait_event(self._recorded(current))
        begun = self._recorded(self._stream)
        self._nccl.groupStart()
        try:
            for x, peer, sends in step.messages:
                begin = self._comm.send if sends else self._comm.recv
                begin(x.data.ptr, x.nbytes, self._nccl.NCCL_UINT8, peer, self._stream.ptr)
        finally:
            self._nccl.groupEnd()
        # A persistent kernel leaves no SM for messages that start later, so it must start after
        # them. If earlier messages are pending, waiting for them would cost more.
        if self._waited == self._last:
            current.wait_event(begun)
        self._last += 1
        arrived, number = self._recorded(self._stream), self._last

        def wait() -> None:
            self._cupy.cuda.get_current_stream().wait_event(arrived)
            self._waited = max(self._waited, number)

        step.dependencies.append(wait)
        step.is_over = lambda: bool(arrived.done)

    def _gathered(self, own: Array) -> Array:
        cupy, pool = self._cupy, self._cupy.get_default_memory_pool().malloc
        with cupy.cuda.using_allocator(pool), self._stream:
            sent, every = cupy.asarray(own), cupy.empty((self.size, own.size), np.uint8)
            kind = self._nccl.NCCL_UINT8
            self._comm.allGather(sent.data.ptr, every.data.ptr, own.size, kind, self._stream.ptr)
            event = self._recorded(self._stream)
            self._wait(lambda: event.done)
            found: Array = every.get(stream=self._stream)
            self._stream.synchronize()
        return found

    def give_up(self) -> None:
        """Abort the communicator and all its kernels."""
        self._comm.abort()

    def _recorded(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        stream.record(event)
        return event


class TorchNccl(_Nccl):
    """A process group of PyTorch whose messages between GPUs go through NCCL."""

    def __init__(self, group: Any, timeout: float) -> None:
        import cupy
        import torch.distributed

        super().__init__(timeout)
        self._cupy, self._torch, self._group = cupy, torch, group
        self.rank, self.size = int(group.rank()), int(group.size())

    def _begin(self, step: _Step) -> None:
        of_torch = self._torch.distributed
        device = step.messages[0][0].data.device_id
        with self._stream(device):
            operations = [
                of_torch.P2POp(
                    of_torch.isend if sends else of_torch.irecv,
                    self._torch.as_tensor(x.reshape(-1).view(np.uint8), device=f"cuda:{device}"),
                    group=self._group,
                    group_peer=peer,
                )
                for x, peer, sends in step.messages
                if x.size
            ]
            works = of_torch.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            with self._stream(device):
                for work in works:
                    work.wait()

        step.dependencies.append(wait)
        step.is_over = lambda: all(work.is_completed() for work in works)

    def _gathered(self, own: Array) -> Array:
        torch, index = self._torch, self._cupy.cuda.runtime.getDevice()
        with self._stream(index):
            sent = torch.from_numpy(own).to(f"cuda:{index}")
            every = sent.new_empty(self.size * own.size)
            torch.distributed.all_gather_into_tensor(every, sent, group=self._group)
            event = torch.cuda.Event()
            event.record()
            self._wait(event.query)
            found: Array = every.cpu().numpy().reshape(self.size, own.size)
        return found

    @contextmanager
    def _stream(self, device: int) -> Iterator[None]:
        """Make CuPy's current stream the current stream of PyTorch."""
        torch, handle = self._torch, self._cupy.cuda.get_current_stream().ptr
        if handle == 0:
            stream = torch.cuda.default_stream(device)
        else:
            stream = torch.cuda.ExternalStream(handle, device=device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield


def of_cupy(comm: Any, timeout: float) -> _Nccl:
    """Return the wrapper of a communicator, the same each time."""
    return _with_timeout(CupyNccl, comm, timeout)


def of_torch(group: Any, timeout: float) -> _Nccl:
    """Return the wrapper of a process group, the same each time."""
    comm = _comm_of(group, timeout)
    return _with_timeout(TorchNccl, group, timeout) if comm is None else of_cupy(comm, timeout)


def _with_timeout(kind: Any, comm: Any, timeout: float) -> _Nccl:
    found: _Nccl = _wrapper(kind, comm)
    found.timeout = timeout
    return found


@functools.lru_cache(maxsize=32)
def _wrapper(kind: Any, comm: Any) -> Any:
    return kind(comm, TIMEOUT)


_comms = WeakKeyDictionary[Any, Any]()  # by process group


def _comm_of(group: Any, timeout: float) -> Any:
    """Return a CuPy communicator for a process group; None if CuPy does not find NCCL."""
    from cupy.cuda import nccl

    if group not in _comms:
        ranks = TorchNccl(group, timeout)
        is_first = ranks.rank == 0 and nccl.available
        names = ranks.gather(nccl.get_unique_id() if is_first else nccl.available)
        # NCCL waits for all ranks without a timeout; they have all just gathered.
        made = all(names) and nccl.NcclCommunicator(ranks.size, names[0], ranks.rank)
        _comms[group] = made or None
    return _comms[group]


def _framed(own: Array, nbytes: int) -> Array:
    """Return a buffer with a size and as many bytes as fit."""
    found = np.zeros(nbytes, np.uint8)
    found[:_LENGTH] = np.array([own.size], np.int64).view(np.uint8)
    some = own[: nbytes - _LENGTH]
    found[_LENGTH : _LENGTH + some.size] = some
    return found
