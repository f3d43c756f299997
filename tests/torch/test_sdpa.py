"""PyTorch's own call, computed here, beside PyTorch's."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.torch import scaled_dot_product_attention, sdpa  # noqa: E402 - PyTorch may be absent

functional = torch.nn.functional
LEADS = ((), (3,), (2, 3), (2, 2, 3), (1, 2, 2, 3))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def check(tensors: list[Any], **options: Any) -> None:
    """Compare outputs and gradients, which PyTorch computes in float64, too."""
    mask = options.get("attn_mask")
    needed = [*tensors, mask] if mask is not None and mask.requires_grad else tensors
    results = []
    for function in (scaled_dot_product_attention, functional.scaled_dot_product_attention):
        out = function(*tensors, **options)
        results.append((out, *torch.autograd.grad(out.cos().sum(), needed)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lead", LEADS)
def test_any_number_of_leading_axes(lead: tuple[int, ...]) -> None:
    tensors = drawn((*lead, 5, 8), (*lead, 7, 8), (*lead, 7, 6))
    check(tensors)
    check(tensors, is_causal=True)
    check(tensors, scale=0.3)


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_that_broadcast(lead: tuple[int, ...], kind: str) -> None:
    tensors = drawn((*lead, 5, 8), (*lead, 7, 8), (*lead, 7, 6))
    for shape in ((1, 7), (5, 7), (5, 1), (*lead, 5, 7), (*lead[:-1], 1, 1, 7)[-len(lead) - 2 :]):
        (mask,) = drawn(shape)
        check(tensors, attn_mask=mask if kind == "float" else mask.detach() > -0.5)


def test_leading_axes_that_broadcast() -> None:
    check(drawn((2, 4, 5, 8), (1, 4, 7, 8), (4, 7, 8)))
    check(drawn((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8)))


def test_groups_of_heads() -> None:
    check(drawn((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)), enable_gqa=True)
    check(drawn((2, 2, 4, 5, 8), (2, 2, 1, 7, 8), (2, 2, 1, 7, 8)), enable_gqa=True, is_causal=True)


def test_a_query_that_attends_to_nothing_has_output_0() -> None:
    q, k, v = drawn((2, 5, 8), (2, 7, 8), (2, 7, 8))
    mask = torch.rand(5, 7) < 0.6
    mask[2] = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not out[:, 2].any()
    check([q, k, v], attn_mask=mask)


def test_dropout_comes_from_pytorchs_generator() -> None:
    q, k, _ = (x.detach() for x in drawn((1, 1, 64, 8), (1, 1, 64, 8), ()))
    v = torch.eye(64, dtype=torch.float64)[None, None]

    def probabilities(seed: int) -> Any:
        torch.manual_seed(seed)
        return scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    assert torch.equal(probabilities(1), probabilities(1))
    assert not torch.equal(probabilities(1), probabilities(2))
    kept = probabilities(1)
    whole = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(kept, torch.where(kept > 0, whole / 0.75, 0))
    assert 0.7 < (kept > 0).double().mean() < 0.8


def test_a_compiled_call_is_one_graph() -> None:
    def f(q: Any, k: Any, v: Any, mask: Any) -> Any:
        shared = scaled_dot_product_attention(
            q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True
        )
        return shared + scaled_dot_product_attention(q, k, v, attn_mask=mask)

    tensors = drawn((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), (5, 7))
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    grads = (torch.autograd.grad(g(*tensors).cos().sum(), tensors) for g in (compiled, f))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_compiled_call_draws_other_entries_each_time() -> None:
    q, k, v = (x.detach() for x in drawn((2, 20, 8), (2, 20, 8), (2, 20, 8)))

    def f() -> Any:
        return scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    first = compiled()
    assert not torch.equal(compiled(), first)
    torch.manual_seed(1)
    assert torch.equal(compiled(), first)


def test_a_block_takes_the_place_of_pytorchs_function() -> None:
    theirs = functional.scaled_dot_product_attention
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).double()
    (x,) = drawn((2, 6, 16))
    with sdpa():
        assert functional.scaled_dot_product_attention is scaled_dot_product_attention
        found = layer(x, x, x, need_weights=False)[0]
    assert functional.scaled_dot_product_attention is theirs
    torch.testing.assert_close(found, layer(x, x, x, need_weights=False)[0])
    with pytest.raises(ZeroDivisionError), sdpa():
        _ = 1 / 0
    assert functional.scaled_dot_product_attention is theirs


def test_samples_of_pytorchs_own_tests() -> None:
    samples = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    (operator,) = [
        op for op in samples.op_db if op.name == "nn.functional.scaled_dot_product_attention"
    ]
    count = 0
    for sample in operator.sample_inputs("cpu", torch.float64, requires_grad=True):
        if not sample.kwargs.get("dropout_p"):
            check([sample.input, *sample.args], **sample.kwargs)
            count += 1
    assert count > 10


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((Q, K, K), {}, "query has shape .*enable_gqa=True"),
        ((Q, Q, Q), {"attn_mask": torch.ones(5, 5) > 0, "is_causal": True}, "one of them"),
        ((Q, Q, Q), {"attn_mask": torch.ones(5, 5).long()}, "attn_mask has dtype torch.int64"),
        ((Q[0, 0, 0], Q, Q), {}, r"query has shape \(8,\)"),
        ((Q, [1], Q), {}, "key is list"),
        ((Q, Q.to("meta"), Q), {}, "key is on meta"),
        ((Q, Q, Q.to_sparse()), {}, "value has layout torch.sparse_coo"),
        ((Q, Q, Q), {"dropout_p": 1.5}, "dropout_p is 1.5"),
    ],
)
def test_what_is_not_accepted_is_named(given: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, UnsupportedError), match=message):
        scaled_dot_product_attention(*given, **options)
