"""``scaled_dot_product_attention``, compared with PyTorch's."""

import contextlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.torch import drop_in, scaled_dot_product_attention, sdpa  # noqa: E402 - as above
from tileattn.torch.functional import attend  # noqa: E402 - as above

functional = torch.nn.functional
Tensor: Any = torch.Tensor
LEADS = ((), (3,), (2, 3), (2, 2, 3), (1, 2, 2, 3))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def check(tensors: list[Any], **options: Any) -> None:
    """Compare outputs and gradients with PyTorch's, in float64."""
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


# --- tensors that are more than their memory ---------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (6, 6)])
@pytest.mark.parametrize("kind", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases(kind: str, sizes: tuple[int, int]) -> None:
    from torch.nn.attention import bias as biases

    bias = getattr(biases, kind)(*sizes)
    tensors = drawn((2, 4, sizes[0], 8), (2, 2, sizes[1], 8), (2, 2, sizes[1], 6))
    expected = functional.scaled_dot_product_attention(
        *tensors, attn_mask=bias._materialize(), enable_gqa=True
    )
    with sdpa() as taken:
        found = functional.scaled_dot_product_attention(*tensors, attn_mask=bias, enable_gqa=True)
    assert type(found) is torch.Tensor
    assert taken.calls == 1
    grads = (torch.autograd.grad(x.cos().sum(), tensors) for x in (found, expected))
    for x, y in zip((found, *next(grads)), (expected, *next(grads)), strict=True):
        torch.testing.assert_close(x, y)
    for wrong in ({"attn_mask": getattr(biases, kind)(5, 9)}, {"is_causal": True}):
        with pytest.raises(
            ValueError, match=r"(attn_mask must be a CausalBias of|is_causal must be False)"
        ):
            scaled_dot_product_attention(
                *tensors, **({"attn_mask": bias, "enable_gqa": True} | wrong)
            )


def test_a_compiled_call_takes_a_causal_bias() -> None:
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = drawn((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    expected = scaled_dot_product_attention(q, k, v, causal_lower_right(5, 7))
    torch.testing.assert_close(compiled(q, k, v, causal_lower_right(5, 7)), expected)


class Told(torch.Tensor):  # type: ignore[misc,name-defined]  # PyTorch is untyped here
    """Records the functions that it sees; may answer a call itself."""

    seen: list[Any] = []  # noqa: RUF012 - of all instances
    answer: Any = None

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is functional.scaled_dot_product_attention:
            cls.seen.append(f)
            if cls.answer is not None:
                return cls.answer
        return super().__torch_function__(f, types, args, kwargs or {})


@pytest.mark.parametrize("place", range(4))
def test_a_subclass_sees_the_call_and_may_answer_it(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [x.detach() for x in drawn((2, 5, 8), (2, 7, 8), (2, 7, 6), (5, 7))]
    expected = scaled_dot_product_attention(*tensors)
    tensors[place] = tensors[place].as_subclass(Told)
    monkeypatch.setattr(Told, "seen", [])
    with sdpa() as taken:
        found = functional.scaled_dot_product_attention(*tensors)
    assert len(Told.seen) == taken.calls == 1
    assert type(found) is Told
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=0)
    monkeypatch.setattr(Told, "answer", "mine")
    for block in (sdpa(), contextlib.nullcontext()):
        with block:
            assert scaled_dot_product_attention(*tensors) == "mine"


class Plain(torch.Tensor):  # type: ignore[misc,name-defined]  # as above
    """A subclass that overrides nothing."""


def test_a_subclass_without_an_answer_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", None)
    x = torch.randn(2, 5, 8)
    found = scaled_dot_product_attention(x.as_subclass(Plain), x, torch.nn.Parameter(x))
    assert type(found) is Plain
    expected = scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=0)


def test_a_mode_sees_the_call_and_its_result_is_computed_here() -> None:
    from torch.overrides import TorchFunctionMode

    class Seen(TorchFunctionMode):  # type: ignore[misc]  # as above
        names: list[Any] = []  # noqa: RUF012 - of one instance

        def __torch_function__(self, f: Any, _t: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(f)
            return f(*args, **(kwargs or {}))

    x = torch.randn(2, 5, 8)
    with Seen() as seen:
        scaled_dot_product_attention(x, x, x)
    assert seen.names == [scaled_dot_product_attention]


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 7), (1, 3, 4, 5, 7), (2, 1, 1, 5, 7), (2, 3, 1, 5, 1)])
def test_a_bias_that_broadcasts_over_many_axes_is_not_written_out(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = drawn((2, 3, 4, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 6))
    (bias,) = drawn(shape)
    given = []

    def recorded(rows: Any, options: Any, **more: Any) -> Any:
        given.append(options["bias"])
        return attend(rows, options, **more)

    monkeypatch.setattr(drop_in, "attend", recorded)
    check(tensors, attn_mask=bias, enable_gqa=True)
    assert given[0].numel() == bias.numel()
    assert given[0].data_ptr() == bias.data_ptr()


def test_a_bias_that_broadcasts_between_other_axes() -> None:
    tensors = drawn((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6))
    for shape in ((2, 1, 4, 5, 7), (1, 3, 1, 1, 7)):
        check(tensors, attn_mask=drawn(shape)[0])


# --- arguments as PyTorch takes them -------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 2), (2, 4), (4, 1), (2, 3)])
def test_keys_and_values_of_other_numbers_of_heads(heads: tuple[int, int]) -> None:
    of_k, of_v = heads
    check(drawn((2, 12, 5, 8), (2, of_k, 7, 8), (2, of_v, 7, 6)), enable_gqa=True)


def test_all_entries_may_be_dropped() -> None:
    tensors = drawn((2, 5, 8), (2, 7, 8), (2, 7, 6))
    for mask in (None, *drawn((5, 7)), torch.ones(5, 7, dtype=torch.bool)):
        check(tensors, attn_mask=mask, dropout_p=1.0)


def test_numbers_may_be_arrays_without_axes() -> None:
    q, k, v = (x.detach() for x in drawn((2, 5, 8), (2, 7, 8), (2, 7, 6)))
    expected = scaled_dot_product_attention(q, k, v, scale=0.25)
    scales: list[Any] = [torch.tensor(0.25), np.array(0.25), np.float32(0.25)]
    for scale in scales:
        found = scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=torch.tensor(0.0))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.manual_seed(1)
    expected = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    found = scaled_dot_product_attention(q, k, v, dropout_p=torch.tensor(0.5))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --- modules, threads and TorchScript ------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_calls_it() -> None:
    class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]  # as above
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x, mask, is_causal=mask is None)

    (x,) = drawn((2, 6, 8))
    mask = torch.rand(6, 6) > 0.3
    with sdpa() as taken:
        scripted = torch.jit.script(Layer())
        traced = torch.jit.trace(Layer(), (x.detach(),), strict=False)
        before = taken.calls
        found = scripted(x), scripted(x, mask)
        assert taken.calls == before + 2
    expected = Layer()(x), Layer()(x, mask)
    longer = torch.cat([x, x], 1)
    torch.testing.assert_close(traced(longer), Layer()(longer))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        grads = [torch.autograd.grad(y.cos().sum(), x)[0] for y in (a, b)]
        torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_block_takes_layers_that_would_have_a_fast_path() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).double().eval()
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    (x,) = (y.detach() for y in drawn((2, 6, 16)))
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        with sdpa() as taken:
            found = encoder(x, src_key_padding_mask=padding)
    assert taken.calls == 2
    torch.testing.assert_close(found[~padding], expected[~padding])
    assert torch.backends.mha.get_fastpath_enabled()


def test_blocks_of_threads_may_overlap() -> None:
    theirs = functional.scaled_dot_product_attention
    first, second = sdpa(), sdpa()
    x = torch.randn(2, 5, 8)
    with first as a:
        functional.scaled_dot_product_attention(x, x, x)
        b = second.__enter__()
        functional.scaled_dot_product_attention(x, x, x)
    assert functional.scaled_dot_product_attention is scaled_dot_product_attention
    functional.scaled_dot_product_attention(x, x, x)
    second.__exit__(None, None, None)
    assert functional.scaled_dot_product_attention is theirs
    assert (a.calls, b.calls) == (2, 2)


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            (Q, K, K),
            {},
            "query, key and value must have .* broadcast; got shapes .*enable_gqa=True",
        ),
        (
            (Q, Q, Q),
            {"attn_mask": torch.ones(5, 5) > 0, "is_causal": True},
            "is_causal must be False",
        ),
        (
            (Q, Q, Q),
            {"attn_mask": torch.ones(5, 5).long()},
            "attn_mask must have dtype .*; got torch.int64",
        ),
        ((Q[0, 0, 0], Q, Q), {}, r"query must have shape .*; got \(8,\)"),
        ((Q, [1], Q), {}, "key must be a torch.Tensor; got list"),
        ((Q, Q.to("meta"), Q), {}, "key must be on the device of query, cpu; got a tensor on meta"),
        ((Q, Q, Q.to_sparse()), {}, "value must be .*; got layout torch.sparse_coo"),
        ((Q, Q, Q), {"dropout_p": 1.5}, "dropout_p must be .*; got 1.5"),
        ((Q, Q, Q), {"dropout_p": None}, "dropout_p must be a number; got None"),
        ((Q, Q, Q), {"is_causal": 1}, "is_causal .*True or False"),
        ((Q, Q, Q), {"scale": torch.ones(1)}, r"scale (is|must be) "),
        ((Q, Q, Q), {"scale": torch.tensor(1.0, requires_grad=True)}, "scale requires a gradient"),
        ((Q.to(torch.float8_e5m2), Q, Q), {}, "query must have dtype float16, .*float8_e5m2"),
        ((Q, Q, Q), {"attn_mask": Q.to(torch.float8_e5m2)}, "attn_mask must have dtype bool, "),
        ((Q, Q[..., :7], Q), {}, "key must have the head dimension of query, 8; got 7"),
        ((Q, Q, Q[:, :, :4]), {}, "value must have the length of key, 5; got 4"),
        ((Q, Q.double(), Q), {}, "key must have the dtype of query, float32"),
        ((Q, K[:, [0, 1, 0]], K[:, [0, 1, 0]]), {"enable_gqa": True}, "key must .* heads of query"),
        ((Q, Q, Q), {"attn_mask": torch.zeros(3, 4, 5, 5)}, "attn_mask must broadcast to"),
        ((Q, Q, Q), {"attn_mask": torch.ones(5, 4, dtype=torch.bool)}, "attn_mask must broadcast"),
        ((Q, Q, Q), {"attn_mask": torch.zeros(5, 5, device="meta")}, "attn_mask .* of query, cpu"),
    ],
)
def test_wrong_arguments_have_pytorchs_names(given: Any, options: Any, message: str) -> None:
    for _ in range(2):
        with pytest.raises((TypeError, ValueError, UnsupportedError), match=f"^{message}"):
            scaled_dot_product_attention(*given, **options)
