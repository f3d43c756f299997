"""Fake GPU tensors, whose memory is on the host, for tests without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.backends.cupy.fake_copies import Stream
from tests.backends.cupy.fake_cupy import Machine, machine
from tileattn.backends.cupy.external_memory import CupyMemory
from tileattn.torch import cuda, eager, tensors

STREAM = 11  # handle of PyTorch's current stream

_empty, _host_zeros = torch.empty, torch.zeros


class OnGpu(torch.Tensor):  # type: ignore[misc]  # PyTorch is untyped here
    """A tensor on the host that claims to be on the first GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("cuda:0")
    is_cuda = True

    def get_device(self) -> int:
        return 0


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.detach().as_subclass(OnGpu)


def _made(*size: Any, device: Any = None, **given: Any) -> torch.Tensor:
    if device != OnGpu.device:
        return _empty(*size, device=device, **given)
    # As the allocator of a GPU does, at a multiple of 512 bytes.
    shape = size if isinstance(size[0], int) else size[0]
    n = torch.Size(shape).numel() * given.get("dtype", torch.float32).itemsize
    memory = _empty(n + 512, dtype=torch.uint8).fill_(0xFF)
    first = -memory.data_ptr() % 512
    return on_gpu(memory[first : first + n].view(given.get("dtype", torch.float32)).view(shape))


def _zeros(*size: Any, device: Any = None, **given: Any) -> torch.Tensor:
    if device != OnGpu.device:
        return _host_zeros(*size, device=device, **given)
    return _made(*size, device=device, **given).zero_()


def clear() -> None:
    for kept in (cuda._allocator, cuda.tensor_memory):
        kept.cache_clear()


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Make PyTorch and CuPy find a fake GPU, which only records kernel launches."""
    with machine(monkeypatch) as made:
        import cupy

        monkeypatch.delenv("TILEATTN_BACKEND", raising=False)

        @contextmanager
        def on_device(device: torch.device) -> Iterator[None]:
            stream, made.stream = made.stream, STREAM
            with cupy.cuda.using_allocator(cuda._allocator(device)):
                yield
            made.stream = stream

        tensor_of = cuda.tensor_of
        memory = CupyMemory()
        monkeypatch.setattr(cuda, "_memory", lambda: memory)
        monkeypatch.setattr(cuda, "on_device", on_device)
        monkeypatch.setattr(cuda, "tensor_of", lambda x: on_gpu(tensor_of(x)))
        monkeypatch.setattr(cuda, "_current_stream", lambda _: Stream(made, STREAM))
        for module in (eager, tensors):
            monkeypatch.setattr(module, "PLAIN", {OnGpu, torch.Tensor})
        monkeypatch.setattr(torch, "empty", _made)
        monkeypatch.setattr(torch, "zeros", _zeros)
        zeros_like = torch.zeros_like
        monkeypatch.setattr(torch, "zeros_like", lambda x: on_gpu(zeros_like(x)))
        backward = eager.Call.backward

        def from_autograd(call: Any, needs: Any, saved: Any, tensors: Any, values: Any) -> Any:
            """Mark tensors again: autograd returns other objects than those it saved."""
            saved = {name: on_gpu(x) for name, x in saved.items()}
            return backward(call, needs, saved, [*map(on_gpu, tensors)], values)

        monkeypatch.setattr(eager.Call, "backward", from_autograd)
        clear()
        made.arch = "sm_90a"
        yield made
        clear()
