"""Serving with PyTorch's tensors on a GPU: results of the CPU, gradients and graphs."""

from typing import Any

import ml_dtypes
import pytest

from tests.on_gpu import needs_gpu
from tileattn import Attention, reference
from tileattn.testing import assert_attention_close, error_bound

torch = pytest.importorskip("torch")

from tileattn.torch import (  # noqa: E402 - PyTorch may be absent
    append_kv,
    attention,
    explain,
    merge,
    rope,
)

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
B, H, N, D = 2, 3, 5, 64


def drawn(*shape: int, seed: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(k_pages: Any, v_pages: Any, k: Any, v: Any, *given: Any) -> Any:
    lengths, table, cos, sin = given
    return append_kv(
        *(k_pages, v_pages, k, v), kv_lengths=lengths, block_table=table, rotary=(cos, sin)
    )


def arguments(dtype: Any) -> list[Any]:
    """Make pages, new tokens, lengths, pages of sequences, and tables."""
    pages = [drawn(6, 8, H, D, seed=n, dtype=dtype).transpose(1, 2) for n in range(2)]
    new = [drawn(B, N, H, D, seed=n + 2, dtype=dtype).transpose(1, 2) for n in range(2)]
    tables = [drawn(40, 16, seed=n + 4, dtype=dtype) for n in range(2)]
    return [*pages, *new, torch.tensor([3, 0]), torch.tensor([[4, 1], [0, 5]]), *tables]


def same(found: Any, expected: Any) -> None:
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_and_append_kv_have_the_bits_of_the_cpu(dtype: Any) -> None:
    ours = arguments(dtype)
    theirs = [x.cuda() for x in ours]
    lengths = step(*theirs)
    assert lengths.is_cuda
    same(lengths, step(*ours))
    for x, y in zip(theirs[:2], ours[:2], strict=True):
        same(x, y)
    x, positions = ours[2].requires_grad_(), torch.arange(B * N).view(B, N)
    there = x.detach().cuda().requires_grad_()
    out = rope(there, *theirs[-2:], positions=positions.cuda())
    expected = rope(x, *ours[-2:], positions=positions)
    same(out.detach(), expected.detach())
    expected.backward(ours[3])
    out.backward(theirs[3])
    same(there.grad, x.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_results_and_gradients_are_close_to_those_of_the_cpu(dtype: Any) -> None:
    sums = torch.float64 if dtype is torch.float64 else torch.float32
    outs = [drawn(B, H, N, D, seed=n, dtype=dtype) for n in range(3)]
    lses = [drawn(B, H, N, seed=n + 3, dtype=sums) for n in range(3)]
    lses[1][0] = -torch.inf
    found = []
    for device in ("cpu", "cuda"):
        given = [x.to(device).requires_grad_() for x in (*outs, *lses)]
        out, lse = merge(given[:3], given[3:])
        grads = torch.autograd.grad(out.float().cos().sum() + lse.sin().sum(), given)
        found.append([x.detach().cpu() for x in (out, lse, *grads)])
    torch.testing.assert_close(*found)


def test_a_graph_replays_other_lengths() -> None:
    given = [x.cuda() for x in arguments(torch.bfloat16)]
    lengths = given[4]
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step(*given)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = step(*given)
    lengths.copy_(torch.tensor([7, 2]))
    fresh = [x.clone() for x in given]
    graph.replay()
    assert new.tolist() == [7 + N, 2 + N]
    step(*fresh)
    for x, y in zip(given[:2], fresh[:2], strict=True):
        same(x, y.cpu())


def test_explain_names_the_kernel_of_the_gpu() -> None:
    q, k, v = (drawn(B, H, 200, D, seed=n, dtype=torch.bfloat16).cuda() for n in range(3))
    report = explain(q, k, v, causal=True)
    assert report.backend == "cupy"
    assert attention(q, k, v, causal=True).is_cuda


def numpy_of(x: Any) -> Any:
    """Copy a tensor to an array of NumPy, of the dtypes of ml_dtypes, too."""
    there = getattr(ml_dtypes, str(x.dtype).removeprefix("torch."), None)
    if there is None:
        return x.cpu().numpy()
    return x.cpu().view({1: torch.uint8, 2: torch.int16}[x.itemsize]).numpy().view(there)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_caches_of_8_bits(dtype: Any, kind: Any) -> None:
    """Pages get the bytes that they get on the CPU, and a step attends to them."""
    lengths, table = arguments(dtype)[4:6]
    found = []
    for device in ("cpu", "cuda"):
        new = [x.to(device) for x in arguments(dtype)[2:4]]
        caches = [torch.zeros(6, H, 8, D, dtype=torch.int8, device=device).view(kind) for _ in "kv"]
        factors = [torch.zeros(6, H, 8, device=device) for _ in "kv"]
        places: dict[str, Any] = {
            "block_table": table.to(device),
            "k_descale": factors[0],
            "v_descale": factors[1],
        }
        ends = append_kv(*caches, *new, kv_lengths=lengths.to(device), **places)
        found.append([*(x.view(torch.int8) for x in caches), *factors, ends])
    for x, y in zip(found[1], found[0], strict=True):
        same(x, y)
    q = drawn(B, 2 * H, 1, D, seed=9, dtype=dtype)
    results = attention(q.cuda(), *caches, kv_lengths=ends, **places, return_lse=True)
    arrays = [numpy_of(x) for x in (q, *caches)]
    options = {name: numpy_of(x) for name, x in {**places, "kv_lengths": ends}.items()}
    expected = reference.forward(*arrays, **options)
    bounds = error_bound(*arrays, **options)
    assert_attention_close(Attention(*map(numpy_of, results)), expected, bounds)
