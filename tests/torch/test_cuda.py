"""Tensors on a GPU, tested without one: layouts, devices and missing libraries."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tileattn.backends.cupy.backend import CupyBackend  # noqa: E402 - as above
from tileattn.backends.cupy.external_memory import CupyMemory  # noqa: E402 - as above
from tileattn.errors import BackendUnavailableError, UnsupportedError  # noqa: E402 - as above
from tileattn.torch import attention, cuda  # noqa: E402 - as above
from tileattn.torch.flash_attn import flash_attn_with_kvcache  # noqa: E402 - as above


def test_the_extent_reaches_the_last_element() -> None:
    x = torch.arange(2 * 3 * 8 * 5).view(2, 3, 8, 5)
    views = [x, x.transpose(1, 2), x[:, 1:, ::3], x[..., :2], x[:1, :1].expand(4, 7, 8, 5), x[0:0]]
    for view in (*views, x[1, 1, 1, 1]):
        flat = x.flatten()[view.storage_offset() :]
        expected = int(view.max()) - int(flat[0]) + 1 if view.numel() else 0
        assert cuda.extent(view.shape, view.stride()) == expected


def elsewhere(where: str, x: Any) -> Any:
    """Make a tensor that claims to be on another device."""
    plain = {"__torch_function__": torch._C._disabled_torch_function_impl}
    kind = type("Elsewhere", (torch.Tensor,), {"device": torch.device(where), **plain})
    return x.as_subclass(kind)


@pytest.fixture
def _cupy_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    memory = CupyMemory()
    monkeypatch.setattr(cuda, "_memory", lambda: memory)


@pytest.mark.usefixtures("_cupy_without_a_gpu")
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool]
)
def test_layouts_of_tensors_and_arrays_are_the_same(dtype: Any) -> None:
    """No element is read, so the memory can be on the host."""
    x = (torch.arange(120.0) % 2).to(dtype).view(2, 3, 4, 5)
    for view in (x, x.transpose(1, 2)[1:], x[:, :, 1::2, 2:], x[:1].expand(3, 3, 4, 5), x[2:]):
        tensor = elsewhere("cuda:1", view)
        array = cuda.array_of(tensor)
        assert (array.shape, array.dtype.name) == (view.shape, str(dtype).removeprefix("torch."))
        assert array.strides == tuple(n * view.itemsize for n in view.stride())
        assert (array.data.ptr, array.data.device_id) == (view.data_ptr(), 1)
        again = cuda.tensor_of(array)
        assert torch.equal(again, view)
        assert again.dtype is dtype
        assert not again.numel() or again.data_ptr() == view.data_ptr()
        assert not again._is_view()


def test_what_cupy_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "CuPy is not installed: pip install 'cupy-cuda13x[ctk]'"
    monkeypatch.setattr(CupyBackend, "unavailable", lambda _: reason)
    cuda._memory.cache_clear()
    message = "tensors on a GPU need backend 'cupy', .*: CuPy is not installed: pip install 'cupy-"
    with pytest.raises(BackendUnavailableError, match=message):
        cuda.on_device(torch.device("cuda:0")).__enter__()


def refused(where: str, name: str) -> Callable[[], Any]:
    """Return a call with one argument on another device."""
    given = dict.fromkeys("qkv", torch.zeros(2, 5, 8))
    given |= {"mask": torch.ones(5, 5) > 0, "kv_lengths": torch.tensor([5])}
    given |= {"seed": torch.tensor(1), "sinks": torch.zeros(2), "dropout_p": 0.5}
    given[name] = elsewhere(where, given[name])
    return lambda: attention(**given)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            refused("cuda:0", "k"),
            ValueError,
            "k must be on the device of q, cpu; got a tensor on cuda:0",
        ),
        (
            refused("cuda:0", "q"),
            ValueError,
            "k must be on the device of q, cuda:0; got a tensor on cpu",
        ),
        (
            refused("cuda:1", "mask"),
            ValueError,
            "mask must be on the device of q, cpu; got .* cuda:1",
        ),
        (
            refused("cuda:0", "sinks"),
            ValueError,
            "sinks must be on the device of q, cpu; got .* cuda:0",
        ),
        (
            refused("cuda:0", "kv_lengths"),
            ValueError,
            "kv_lengths must be on the CPU; got .* cuda:0",
        ),
        (
            refused("cuda:0", "seed"),
            ValueError,
            r"seed must be on the CPU; .* \(seed.cpu\(\) is a copy",
        ),
        (
            refused("mps:0", "q"),
            UnsupportedError,
            "q must be on the CPU or on an NVIDIA GPU; got .* mps:0",
        ),
        (
            refused("xpu:0", "q"),
            UnsupportedError,
            "q must be on the CPU or on an NVIDIA GPU; got .* xpu:0",
        ),
    ],
)
def test_other_devices_are_named(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["k_cache", "k", "cache_seqlens", "block_table", "rotary_cos"])
def test_a_cache_on_another_device_is_named(name: str) -> None:
    x = torch.zeros(2, 8, 2, 16)
    given = dict.fromkeys(("q", "k_cache", "v_cache", "k", "v"), x)
    given |= dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(8, 4))
    given |= {"cache_seqlens": torch.tensor([0, 0]), "block_table": torch.zeros(2, 1).int()}
    given[name] = elsewhere("cuda:0", given[name])
    with pytest.raises(ValueError, match=f"{name} must be on .*; got a tensor on cuda:0"):
        flash_attn_with_kvcache(**given)


def test_seeds_and_integers_are_on_the_cpu_whatever_the_default_device() -> None:
    from tileattn.torch.functional import new_seed
    from tileattn.torch.inputs import integer_tensor

    with torch.device("meta"):
        assert new_seed().is_cpu
        assert all(integer_tensor("kv_lengths", x).is_cpu for x in (3, [3, 4], np.array([3])))
