"""Tensors of 8 bits as keys and values, and caches of tensors that grow."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn import UnsupportedError, reference
from tileattn.testing import assert_attention_close, error_bound

torch = pytest.importorskip("torch", reason="it takes tensors: pip install torch")

from tileattn.torch import append_kv, attention  # noqa: E402 - after the skip

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 17, 16, 8
DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def call(dtype: Any, q_dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    q, k, v = drawn(B, HQ, NQ, D).to(q_dtype), drawn(B, HKV, NK, D), drawn(B, HKV, NK, DV)
    k, v = ((30 * x).round().clamp(-127, 127).to(dtype) for x in (k, v))
    return q, k, v, {"k_descale": torch.rand(B, HKV, NK) / 20, "v_descale": 0.04}


def check(found: Any, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    expected = reference.forward(q, k, v, **options)
    assert_attention_close(tuple(found), expected, error_bound(q, k, v, **options))


@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_of_8_bits(dtype: Any, q_dtype: Any) -> None:
    q, k, v, options = call(dtype, q_dtype)
    for _ in range(4):  # calls that are known take a shorter way
        found = attention(q, k, v, return_lse=True, causal=True, **options)
        check(found, q, k, v, options | {"causal": True})


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_strides_are_kept(dtype: Any) -> None:
    q, k, v, options = call(dtype)
    stored = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    found = attention(q, *stored, return_lse=True, **options)
    for mine, other in zip(found, attention(q, k, v, return_lse=True, **options), strict=True):
        assert torch.equal(mine, other)


def test_compiled_calls() -> None:
    q, k, v, options = call(torch.int8)
    torch._dynamo.reset()
    fast = torch.compile(attention, backend="aot_eager", fullgraph=True)
    check(fast(q, k, v, return_lse=True, **options), q, k, v, options)


def test_there_are_no_gradients() -> None:
    q, k, v, options = call(torch.int8, torch.float32)
    out = attention(q.requires_grad_(), k, v, **options)
    with pytest.raises(UnsupportedError, match="backward does not support k_descale and v_desca"):
        out.sum().backward()
    learned = options["k_descale"].requires_grad_()
    with pytest.raises(UnsupportedError, match="k_descale requires a gradient, which attention"):
        attention(q.detach(), k, v, k_descale=learned, v_descale=1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k_descale": None}, ValueError, "k_descale must be given with k of dtype int8"),
        ({"k_descale": "1"}, TypeError, "k_descale must be a number from 0 to"),
        ({"v_descale": -1.0}, ValueError, "v_descale must be a number from 0 to"),
        ({"v_descale": torch.ones(5)}, ValueError, "v_descale must be a number, or have shape"),
        ({"v_descale": torch.ones(2).double()}, TypeError, "v_descale must have dtype float32"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type, message: str) -> None:
    q, k, v, given = call(torch.int8)
    with pytest.raises(error, match=message):
        attention(q, k, v, **(given | options))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_caches_grow(dtype: Any, compiled: bool) -> None:
    rows = torch.randn(2, B, HKV, 4, D, generator=torch.Generator().manual_seed(1))
    k, v = rows.to(torch.bfloat16)
    caches = [torch.zeros(B, HKV, 9, D).to(dtype) for _ in range(2)]
    k_descale, v_descale = torch.zeros(B, HKV, 9), torch.tensor([0.01, 0.02])
    arrays = [
        np.zeros(x.shape, np.int8 if dtype is torch.int8 else "float8_e4m3fn") for x in caches
    ]
    wanted = np.zeros((B, HKV, 9), np.float32)
    function: Any = append_kv
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(append_kv, backend="aot_eager", fullgraph=True)
    found = function(*caches, k, v, kv_lengths=[1, 5], k_descale=k_descale, v_descale=v_descale)
    bfloat16 = [x.view(torch.int16).numpy().view("bfloat16") for x in (k, v)]
    more: dict[str, Any] = {"k_descale": wanted, "v_descale": v_descale.numpy()}
    new = tileattn.append_kv(
        arrays[0], arrays[1], bfloat16[0], bfloat16[1], kv_lengths=[1, 5], **more
    )
    assert found.tolist() == new.tolist()
    for mine, other in zip(caches, arrays, strict=True):
        assert np.array_equal(mine.view(torch.uint8).numpy(), other.view(np.uint8))
    assert np.array_equal(k_descale.numpy(), wanted)
    assert wanted[0, :, 1:5].all()


def test_one_tensor_may_dequantise_both_caches() -> None:
    torch._dynamo.reset()
    fast = torch.compile(append_kv, backend="aot_eager", fullgraph=True)
    for function in (append_kv, fast):
        k_cache, v_cache = torch.zeros(2, 1, 2, 4, 8, dtype=torch.int8).unbind()
        k, v = torch.ones(2, 1, 2, 3, 8).unbind()
        both = torch.tensor([0.5, 0.1])
        function(k_cache, v_cache, k, v, kv_lengths=1, k_descale=both, v_descale=both)
        assert v_cache[0, :, 1:, 0].tolist() == [[2, 2, 2], [10, 10, 10]]
        assert torch.equal(k_cache, v_cache)
        assert both.tolist() == torch.tensor([0.5, 0.1]).tolist()


def test_writes_to_descales_are_seen_by_autograd() -> None:
    k_cache, v_cache, k, v = (torch.zeros(1, 1, 4, 8, dtype=torch.int8) for _ in range(4))
    descale = torch.zeros(1, 1, 4)
    before = descale._version
    append_kv(
        *(k_cache, v_cache, k.float(), v.float()), kv_lengths=0, k_descale=descale, v_descale=1
    )
    assert descale._version > before
