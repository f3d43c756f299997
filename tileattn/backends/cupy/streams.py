"""CuPy streams, and the memory that kernels on them may still read."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tileattn.backends.cupy.driver import driver_by

PER_THREAD = 2  # handle of the per-thread default stream, in every thread
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_kept: dict[int, object] = {}


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


def outlive_readers(owner: object, name: tuple[int, int], stream: Any = None) -> None:
    """Keep memory for good if a stream may read it after it is dropped.

    Freed memory is reused by the stream ``name``, on which it was allocated and which does not wait
    for other streams; a graph reads the memory whenever it is replayed.
    """
    if stream_name(stream) != name or is_capturing(stream):
        _kept[id(owner)] = owner
