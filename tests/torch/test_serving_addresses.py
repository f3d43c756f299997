"""Functions of serving on GPU tensors in host memory; kernels outside attention run on the CPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.backends.cupy.fake_cupy import Machine  # noqa: E402 - PyTorch may be absent
from tests.kernels.cuda.src.single_launch_on_host import kernel_on_host  # noqa: E402 - as above
from tests.torch import fake_gpu  # noqa: E402 - as above
from tests.torch.fake_gpu import STREAM, OnGpu, on_gpu  # noqa: E402 - as above
from tileattn.backends.cupy import single_launch  # noqa: E402 - as above
from tileattn.torch import append_kv, cascade, explain, merge, rope  # noqa: E402 - as above

B, H, N, D, DV = 2, 3, 5, 24, 16


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Machine]:
    with fake_gpu.gpu(monkeypatch) as made:

        def load(key: Any, _device: int) -> Any:
            run = kernel_on_host(tmp_path, key)

            def start(grid: Any, _threads: Any, arguments: Any, _shared: int) -> None:
                assert made.stream == STREAM
                run(arguments[0].address, grid)

            return SimpleNamespace(function=start)

        monkeypatch.setattr(single_launch, "load", load)
        single_launch._prepared.cache_clear()
        yield made
        single_launch._prepared.cache_clear()


def drawn(*shape: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


@pytest.mark.usefixtures("gpu")
def test_appended_and_rotated_tensors_stay_on_the_gpu() -> None:
    caches = [drawn(4, 6, H, n, seed=n).transpose(1, 2) for n in (D, DV)]  # pages
    k, v = (drawn(B, N, H, n, seed=n + 1).transpose(1, 2) for n in (D, DV))
    cos, sin = (drawn(40, 8, seed=n) for n in (1, 2))
    lengths, table = torch.tensor([4, 0], dtype=torch.int32), torch.tensor([[3, 1], [0, 2]])
    there = [on_gpu(x.clone(memory_format=torch.preserve_format)) for x in caches]
    given = k, v, lengths, table, cos, sin
    sent = tuple(map(on_gpu, given))
    for arguments, (*new, n, pages, x, y) in ((caches, given), (there, sent)):
        found = append_kv(*arguments, *new, kv_lengths=n, block_table=pages, rotary=(x, y))
        assert found.tolist() == [4 + N, N]
    assert isinstance(found, OnGpu)
    for x, y in zip(there, caches, strict=True):
        assert torch.equal(x.as_subclass(torch.Tensor), y)
    positions = torch.arange(B * N).view(B, N)
    rotated = rope(sent[0], *sent[4:], positions=on_gpu(positions))
    assert isinstance(rotated, OnGpu)
    expected = rope(k, cos, sin, positions=positions)
    assert torch.equal(rotated.as_subclass(torch.Tensor), expected)


@pytest.mark.usefixtures("gpu")
def test_merged_tensors_stay_on_the_gpu() -> None:
    outs = [drawn(B, H, N, D, seed=n) for n in range(2)]
    lses = [drawn(B, H, N, seed=n + 2).float() for n in range(2)]
    expected = merge(outs, lses)
    found = merge([*map(on_gpu, outs)], [*map(on_gpu, lses)])
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, OnGpu)
        torch.testing.assert_close(x.as_subclass(torch.Tensor), y)


def test_a_cascade_is_two_calls_on_the_memory_of_tensors(gpu: Machine) -> None:
    q, (k, v) = drawn(4, 4, 1, 64, seed=0), (drawn(9, 2, 16, 64, seed=n) for n in (1, 2))
    integers = {
        "shared_lengths": torch.tensor([16, 32]),
        "block_table": torch.tensor([[0, 1, 2], [0, 3, 4], [5, 6, 7], [5, 6, 8]]),
        "kv_lengths": torch.tensor([40, 33, 48, 41]),
    }
    there = {name: on_gpu(x) for name, x in ({"q": q, "k": k, "v": v} | integers).items()}
    found = cascade(**there)
    assert [x.shape for x in found] == [(4, 4, 1, 64), (4, 4, 1)]
    assert all(isinstance(x, OnGpu) for x in found)
    launches = [params for key, _, _, params in gpu.launches if key.kernel.startswith("forward")]
    assert {int(params["B"]) for params in launches} == {2, 4}
    assert {int(params["q"]) for params in launches} == {there["q"].data_ptr()}
    assert {int(params["k"]) for params in launches} == {there["k"].data_ptr()}
    assert gpu.uploads == []


def test_explain_names_the_kernel_and_starts_none(gpu: Machine) -> None:
    q, k, v = (on_gpu(drawn(B, H, 200, 64, seed=n)) for n in range(3))
    report = explain(q, k, v, causal=True, kv_lengths=[200, 70])
    assert report.backend == "cupy"
    assert gpu.launches == []
