"""Tensors on a GPU as CuPy arrays, and back, or as addresses: one memory, stream and allocator.

PyTorch's caching allocator gives the memory of a call. It is reused in the order of the stream, and
during a capture it comes from the pool of the graph.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from tileattn.backends.cupy.foreign import cupy_for, memory_at, stream_at
from tileattn.backends.cupy.passes import OwnPieces, Pass
from tileattn.call.sequences import given_for


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
    return cupy.ndarray(x.shape, array_dtype(x.dtype), memory, strides)


def tensor_of(x: Any) -> torch.Tensor:
    """View a CuPy array whose memory is a tensor's as a tensor, which is no view for autograd."""
    owner: torch.Tensor = x.data.mem._owner
    result = owner.new_empty(x.shape if not x.size else 0, dtype=_tensor_dtype(x.dtype))
    if not x.size:
        return result
    storage, itemsize = owner.untyped_storage(), x.itemsize
    first = (x.data.ptr - storage.data_ptr()) // itemsize
    return result.set_(storage, first, x.shape, [n // itemsize for n in x.strides])


class TensorPass:
    """A pass on tensors, in memory of PyTorch's allocator: no array is made.

    Parameters
    ----------
    known : Pass
        What runs it; it is direct.
    names : sequence of str
        Of the tensors that each call brings.
    results : mapping of str to torch.Tensor
        Have the shapes and dtypes of what the pass writes.
    returned : sequence of (str or None)
        Which of them a call returns, None for none.
    """

    def __init__(
        self,
        known: Pass,
        names: Sequence[str],
        results: Mapping[str, torch.Tensor],
        returned: Sequence[str | None],
    ) -> None:
        places = {name: n for n, name in enumerate(names)}
        self._known = known
        self._inputs = itemgetter(*(given_for(name, places) for name in known.inputs))
        self._returned = itemgetter(*map([*results, None].index, returned))
        # PyTorch takes half a microsecond less for numbers than for a shape. Of the gradient of a
        # bias, empty tiles are not written.
        self._results = [
            partial(torch.zeros if name == "dbias" else torch.empty, *x.shape, **_like(x))
            for name, x in results.items()
        ]
        device = next(iter(results.values())).device
        self._device, self._current_device = device.index, _cupy().cuda.runtime.getDevice
        self._bytes = partial(torch.empty, dtype=torch.uint8, device=device)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...] | None:
        """Run it on the current stream; None where no earlier call was like it."""
        device = self._device
        if self._current_device() != device:
            with _device(device):
                return self(tensors)
        results = [new() for new in self._results]
        addresses = [x.data_ptr() for x in (*self._inputs(tensors), *results)]
        nbytes, at = self._known.nbytes, 0
        if nbytes:
            workspace = self._bytes(nbytes)  # freed in the order of the stream
            at = workspace.data_ptr()
        if not self._known.launch(addresses, at, device, _current_stream(device)):
            return None
        found: tuple[torch.Tensor | None, ...] = self._returned((*results, None))
        return found


def _like(x: torch.Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


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
def _allocator(device: torch.device) -> OwnPieces:
    """Make an allocator of CuPy's that takes memory from PyTorch's.

    An operator's results must not be views of each other.
    """
    new = partial(torch.empty, dtype=torch.uint8, device=device)

    def allocate(nbytes: int) -> Any:
        owner = new(nbytes)
        return memory_at(owner.data_ptr(), nbytes, owner, device.index)

    return OwnPieces(allocate)


@functools.cache
def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Give the type that has the same name in NumPy, or in ml_dtypes."""
    return np.dtype(str(dtype).removeprefix("torch."))


@functools.cache
def _tensor_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return getattr(torch, dtype.name)
