"""CuPy arrays in host memory, and kernels that only take note of being started: for no GPU."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tileattn import backends
from tileattn.backends import cupy_backend
from tileattn.kernels import call
from tileattn.kernels import compile as compiler
from tileattn.kernels.key import KernelKey
from tileattn.kernels.params import PARAMS

BYTES = 1 << 24


class Machine:
    """What was asked of the GPU that is not there.

    Attributes
    ----------
    launches : list of (KernelKey, int, int, numpy.void)
        Kernel, blocks, dynamic shared memory and parameter block of each launch.
    allowed : list of (KernelKey, int)
        Kernels that were let have dynamic shared memory.
    device : int
        CuPy's current device.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[KernelKey, int, int, Any]] = []
        self.allowed: list[tuple[KernelKey, int]] = []
        self.device = 0
        self._memory = np.zeros(BYTES, np.uint8)
        self._start = -self._memory.ctypes.data % 512
        self._used = self._start

    def allocate(self, nbytes: int, device: int | None = None) -> Any:
        """Give memory as CuPy's allocators do, at a multiple of 512 bytes; it is never taken back.

        Whatever is left over from earlier is overwritten with NaN.
        """
        from cupy.cuda import memory

        if self._used + nbytes > BYTES:
            self._used = self._start
        place = self._memory[self._used :]
        place[:nbytes] = 0xFF
        self._used += -(-max(nbytes, 1) // 512) * 512
        owner = memory.UnownedMemory(
            place.ctypes.data, max(nbytes, 1), self, self.device if device is None else device
        )
        return memory.MemoryPointer(owner, 0)

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32, device: int = 0) -> Any:
        """Make an array on a device."""
        import cupy

        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * kind.itemsize
        return cupy.ndarray(shape, kind, self.allocate(nbytes, device))

    def load(self, key: KernelKey) -> Any:
        """Stand in for ``kernels.compile.load``."""

        def start(grid: Any, threads: Any, arguments: Any, shared: int) -> None:
            assert threads == (key.threads,)
            (cells,) = arguments
            block = ctypes.string_at(cells.address, PARAMS.itemsize)
            self.launches.append((key, *grid, shared, np.frombuffer(block, PARAMS)[0]))

        def allow(nbytes: int) -> None:
            self.allowed.append((key, nbytes))

        return SimpleNamespace(
            key=key,
            arch="sm_90a",
            function=start,
            allow_shared=allow,
            registers=100,
            local_bytes=0,
            shared_bytes=64,
            occupancy=lambda threads, shared: 2,  # noqa: ARG005 - the driver's names
        )


class Pointer:
    """Stand in for ``cupy.cuda.function.CPointer``, whose address cannot be read."""

    def __init__(self, address: int) -> None:
        self.address = address


@contextmanager
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Let CuPy and the backend find a GPU.

    Parameters
    ----------
    monkeypatch : pytest.MonkeyPatch
        Takes everything back.

    Yields
    ------
    Machine
        The GPU.
    """
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    made = Machine()
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: made.device)
    monkeypatch.setattr(cupy, "zeros", made.array)
    monkeypatch.setattr(cupy.cuda.function, "CPointer", Pointer)
    monkeypatch.setattr(compiler, "load", made.load)
    monkeypatch.setattr(call, "_shared_limit", lambda device: 227 * 1024 - device)
    monkeypatch.setattr(call, "_cache_bytes", lambda device: (50 << 20) - device)
    monkeypatch.setattr(cupy_backend, "_unavailable", lambda: None)
    backends.KNOWN.clear()
    cupy.cuda.set_allocator(made.allocate)
    try:
        yield made
    finally:
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
        backends.KNOWN.clear()
