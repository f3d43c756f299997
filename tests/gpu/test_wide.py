"""Head dimensions from 257 to 512: pairs of thread blocks on Hopper, and generic tiles."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent, sent_options
from tileattn import reference
from tileattn.backends.cupy import describe
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

F16, BF16, F32 = np.float16, ml_dtypes.bfloat16, np.float32
B, HQ, HKV = 2, 4, 2
ENDS = np.array([0, 70, 70, 333, 500])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "sinks": {"causal": True, "sinks": np.array([0.5, -3.0, 9.0, 1.0], F32)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": np.array([0.5, 0.1, 0.02, 0.3], F32)},
    "lengths": {"kv_lengths": np.array([133, 0]), "causal": True},
    "scale": {"scale": -0.05},
}


def drawn(dtype: Any, D: int, Dv: int, Nq: int, Nk: int, batch: int = B) -> list[Any]:
    rng = np.random.default_rng(D + Nq)
    sizes = (batch, HQ, Nq, D), (batch, HKV, Nk, D), (batch, HKV, Nk, Dv)
    return [rng.normal(size=size).astype(dtype) for size in sizes]


def is_hopper() -> bool:
    return describe.device_of(0).arch == "sm_90a"


def check(arrays: Any, kernel: str = "forward_wide_sm90", **options: Any) -> tileattn.Attention:
    """Hold a call to the oracle; nothing that was there before is left."""
    there = [sent(x) for x in arrays]
    used = tileattn.explain(*there, **sent_options(options)).kernels
    assert used[0].startswith(kernel if is_hopper() else "forward")
    with poisoned():
        found = tileattn.forward(*there, **sent_options(options))
    expected = reference.forward(*arrays, **options)
    assert_attention_close(host(found), expected, error_bound(*arrays, **options))
    return found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "D", "Dv"), [(BF16, 512, 512), (F16, 320, 264)], ids=["bfloat16", "float16"]
)
def test_options(dtype: Any, D: int, Dv: int, options: str) -> None:
    check(drawn(dtype, D, Dv, 200, 333), **OPTIONS[options])


@pytest.mark.parametrize(
    ("Nq", "Nk"), [(1, 1), (1, 300), (300, 1), (128, 128), (129, 640), (513, 130)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(Nq: int, Nk: int, causal: bool) -> None:
    check(drawn(BF16, 512, 512, Nq, Nk), causal=causal)


@pytest.mark.parametrize(("D", "Dv"), [(264, 512), (64, 384), (512, 8), (392, 328)])
def test_head_dimensions(D: int, Dv: int) -> None:
    check(drawn(BF16, D, Dv, 150, 260), causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_have_the_bits_that_they_have_alone(causal: bool) -> None:
    q, k, v = drawn(BF16, 512, 512, 500, 500, batch=1)
    ends: dict[str, Any] = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
    out, lse = check((q, k, v), causal=causal, **ends)
    rows = slice(70, 333)
    alone = tileattn.forward(*(sent(x[:, :, rows]) for x in (q, k, v)), causal=causal)
    assert bits(alone) == bits((out[:, :, rows], lse[:, :, rows]))


def test_the_same_bits_in_any_batch_and_on_every_run() -> None:
    q, k, v = map(sent, drawn(BF16, 512, 512, 300, 700, batch=3))
    whole = tileattn.forward(q, k, v, causal=True)
    for _ in range(20):
        assert bits(tileattn.forward(q, k, v, causal=True)) == bits(whole)
    own = tileattn.forward(q[1:2, 2:], k[1:2, 1:], v[1:2, 1:], causal=True)
    assert bits(own) == bits(x[1:2, 2:] for x in whole)


@pytest.mark.parametrize("amplitude", [20.0, 400.0])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_large_scores(dtype: Any, amplitude: float) -> None:
    q, k, v = drawn(dtype, 320, 320, 150, 700)
    check(((q * amplitude).astype(dtype), k, v))


def test_the_tail_of_a_cache_may_hold_anything() -> None:
    q, k, v = drawn(BF16, 512, 512, 100, 400)
    k[:, :, 133:] = v[:, :, 133:] = np.nan
    check((q, k, v), kv_lengths=np.array([133, 100]), causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_values_that_are_not_finite(causal: bool) -> None:
    """They reach only rows that attend to them, and infinity stays infinity."""
    q, k, v = drawn(BF16, 512, 512, 200, 300)
    v[0, 0, 5, 3], v[0, 0, 190, 300], v[1, 1, 250, 511] = np.nan, np.inf, -np.inf
    q[1, 2, 17, 4], k[0, 1, 280, 8] = np.nan, np.inf
    check((q, k, v), causal=causal)


@pytest.mark.parametrize("options", ["bias", "mask", "dropout_p"])
def test_other_options_have_generic_tiles(options: str) -> None:
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {
        "bias": rng.normal(size=(1, HQ, 150, 260)).astype(F32),
        "mask": rng.random((1, 1, 150, 260)) < 0.5,
        "dropout_p": 0.25,
    }
    check(drawn(BF16, 512, 320, 150, 260), "forward", **{options: given[options]})


@pytest.mark.parametrize("dtype", [F32, np.float64])
def test_wider_elements_have_generic_tiles(dtype: Any) -> None:
    q, k, v = drawn(dtype, 512, 512, 150, 260)
    v[0, 0, 190, 300] = np.nan
    check((q, k, v), "forward", causal=True)
