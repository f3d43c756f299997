"""Repeated calls on PyTorch's tensors on a GPU: launched from addresses, with the same results."""

from typing import Any

import pytest

import tileattn
from tests.on_gpu import needs_gpu

torch = pytest.importorskip("torch")

from tests.gpu.test_torch_cuda import (  # noqa: E402 - PyTorch may be absent
    DTYPES,
    _options,
    _strided,
    both,
    check,
    drawn,
    same,
)
from tileattn.call.prepared import CALLS, SEEN_OFTEN  # noqa: E402 - as above
from tileattn.torch import (  # noqa: E402 - as above
    attention,
    eager,
    scaled_dot_product_attention,
)

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
    pytest.mark.usefixtures("one_blas_thread"),
]

PLAIN: list[dict[str, Any]] = [
    *({}, {"causal": True}, {"window": (30, 5), "softcap": 5.0}, {"scale": 0.2, "q_offset": 9}),
    *({"dropout_p": 0.3, "seed": 7}, {"kv_lengths": (131, 40)}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_repeated_calls_make_no_arrays(
    dtype: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the bits of the first one, with strides and alignments of any kind.

    The first call of a kind is planned. One with other numbers is planned when it comes often.
    """
    CALLS.clear()
    given = drawn(dtype)
    apart = [_strided(x.detach()).requires_grad_(x.requires_grad) for x in given]
    for each, planned in ((given, 0), (apart, SEEN_OFTEN)):
        expected = None
        for n in range(planned + 4):
            with monkeypatch.context() as patch:
                for name in ("forward", "backward") if n != planned else ():
                    patch.setattr(tileattn, name, None)
                found = both(each, deterministic=True, **options)
            expected = expected or found
            same(found, expected)
    check(given, **options)
    check(apart, **options)


@pytest.mark.parametrize("name", ["bias", "mask", "slopes", "lengths"])
def test_repeated_calls_with_tensors_make_no_arrays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients have the bits of the first call, too; tiles without any are zero."""
    CALLS.clear()
    given, options = drawn(torch.float32), _options()[name] | {"window": (30, 5)}
    learned = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]

    def results() -> tuple[Any, ...]:
        out = attention(*given[:3], deterministic=True, **options)
        return out, *torch.autograd.grad(out, (*given[:3], *learned), given[3])

    expected = results()
    with monkeypatch.context() as patch:
        for each in ("forward", "backward"):
            patch.setattr(tileattn, each, None)
        for _ in range(3):
            # Memory that is reused is not zero.
            for x in [torch.full_like(x, torch.nan) for x in expected]:
                del x
            same(results(), expected)
    check(given, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_calls_with_new_numbers_make_no_arrays(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do they wait for the GPU."""
    whole = drawn(dtype, (2, 4, 2, 300, 300, 64))

    def rows(n: int) -> list[Any]:
        return [x.detach()[:, :, :n].requires_grad_(x.requires_grad) for x in whole]

    def options(n: int) -> dict[str, Any]:
        return {"causal": True, "scale": 10 / n, "dropout_p": n / 1000, "seed": n}

    both(rows(300), **options(300))
    with monkeypatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(tileattn, name, None)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for n in (280, 291, 283):
                both(rows(n), **options(n))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for n in (280, 285):
        check(rows(n), **options(n))


def test_addresses_decide_for_each_call() -> None:
    given = q, k, v, dout = drawn()
    for _ in range(2):
        both(given)
    whole = torch.zeros(q.numel() + 1, dtype=q.dtype, device="cuda")
    odd = whole[1:].view(q.shape).copy_(q.detach()).requires_grad_()
    for _ in range(3):
        check([odd, k, v, dout])
        check([q, k, k.detach().requires_grad_(), dout])
        check([q, k, v, dout])


def test_few_queries_over_many_keys_take_memory_of_pytorchs() -> None:
    q, k, v, _ = (x.detach() for x in drawn(sizes=(1, 8, 2, 1, 8192, 64)))
    expected = attention(q, k, v)
    for _ in range(3):
        same([attention(q, k, v)], [expected])


def test_layouts_are_those_of_dense_tensors() -> None:
    q, k, v, _ = (x.detach() for x in drawn())
    assert eager.holds_elements(q)
    assert eager.holds_elements(torch.nn.Parameter(k))
    assert not eager.holds_elements(torch._neg_view(q))
    same([attention(torch._neg_view(-q), k, v)], [attention(q, k, v)])


def test_cuda_graphs_of_a_compiled_program_draw_new_entries() -> None:
    """Programs keep seeds and lengths on the CPU out of their graphs."""
    q, k, v, _ = (x.detach() for x in drawn())

    def step(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        dropped = scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)
        return dropped, attention(q + 1, k, v, kv_lengths=lengths)

    torch._dynamo.reset()
    fast = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    drops = []
    for n in (131, 5, 40, 23):
        lengths = torch.tensor([n, n // 2])
        torch.compiler.cudagraph_mark_step_begin()
        dropped, short = fast(q, k, v, lengths)
        drops.append(dropped.clone())
        torch.testing.assert_close(short, attention(q + 1, k, v, kv_lengths=lengths))
    assert not any(torch.equal(drops[-1], x) for x in drops[:-1])
    torch._dynamo.reset()
