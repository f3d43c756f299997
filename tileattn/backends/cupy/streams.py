"""Streams of CuPy's, and what kernels on them may still read."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tileattn.backends.cupy.driver import driver_by

PER_THREAD = 2  # the handle, in every thread, of the default stream that is the thread's own
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_kept: dict[int, object] = {}


def current_stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()


def is_capturing(stream: Any = None) -> bool:
    """Whether a stream, CuPy's current one by default, takes down a graph instead of running it."""
    return bool((stream or current_stream()).is_capturing())


@contextmanager
def unrestricted() -> Iterator[None]:
    """Let this thread call what would break captures of others, as far as CUDA knows."""
    exchange = driver_by(ctypes.PyDLL).cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def stream_name(stream: Any = None) -> tuple[int, int]:
    """Name a stream: its handle, and the thread where that decides, too."""
    handle: int = (stream or current_stream()).ptr
    return handle, threading.get_ident() if handle == PER_THREAD else 0


def uploaded(x: np.ndarray[Any, Any]) -> Any:
    """Copy to the GPU, for later calls, too: complete before any stream may read it.

    The memory is of CuPy's own pool. An allocator that the caller has set is for what ends with the
    call: ``torch.compile``, for one, refuses what stays in the memory of a CUDA graph.
    """
    import cupy

    with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
        return cupy.asarray(x, blocking=True)


def outlive_readers(owner: object, name: tuple[int, int], stream: Any = None) -> None:
    """Keep memory for good where what a stream is given may read it after it is dropped.

    Freed memory is for the stream of this name, on which it was taken, and which does not wait for
    others; and a graph reads it whenever it is replayed.
    """
    if stream_name(stream) != name or is_capturing(stream):
        _kept[id(owner)] = owner
