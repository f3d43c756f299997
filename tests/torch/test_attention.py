"""Attention on tensors: the bits of the library, under autograd and PyTorch's compilers."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import tileattn
from tileattn.testing import AttentionCase, problems

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402 - PyTorch may be absent

from tests.torch.graphs import graphs_of  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.expressions.functions import score_expression  # noqa: E402 - as above
from tileattn.expressions.nodes import to_text  # noqa: E402 - as above
from tileattn.torch import attention  # noqa: E402 - as above
from tileattn.torch.operators import INPUTS  # noqa: E402 - as above
from tileattn.torch.tensors import array_of, tensor_of  # noqa: E402 - as above

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def as_tensors(given: dict[str, Any]) -> dict[str, Any]:
    """Copy arrays to tensors, which cannot have negative strides."""
    return {
        name: tensor_of(x.copy(order="K")) if isinstance(x, np.ndarray) else x
        for name, x in given.items()
    }


def drawn(seed: int, *shapes: tuple[int, ...], dtype: Any = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def learned(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s * 0.7 + table[h, abs(i - j)]


def near(b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return (abs(i - j) < 6) | (table[h, j] > 1)


FUNCTIONS: dict[str, Any] = {"score_mod": learned, "mask_mod": near}


@pytest.mark.parametrize("backend", ["numpy", pytest.param("llvm", marks=pytest.mark.slow)])
@given(case=problems() | problems(packed=True))
@settings(max_examples=60, deadline=None)
def test_results_are_those_of_the_library_bit_for_bit(backend: str, case: AttentionCase) -> None:
    options = {**case.options, "backend": backend}
    arrays = dict(zip("qkv", case[:3], strict=True))
    inputs = as_tensors({**arrays, **options})
    for name in DIFFERENTIABLE:
        if inputs.get(name) is not None:
            inputs[name].requires_grad_()
    out, lse = attention(**inputs, return_lse=True)
    expected = tileattn.forward(*(array_of(inputs[name]) for name in "qkv"), **options)
    assert array_of(out).tobytes() == expected.out.tobytes()
    assert array_of(lse).tobytes() == expected.lse.tobytes()

    upstream = as_tensors({"dout": case.dout, "dlse": case.dlse})
    ends = {"dout": out} if case.dlse is None else {"dout": out, "dlse": lse}
    wanted = [name for name in DIFFERENTIABLE if inputs.get(name) is not None]
    found = torch.autograd.grad(
        list(ends.values()), [inputs[name] for name in wanted], [upstream[name] for name in ends]
    )
    q, k, v = (array_of(inputs[name]) for name in "qkv")
    rows = case.dout, q, k, v, expected.out, expected.lse
    grads = tileattn.backward(*rows, dlse=case.dlse, **options)
    expected_grads = grads._asdict()
    for name, x in zip(wanted, found, strict=True):
        assert array_of(x).tobytes() == expected_grads["d" + name].tobytes(), name


def test_gradients_are_those_of_finite_differences() -> None:
    def f(q: Any, k: Any, v: Any, bias: Any, sinks: Any, table: Any) -> Any:
        options = {"bias": bias, "sinks": sinks, "aux": (table,), "q_offset": 1, **FUNCTIONS}
        return attention(q, k, v, return_lse=True, causal=True, softcap=3.0, **options)

    shapes = (2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3), (4, 1, 5), (4,), (4, 8)
    assert torch.autograd.gradcheck(f, tuple(drawn(0, *shapes)), fast_mode=True)


def test_the_gradient_of_lse_alone() -> None:
    q, k, v = drawn(0, (2, 3, 4), (2, 5, 4), (2, 5, 3))
    (dq,) = torch.autograd.grad(attention(q, k, v, return_lse=True)[1].sum(), q)
    scores = q @ k.mT / 2
    (expected,) = torch.autograd.grad(scores.logsumexp(-1).sum(), q)
    torch.testing.assert_close(dq, expected)


@pytest.mark.parametrize("needed", [("q",), ("k", "bias"), ("v", "sinks"), ("table",)])
def test_only_gradients_that_are_needed_are_asked_for(
    needed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    theirs = tileattn.backward

    def backward(*args: Any, wrt: Any, **kwargs: Any) -> Any:
        asked.append(tuple(wrt))
        return theirs(*args, wrt=wrt, **kwargs)

    monkeypatch.setattr(tileattn, "backward", backward)
    shapes = {"q": (2, 3, 4), "k": (2, 5, 4), "v": (2, 5, 3), "bias": (5,), "sinks": (2,)}
    names = [*shapes, "table"]
    tensors = dict(zip(names, drawn(0, *shapes.values(), (2, 5)), strict=True))
    for name, x in tensors.items():
        x.requires_grad_(name in needed)
    table = tensors.pop("table")
    attention(**tensors, aux=(torch.arange(3), table), score_mod=with_two).sum().backward()
    assert asked == [tuple("aux" if name == "table" else name for name in needed)]
    for name, x in {**tensors, "table": table}.items():
        assert (x.grad is not None) == (name in needed)


def with_two(s: Any, b: Any, h: Any, i: Any, j: Any, numbers: Any, table: Any) -> Any:
    return s + table[h, j] * numbers[i]


CALLS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "plain": ({}, lambda _n: {}),
    "dropout": ({"dropout_p": 0.3}, lambda n: {"seed": n}),
    "lengths": ({}, lambda n: {"kv_lengths": torch.tensor([n, n - 3])}),
    "offset": ({"causal": True}, lambda n: {"q_offset": n}),
}


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_are_one_graph_and_few_of_them(name: str) -> None:
    """Changing sizes and integers causes one more graph, which all later calls share."""
    fixed, changing = CALLS[name]

    def f(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, **fixed, **options) * 2

    fast, graphs = graphs_of(f, fullgraph=True)
    for n in (20, 23, 31):
        q, k, v = drawn(n, (2, 4, n, 8), (2, 2, n, 8), (2, 2, n, 8), dtype=torch.float32)
        options = changing(n)
        out, expected = fast(q, k, v, **options), f(q, k, v, **options)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        (dk,), (expected_dk,) = (torch.autograd.grad(x.sum(), k) for x in (out, expected))
        torch.testing.assert_close(dk, expected_dk, rtol=0, atol=0)
    assert len(graphs) <= 3


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_calls_take_functions_and_block_masks() -> None:
    blocks = tileattn.BlockMask.from_mask(np.tri(20, dtype=bool), (4, 4))

    def f(q: Any, k: Any, v: Any, table: Any) -> Any:
        scores = attention(q, k, v, aux=(table,), **FUNCTIONS)
        return scores + attention(q, k, v, block_mask=blocks)

    fast, graphs = graphs_of(f, fullgraph=True)
    tensors = drawn(0, (2, 20, 8), (2, 20, 8), (2, 20, 8), (2, 20))
    out, expected = fast(*tensors), f(*tensors)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    grads = (torch.autograd.grad(x.sum(), tensors) for x in (out, expected))
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_block_mask_lives_until_the_backward_pass(is_compiled: bool) -> None:
    q, k, v = drawn(0, (8, 4), (8, 4), (8, 4))

    def call(q: Any, mask: Any) -> Any:
        return attention(q, k, v, block_mask=mask)

    run = graphs_of(call, fullgraph=True)[0] if is_compiled else call
    out = run(q, tileattn.BlockMask.from_mask(np.tri(8, dtype=bool), (2, 2)))
    gc.collect()
    (found,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(attention(q, k, v, causal=True).sum(), q)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("grad", [True, False])
def test_operators_keep_pytorchs_rules(grad: bool) -> None:
    tensors = drawn(0, (2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 6), (4, 1, 9), (4,))
    named = dict(zip(DIFFERENTIABLE, tensors, strict=True))
    values = dict.fromkeys(INPUTS) | named | {"dropout_p": 0.0, "backend": "auto"}
    aux = drawn(1, (4, 9))
    values |= {"aux": aux, "deterministic": False, "right": 0}
    values["kv_lengths"] = torch.tensor([9, 4])
    values["score_mod"] = to_text(score_expression(learned, [array_of(x) for x in aux]))
    inputs = tuple(values[name] for name in INPUTS)
    if not grad:
        inputs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, inputs)
    torch.library.opcheck(torch.ops.tileattn.forward.default, inputs)
    with torch.no_grad():
        out, lse = torch.ops.tileattn.forward(*inputs)
    rest = (torch.ones_like(out), None, out, lse, ["q", "v", "sinks", "aux"], *inputs)
    detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, rest)
    torch.library.opcheck(torch.ops.tileattn.backward.default, detached)


def test_an_exported_module_computes_the_same() -> None:
    class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]  # PyTorch is untyped here
        def forward(self, x: Any) -> Any:
            return attention(x, x, x, causal=True)

    (x,) = (y.detach() for y in drawn(0, (2, 2, 12, 8), dtype=torch.float32))
    exported = torch.export.export(Layer(), (x,), dynamic_shapes=({2: torch.export.Dim("N")},))
    longer = x.repeat(1, 1, 3, 1)
    torch.testing.assert_close(exported.module()(longer), Layer()(longer), rtol=0, atol=0)


def test_checkpointing_drops_the_same_entries() -> None:
    from torch.utils.checkpoint import checkpoint

    def f(x: Any) -> Any:
        return attention(x, x, x, dropout_p=0.5, seed=3).square().sum()

    (x,) = drawn(0, (2, 12, 8))
    (found,) = torch.autograd.grad(checkpoint(f, x, use_reentrant=False), x)
    (expected,) = torch.autograd.grad(f(x), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_autocast_converts_rows_but_not_float64() -> None:
    q, k, v = drawn(0, (2, 5, 8), (2, 5, 8), (2, 5, 8), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = attention(q, k, v)
        assert attention(q.double(), k.double(), v.double()).dtype is torch.float64
    assert narrow.dtype is torch.bfloat16
    expected = attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(narrow, expected, rtol=0, atol=0)
    narrow.sum().backward()
    assert q.grad.dtype is torch.float32


@pytest.mark.parametrize("return_lse", [False, True])
def test_vmap_of_no_elements(return_lse: bool) -> None:
    q, bias = torch.zeros(0, 2, 5, 8), torch.zeros(5, 6, 0, requires_grad=True)
    k, v = torch.zeros(2, 6, 8), torch.zeros(2, 6, 3)

    def f(q: Any, bias: Any) -> Any:
        return attention(q, k, v, return_lse=return_lse, bias=bias)

    found = torch.vmap(f, (0, 2))(q, bias)
    shapes = [x.shape for x in found] if return_lse else [found.shape]
    assert shapes == [(0, 2, 5, 3), (0, 2, 5)][: len(shapes)]
    out = found[0] if return_lse else found
    assert torch.autograd.grad(out.sum(), bias)[0].shape == bias.shape


def test_batched_gradients_are_those_one_by_one() -> None:
    q, k, v, bias, table = drawn(0, (2, 3, 4), (2, 5, 4), (2, 5, 3), (3, 5), (2, 8))

    def f(*given: Any) -> Any:
        q, k, v, bias, table = given
        result = attention(q, k, v, return_lse=True, bias=bias, score_mod=learned, aux=(table,))
        return torch.cat([result.out, result.lse[..., None]], -1)

    given = q, k, v, bias, table
    out = f(*given)
    (upstream,) = (x.detach() for x in drawn(1, (6, *out.shape)))
    found = torch.autograd.grad(out, given, upstream, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(out, given, x, retain_graph=True) for x in upstream]
    for x, parts in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(parts), rtol=0, atol=0)
    jacobian = torch.autograd.functional.jacobian
    for x, y in zip(jacobian(f, given, vectorize=True), jacobian(f, given), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_a_seed_may_be_a_tensor_and_any_number_of_64_bits() -> None:
    q, k, v = (x.detach() for x in drawn(0, (8, 4), (8, 4), (8, 4)))
    arrays = [array_of(x) for x in (q, k, v)]
    for seed in (7, (1 << 64) - 1, 1 << 63):
        expected = tileattn.forward(*arrays, dropout_p=0.5, seed=seed).out
        np.testing.assert_array_equal(attention(q, k, v, dropout_p=0.5, seed=seed), expected)
    expected = tileattn.forward(*arrays, dropout_p=0.5, seed=7).out
    found = attention(q, k, v, dropout_p=0.5, seed=torch.tensor(7))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_and_arrays_share_their_memory(dtype: Any) -> None:
    x = torch.arange(24.0).to(dtype).view(2, 3, 4).transpose(0, 1)
    array = array_of(x)
    assert array.ctypes.data == x.data_ptr()
    assert array.strides == tuple(n * x.itemsize for n in x.stride())
    again = tensor_of(array)
    assert again.data_ptr() == x.data_ptr()
    assert torch.equal(again, x)


def test_meta_tensors_have_the_shapes_of_the_result() -> None:
    q, k = (torch.empty(shape, device="meta") for shape in ((2, 4, 5, 8), (2, 2, 9, 8)))
    out, lse = attention(q, k, k, return_lse=True)
    assert out.is_meta
    assert (out.shape, lse.shape) == ((2, 4, 5, 8), (2, 4, 5))


def test_nested_tensors_are_named() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match="q must be a dense tensor; got a nested tensor"):
        attention(nested, nested, nested)


def test_second_derivatives_are_refused() -> None:
    (x,) = drawn(0, (5, 8))
    (first,) = torch.autograd.grad(attention(x, x, x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward"):
        first.sum().backward()


def test_forward_mode_and_function_transforms_are_refused() -> None:
    (x,) = (y.detach() for y in drawn(0, (5, 8)))

    def f(x: Any) -> Any:
        return attention(x, x, x).sum()

    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        f(forward_ad.make_dual(x, x))
    for transform in (torch.func.grad, torch.func.hessian):
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            transform(f)(x)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.jvp(f, (x,), (x,))


def test_an_absent_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "tileattn.torch")
    with pytest.raises(ModuleNotFoundError, match=r"tileattn\.torch needs PyTorch: pip install"):
        importlib.import_module("tileattn.torch")
