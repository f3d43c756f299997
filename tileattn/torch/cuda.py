"""Tensors on a GPU as the library's arrays or as addresses, without copies.

A call runs on PyTorch's current stream, in memory of PyTorch's caching allocator. PyTorch reuses
this memory in stream order; during a capture it comes from the graph's memory pool.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from tileattn.backends.external_memory import ExternalMemory, external_memory
from tileattn.call.prepared import AddressPass, KnownKind
from tileattn.call.sequences import given_for


@functools.cache
def _memory() -> ExternalMemory:
    return external_memory("cuda", "tensors on a GPU")


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make the library compute on a device, on PyTorch's current stream, in PyTorch's memory."""
    index, memory = device.index, _memory()
    there = _device(index) if memory.current_device() != index else nullcontext()
    with there, _current_stream(index), memory.using(_allocator(device)):
        yield


@contextmanager
def _device(index: int) -> Iterator[None]:
    """Make a device current for PyTorch and for the library."""
    with torch.cuda.device(index), _memory().device(index):
        yield


def array_of(x: torch.Tensor) -> Any:
    """View a tensor on a GPU as an array."""
    itemsize = x.element_size()
    strides = [n * itemsize for n in x.stride()]
    nbytes = extent(x.shape, x.stride()) * itemsize
    dtype = array_dtype(x.dtype)
    return _memory().array(x.data_ptr(), nbytes, x.shape, dtype, strides, x, x.device.index)


def tensor_of(x: Any) -> torch.Tensor:
    """Make a tensor of an array in a tensor's memory; autograd does not see it as a view."""
    owner: torch.Tensor = _memory().owner_of(x)
    result = owner.new_empty(x.shape if not x.size else 0, dtype=_tensor_dtype(x.dtype))
    if not x.size:
        return result
    storage, itemsize = owner.untyped_storage(), x.itemsize
    first = (_memory().address_of(x) - storage.data_ptr()) // itemsize
    return result.set_(storage, first, x.shape, [n // itemsize for n in x.strides])


class _Bytes:
    """Memory of PyTorch, and its address."""

    __slots__ = ("_tensor", "ptr")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.ptr = tensor, tensor.data_ptr()


class TensorMemory:
    """The `tileattn.call.prepared.DeviceMemory` of PyTorch on a GPU.

    Parameters
    ----------
    device : torch.device
        The GPU.
    """

    in_bytes = False

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        self._bytes = partial(torch.empty, dtype=torch.uint8, device=device)
        self.device = _memory().current_device
        self.stream = partial(_current_stream, device.index)

    def numbers(self, device: int, arrays: Sequence[torch.Tensor]) -> list[int] | None:
        found: list[int] = []
        for x in arrays:
            if x.get_device() != device:
                return None
            found += x.shape
            found += x.stride()
            found.append(x.data_ptr())
        return found

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[torch.Tensor, int]:
        x = torch.empty(shape, dtype=_tensor_dtype(dtype), device=self._device)
        return x, x.data_ptr()

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[torch.Tensor, int]:
        x = torch.zeros(shape, dtype=_tensor_dtype(dtype), device=self._device)
        return x, x.data_ptr()

    def allocate(self, nbytes: int) -> _Bytes:
        return _Bytes(self._bytes(nbytes))


tensor_memory = functools.cache(TensorMemory)


def first_run(
    known: KnownKind,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    values: Mapping[str, Any],
    deterministic: bool | None,
    gradients: tuple[str, ...],
) -> Any:
    """Run a pass of a known kind for numbers that were not seen before; None if it must be planned.

    ``names`` are the names of the first tensors: q, k, v and options. Then follow dout, out and lse
    in the backward pass, for which ``deterministic`` is not None; it also computes ``gradients`` of
    options.
    """
    if known.call is None:
        return None
    count, rows, options = len(names), tensors, values
    if count > 3:
        rows = *tensors[:3], *tensors[count:]
        options = {**values, **dict(zip(names[3:], tensors[3:count], strict=True))}
    memory = tensor_memory(tensors[0].device)
    return known.call.first(known.kind, rows, options, deterministic, memory, gradients)


class TensorPass:
    """A forward or backward pass by the addresses of tensors: it makes no arrays.

    Parameters
    ----------
    known : AddressPass
        Launches the kernels.
    names : sequence of str
        Names of the tensors that each call brings.
    results : mapping of str to torch.Tensor
        Tensors with the shapes and dtypes of the results.
    returned : sequence of (str or None)
        Names of the results that a call returns; None stands for a gradient that is not needed.
    """

    def __init__(
        self,
        known: AddressPass,
        names: Sequence[str],
        results: Mapping[str, torch.Tensor],
        returned: Sequence[str | None],
    ) -> None:
        places = {name: n for n, name in enumerate(names)}
        self._known = known
        self._inputs = itemgetter(*(given_for(name, places) for name in known.inputs))
        self._returned = itemgetter(*map([*results, None].index, returned))
        # torch.empty takes 0.5 us less for numbers than for a shape. The gradient of a bias starts
        # from zeros because the kernels do not write its empty tiles.
        self._results = [
            partial(torch.zeros if name == "dbias" else torch.empty, *x.shape, **_like(x))
            for name, x in results.items()
        ]
        device = next(iter(results.values())).device
        self._device, self._current_device = device.index, _memory().current_device
        self._bytes = partial(torch.empty, dtype=torch.uint8, device=device)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...] | None:
        """Run the pass on the current stream; return None if the launch needs a new plan."""
        device = self._device
        if self._current_device() != device:
            with _device(device):
                return self(tensors)
        results = [new() for new in self._results]
        addresses = [x.data_ptr() for x in (*self._inputs(tensors), *results)]
        nbytes, at = self._known.nbytes, 0
        if nbytes:
            workspace = self._bytes(nbytes)  # PyTorch reuses it in stream order
            at = workspace.data_ptr()
        if not self._known.launch(addresses, at, device, _current_stream(device)):
            return None
        found: tuple[torch.Tensor | None, ...] = self._returned((*results, None))
        return found


def _like(x: torch.Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


def _current_stream(device: int) -> Any:
    """Return PyTorch's current stream as the library's; reading the handle takes 0.1 us."""
    return _memory().stream(torch._C._cuda_getCurrentRawStream(device))


@functools.lru_cache(maxsize=1024)
def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements from a tensor's first to its last in memory, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


@functools.cache
def _allocator(device: torch.device) -> Any:
    """Make an allocator of PyTorch memory, with a tensor for each result.

    PyTorch requires that the results of an operator are not views of each other.
    """
    new = partial(torch.empty, dtype=torch.uint8, device=device)

    def allocate(nbytes: int) -> tuple[int, Any]:
        owner = new(nbytes)
        return owner.data_ptr(), owner

    return _memory().allocator(allocate, device.index)


@functools.cache
def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the dtype with the same name in NumPy or ml_dtypes."""
    return np.dtype(str(dtype).removeprefix("torch."))


@functools.cache
def _tensor_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return getattr(torch, dtype.name)
