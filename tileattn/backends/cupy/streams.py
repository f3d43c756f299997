"""CuPy streams, and the memory that kernels on them may still read."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import numpy as np

from tileattn.backends.cupy.driver import driver_by

PER_THREAD = 2  # handle of the per-thread default stream, in every thread
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def current_stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()


def is_capturing(stream: Any = None) -> bool:
    """Return True if a stream, by default CuPy's current one, is being captured."""
    return bool((stream or current_stream()).is_capturing())


@contextmanager
def unrestricted() -> Iterator[None]:
    """Let this thread make calls that CUDA forbids while another thread captures."""
    exchange = driver_by(ctypes.PyDLL).cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def stream_name(stream: Any = None) -> tuple[int, int]:
    """Name a stream: by its handle, and for a per-thread default stream by its thread."""
    handle: int = (stream or current_stream()).ptr
    return handle, threading.get_ident() if handle == PER_THREAD else 0


def uploaded(x: np.ndarray[Any, Any]) -> Any:
    """Copy an array to the GPU for later calls; the copy is complete before any stream reads it.

    The memory comes from CuPy's own pool. An allocator set by the caller is for memory that ends
    with the call: ``torch.compile``, for example, refuses anything that stays in the memory of a
    CUDA graph.
    """
    import cupy

    with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
        return cupy.asarray(x, blocking=True)


class Sending:
    """Copies of host arrays to the GPU that nothing waits for, on CuPy's current stream.

    A copy passes through page-locked memory, which is kept until the copy is complete.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._event: Any = None

    def __call__(self, x: np.ndarray[Any, Any]) -> Any:
        """Start to copy an array; no other stream may read it yet."""
        import cupy
        from cupy.cuda import runtime

        x, stream = np.ascontiguousarray(x), current_stream()
        with unrestricted(), cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
            staging = cupy.cuda.alloc_pinned_memory(max(x.nbytes, 1))
            ctypes.memmove(staging.ptr, x.ctypes.data, x.nbytes)
            there = cupy.ndarray(x.shape, x.dtype)
            copied = there.data.ptr, staging.ptr, x.nbytes
            runtime.memcpyAsync(*copied, runtime.memcpyHostToDevice, stream.ptr)
            self._held.append(staging)
            self._event = cupy.cuda.Event(disable_timing=True)
            self._event.record(stream)
        return there

    def is_done(self) -> bool:
        """Return True if all copies are complete: any stream may read them."""
        if self._event is not None:
            with unrestricted():
                if not self._event.done:
                    return False
        self._held.clear()
        return True


class Uploaded:
    """Arrays on the GPU that kernels on any stream read.

    Freed memory is reused by the stream on which it was allocated, which does not wait for other
    streams. So when this object dies, the arrays stay until kernels on other streams have read
    them. They stay for good if such a kernel was captured: a graph may be replayed at any time.
    """

    def __init__(
        self,
        arrays: Iterable[np.ndarray[Any, Any]],
        upload: Callable[[np.ndarray[Any, Any]], Any] = uploaded,
    ) -> None:
        self.arrays = tuple(map(upload, arrays))
        self._stream = stream_name()
        self._events: dict[tuple[int, int], Any] = {}  # after the last reader on other streams
        finalize(self, _release, self.arrays, self._events).atexit = False

    def was_read(self, stream: Any = None) -> None:
        """Take note of a kernel that was started on a stream, by default CuPy's current one."""
        import cupy

        stream = stream or current_stream()
        if stream.is_capturing():
            _captured[id(self)] = self
        elif (name := stream_name(stream)) != self._stream:
            event = self._events.get(name)
            if event is None:
                event = self._events.setdefault(name, cupy.cuda.Event(disable_timing=True))
            event.record(stream)


_captured: dict[int, Uploaded] = {}
_released: deque[tuple[tuple[Any, ...], dict[Any, Any]]] = deque()
"""Arrays whose owner has died, and the events for which they wait."""


def _release(arrays: tuple[Any, ...], events: dict[Any, Any]) -> None:
    """Free arrays when their events are complete, and those that were released earlier."""
    if not events:
        return
    _released.append((arrays, events))
    with unrestricted():
        for _ in range(len(_released)):
            try:
                waiting = _released.popleft()
            except IndexError:  # another thread looks at them too
                return
            if not all(map(_is_complete, waiting[1].values())):
                _released.append(waiting)


def _is_complete(event: Any) -> bool:
    try:
        return bool(event.done)
    except Exception:  # the context is broken, and runs nothing any more
        return True
