"""Fill memory that was never written with NaN, so that a result shows if it was read.

``pytest --poison`` does it for every test, the fixture ``poison`` for one. Bytes 0xFF are NaN in
every floating dtype, and -1 in integers. Buffers that are used again are filled each time.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tileattn.backends.llvm import execute, tasks
from tileattn.backends.numpy.memory import Scratch

BYTE = 0xFF
_BEYOND, _MARK = 1 << 16, 0x5A  # bytes past the end of scratch memory, and what they hold


def install(patch: pytest.MonkeyPatch) -> None:
    """Fill what is allocated from now on, by those of our modules that are loaded."""
    on_host(patch)
    for name, install_in in _LOADED.items():
        if name in sys.modules:
            install_in(patch, sys.modules[name])


def on_host(patch: pytest.MonkeyPatch) -> None:
    """Fill what NumPy allocates, and the buffers of both backends for NumPy arrays."""
    for name in ("empty", "empty_like"):
        patch.setattr(np, name, filling(getattr(np, name)))
    patch.setattr(Scratch, "take", filling(Scratch.take))
    patch.setattr(execute, "_Scratch", LlvmScratch)
    patch.setattr(execute, "_idle", execute._Idle())  # without what is kept from earlier calls
    patch.setattr(tasks, "_QUOTA", 0)  # a kernel returns after each task


def filling(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what returns a NumPy array whose elements are neighbours in some order."""

    def allocated(*arguments: Any, **options: Any) -> Any:
        x = allocate(*arguments, **options)
        if not x.dtype.hasobject and x.size:
            x.reshape(-1, order="A").view(np.uint8).fill(BYTE)
        return x

    return allocated


class LlvmScratch(execute._Scratch):
    """Scratch memory of a worker, filled each time that a kernel gets its address.

    Kernels may not write past its end, where there is more.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size + _BEYOND)
        self.size = size
        self._memory[-_BEYOND:] = _MARK

    @property
    def address(self) -> int:
        """Address of its first byte."""
        self.check()
        self._memory[:-_BEYOND] = BYTE
        return self._address

    @address.setter
    def address(self, address: int) -> None:
        self._address = address

    def check(self) -> None:
        """Fail if a kernel has written past the end."""
        assert (self._memory[-_BEYOND:] == _MARK).all(), "a kernel needs more scratch memory"


# --- on a GPU -------------------------------------------------------------------------------------


@contextmanager
def cupy_pool() -> Iterator[None]:
    """Fill what CuPy's pool gives meanwhile."""
    import cupy

    with cupy.cuda.using_allocator(filling_pool(cupy)):
        yield


def filling_pool(cupy: Any) -> Callable[[int], Any]:
    """Return an allocator of CuPy's that fills memory of its pool on the current stream."""

    def filled(nbytes: int) -> Any:
        return _on_stream(cupy.get_default_memory_pool().malloc(nbytes), nbytes)

    return filled


def _on_stream(memory: Any, nbytes: int) -> Any:
    if nbytes:
        memory.memset_async(BYTE, nbytes)
    return memory


def _in_cupy(patch: pytest.MonkeyPatch, passes: ModuleType) -> None:
    """Fill memory of CuPy's pool, and the workspace of a caller."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):
        return
    cupy.cuda.set_allocator(filling_pool(cupy))
    ensure_fits = passes._ensure_fits

    def fitting(workspace: Any, nbytes: int, device: int) -> None:
        ensure_fits(workspace, nbytes, device)
        _on_stream(workspace.data, workspace.nbytes)

    patch.setattr(passes, "_ensure_fits", fitting)


class _Torch:
    """The module ``torch`` as one of our modules sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"], name)

    def empty(self, *size: Any, **options: Any) -> Any:
        x = sys.modules["torch"].empty(*size, **options)
        x.untyped_storage().fill_(BYTE)
        return x


def _in_torch(patch: pytest.MonkeyPatch, cuda: ModuleType) -> None:
    """Fill memory of PyTorch's allocator that the bridge takes."""
    patch.setattr(cuda, "torch", _Torch())
    cuda._allocator.cache_clear()


def _in_jax(patch: pytest.MonkeyPatch, cuda: ModuleType) -> None:
    """Fill memory of XLA's that the bridge takes, that of results included."""
    from tileattn.backends.cupy.external_memory import memory_at

    allocate = cuda.Memory._allocate

    def filled(self: Any, nbytes: int) -> Any:
        address, owner = allocate(self, nbytes)
        _on_stream(memory_at(address, nbytes, owner, self._device), nbytes)
        return address, owner

    patch.setattr(cuda.Memory, "_allocate", filled)


_LOADED: dict[str, Callable[[pytest.MonkeyPatch, ModuleType], None]] = {
    "tileattn.backends.cupy.cached_passes": _in_cupy,
    "tileattn.torch.cuda": _in_torch,
    "tileattn.jax.cuda": _in_jax,
}
