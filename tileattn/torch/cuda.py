"""Tensors on a GPU as CuPy arrays, and back, or as addresses: one memory, stream and allocator.

PyTorch's caching allocator gives the memory of a call. It is reused in the order of the stream, and
during a capture it comes from the pool of the graph.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from tileattn.backends.cupy.backend import CupyCall
from tileattn.backends.cupy.foreign import cupy_for, memory_at, stream_at


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Have CuPy compute on a device of PyTorch's, on its current stream, in memory of PyTorch's."""
    index = device.index
    there = _device(index) if _cupy().cuda.runtime.getDevice() != index else nullcontext()
    allocator = _cupy().cuda.using_allocator(_allocator(device))
    with there, _current_stream(index), allocator:
        yield


@contextmanager
def _device(index: int) -> Iterator[None]:
    """Make a device the current one of both libraries."""
    with torch.cuda.device(index), _cupy().cuda.Device(index):
        yield


def array_of(x: torch.Tensor) -> Any:
    """View a tensor on a GPU as a CuPy array."""
    cupy, itemsize = _cupy(), x.element_size()
    strides = [n * itemsize for n in x.stride()]
    nbytes = extent(x.shape, x.stride()) * itemsize
    memory = memory_at(x.data_ptr(), nbytes, x, x.device.index)
    return cupy.ndarray(x.shape, _array_dtype(x.dtype), memory, strides)


def tensor_of(x: Any) -> torch.Tensor:
    """View a CuPy array whose memory is a tensor's as a tensor, which is no view for autograd."""
    owner: torch.Tensor = x.data.mem._owner
    result = owner.new_empty(x.shape if not x.size else 0, dtype=_tensor_dtype(x.dtype))
    if not x.size:
        return result
    storage, itemsize = owner.untyped_storage(), x.itemsize
    first = (x.data.ptr - storage.data_ptr()) // itemsize
    return result.set_(storage, first, x.shape, [n // itemsize for n in x.strides])


class Pass:
    """One pass of calls like an earlier one, from addresses alone: no array is made.

    Parameters
    ----------
    call : CupyCall
        The calls of this signature, q, k, v and their like alone.
    deterministic : bool or None
        As the backward pass was asked for; None is the forward pass.
    results : sequence of torch.Tensor
        Have the shapes and dtypes of what the pass writes.
    """

    def __init__(
        self, call: CupyCall, deterministic: bool | None, results: Sequence[torch.Tensor]
    ) -> None:
        device = results[0].device
        self._known, self._deterministic, self._device = call.known, deterministic, device.index
        self._current_device = _cupy().cuda.runtime.getDevice
        # PyTorch takes half a microsecond less for numbers than for a shape.
        self._results = [
            functools.partial(torch.empty, *x.shape, dtype=x.dtype, device=device) for x in results
        ]
        self._bytes = functools.partial(torch.empty, dtype=torch.uint8, device=device)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor] | None:
        """Run it on the current stream; None where the call is not like one that has run."""
        device = self._device
        if self._current_device() != device:
            with _device(device):
                return self(*inputs)
        addresses = [x.data_ptr() for x in inputs]
        executable = self._known(self._deterministic, addresses, device)
        if executable is None:
            return None
        results = [new() for new in self._results]
        addresses += [x.data_ptr() for x in results]
        nbytes, at = executable.plan.workspace.nbytes, 0
        if nbytes:
            workspace = self._bytes(nbytes)  # freed in the order of the stream
            at = workspace.data_ptr()
        executable.launch(addresses, at, _current_stream(device))
        return results


def _current_stream(device: int) -> Any:
    """Give PyTorch's current stream as one of CuPy's: its handle takes 0.1 us."""
    return stream_at(torch._C._cuda_getCurrentRawStream(device))


@functools.lru_cache(maxsize=1024)
def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements from the first of a tensor to its last, those between them included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _cupy() -> Any:
    return cupy_for("tensors on a GPU")


@functools.cache
def _allocator(device: torch.device) -> Callable[[int], Any]:
    """Make an allocator of CuPy's that takes memory from PyTorch's."""
    new = functools.partial(torch.empty, dtype=torch.uint8, device=device)

    def allocate(nbytes: int) -> Any:
        owner = new(nbytes)
        return memory_at(owner.data_ptr(), nbytes, owner, device.index)

    return allocate


@functools.cache
def _array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Give the type that has the same name in NumPy, or in ml_dtypes."""
    return np.dtype(str(dtype).removeprefix("torch."))


@functools.cache
def _tensor_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return getattr(torch, dtype.name)
