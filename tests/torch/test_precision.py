"""float32 on tensors is as accurate as float32, whatever PyTorch's own matmuls may do."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="it sets PyTorch's flags: pip install torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402 - PyTorch may be absent

from tests.torch.precision import FOR_ALL, precision, settings  # noqa: E402 - as above
from tests.torch.test_serving import Ignored  # noqa: E402 - as above
from tileattn.torch import attention, cascade, merge, rope, sdpa  # noqa: E402 - as above
from tileattn.torch.flash_attn import flash_attn_with_kvcache  # noqa: E402 - as above

SETTINGS = [
    ("torch.backends", "tf32"),
    ("torch.backends", "bf16"),
    ("torch.backends.cuda.matmul", "ieee"),
    ("torch.backends.cuda.matmul", "tf32"),
    ("torch.backends.mkldnn.matmul", "tf32"),
    ("torch.backends.mkldnn.matmul", "bf16"),
    (FOR_ALL, "high"),
    (FOR_ALL, "medium"),
]
WAYS = {"eager": nullcontext, "dispatched": Ignored}
MATMUL = re.compile(r"aten::\w*(mm|mv|dot|matmul|linear|einsum|conv)")


def learned(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    del b
    return s + table[h, abs(i - j)]


def results() -> list[Any]:
    """Call each function in float32, and differentiate those with gradients."""
    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=rng).requires_grad_()

    q, k, v = drawn(2, 4, 21, 16), drawn(2, 2, 37, 16), drawn(2, 2, 37, 24)
    bias, sinks, table = drawn(4, 21, 37), drawn(4), drawn(4, 37)
    pages: dict[str, Any] = {"block_table": [[3, 0], [3, 1]], "kv_lengths": [30, 25]}
    with torch.no_grad():
        key_pages, value_pages = drawn(2, 4, 2, 16, 16)
        found = [*cascade(q[:, :, :5], key_pages, value_pages, shared_lengths=16, **pages)]
        keys, values = caches = drawn(2, 2, 40, 4, 16)
        row, key, value = drawn(3, 2, 1, 4, 16)
        found += [flash_attn_with_kvcache(row, keys, values, key, value, cache_seqlens=30), caches]
    learn = {"bias": bias, "sinks": sinks, "score_mod": learned, "aux": (table,)}
    left = attention(q, k, v, return_lse=True, causal=True, **learn)
    angle = torch.outer(torch.arange(21.0), torch.arange(1.0, 9.0))
    rotated = rope(q, angle.cos(), angle.sin())
    with sdpa():
        right = torch.nn.functional.scaled_dot_product_attention(rotated, k, v, enable_gqa=True)
    whole = merge([left.out, right], [left.lse, drawn(2, 4, 21)])
    loss = (whole.out * drawn(*whole.out.shape)).sum() + (whole.lse * drawn(2, 4, 21)).sum()
    return [*found, *left, right, *whole, *torch.autograd.grad(loss, (q, k, v, bias, sinks, table))]


def matmuls(call: Callable[[], Any]) -> list[str]:
    """Name the matmuls of PyTorch that a call makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.name for event in profile.events() if MATMUL.match(event.name)]


@pytest.mark.parametrize("way", WAYS)
def test_settings_change_no_bit_and_stay(way: str) -> None:
    with WAYS[way]():
        expected = results()
        for place, value in SETTINGS:
            with precision(place, value):
                before = settings()
                found = results()
                assert settings() == before
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_no_matmul_is_pytorchs(way: str) -> None:
    """On many CPUs the settings change no matmul, so equal bits would prove little."""
    with WAYS[way]():
        assert matmuls(results) == []


def test_the_profiler_finds_matmuls() -> None:
    q, k, v = torch.randn(3, 2, 4, 21, 16).requires_grad_().unbind()
    assert matmuls(lambda: q @ k.mT)
    assert matmuls(lambda: scaled_dot_product_attention(q, k, v))
