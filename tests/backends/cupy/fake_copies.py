"""Copies that nothing waits for, streams, and plans that are made in the background: for no GPU."""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pytest

from tileattn.backends.cupy import improvement


class Sent(NamedTuple):
    """A copy of a host array that nothing waits for."""

    address: int
    data: bytes
    memory: Any  # a weak reference to what owns the memory
    stream: int


class Staging:
    """Page-locked memory."""

    def __init__(self, nbytes: int) -> None:
        self.memory = ctypes.create_string_buffer(nbytes)
        self.ptr = ctypes.addressof(self.memory)


class Copies:
    """Copies from page-locked memory, which are complete when an event is found to be."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._staged: WeakValueDictionary[int, Staging] = WeakValueDictionary()
        self._pending: list[tuple[int, int, int]] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import cupy

        monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", self._allocate)
        monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", self._send)
        monkeypatch.setattr(cupy.cuda, "Event", self._event)
        monkeypatch.setattr(improvement, "_pool", lambda: self._gpu.planner)

    def _allocate(self, nbytes: int) -> Staging:
        self._refuse("allocate page-locked memory", self._gpu.capturing)
        made = Staging(nbytes)
        self._staged[made.ptr] = made
        return made

    def _send(self, to: int, at: int, nbytes: int, kind: int, stream: int) -> None:
        self._refuse("copy", self._gpu.capturing)
        if (kind, stream) != (1, self._gpu.stream):
            pytest.fail("the memory of a copy is that of the current stream")
        self._pending.append((to, at, nbytes))
        data = ctypes.string_at(self._staged[at].ptr, nbytes)
        self._gpu.sent.append(Sent(to, data, self._gpu.owners[to], stream))

    def _event(self, *, disable_timing: bool) -> "Event":
        assert disable_timing
        return Event(self)

    def are_done(self, stream: int) -> bool:
        """Return True if a stream has nothing to do, not even copies."""
        self._refuse("query an event", False)
        while self._pending and not self._gpu.copying:
            to, at, nbytes = self._pending.pop()
            ctypes.memmove(to, self._staged[at].ptr, nbytes)
        return not self._pending and stream not in self._gpu.busy

    def _refuse(self, what: str, capturing: bool) -> None:
        """Refuse what would break a capture by another thread, or of the current stream."""
        if self._gpu.mode != 2 or capturing:
            pytest.fail(f"{what}: a capture would fail")  # which nothing suppresses


class Event:
    """Stand in for CuPy's events."""

    def __init__(self, copies: Copies) -> None:
        self._copies, self._stream = copies, -1

    def record(self, stream: Any) -> None:
        self._stream = stream.ptr

    @property
    def done(self) -> bool:
        return self._copies.are_done(self._stream)


class Stream:
    """Stand in for CuPy's streams."""

    def __init__(self, gpu: Any, handle: int) -> None:
        self._gpu, self.ptr, self._before = gpu, handle, handle

    def is_capturing(self) -> bool:
        capturing: bool = self._gpu.capturing
        return capturing

    def __enter__(self) -> None:
        self._before, self._gpu.stream = self._gpu.stream, self.ptr

    def __exit__(self, *_: object) -> None:
        self._gpu.stream = self._before


class Planner:
    """Stand in for the pool of threads that make plans: it makes them when it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, plan: Callable[[], Any]) -> "Future[Any]":
        self.asked.append((Future(), plan))
        return self.asked[-1][0]

    def work(self) -> None:
        """Make all plans that were asked for."""
        while self.asked:
            future, plan = self.asked.pop(0)
            try:
                future.set_result(plan())
            except Exception as error:
                future.set_exception(error)

    def close(self) -> None:
        """Forget what was asked for."""
        for future, _ in self.asked:
            future.cancel()
