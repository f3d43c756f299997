"""The contract suite: every backend, the same problems, the same bounds.

``backend`` (in ``conftest.py``) is each backend that can run here, one that cannot is skipped with
the sentence that it gives; ``runner`` is that, and a backend whose tiles are small.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from numpy.typing import NDArray

import tileattn
from tests.conftest import Runner
from tileattn import Attention, BlockMask, Gradients, dropout_mask, reference
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]


def check(runner: Runner, case: AttentionCase) -> tuple[Attention, Gradients]:
    """Hold every result of both passes to the oracle."""
    q, k, v, dout, dlse, options = case
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    attention = runner.forward(q, k, v, **options)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    grads = runner.backward(dout, q, k, v, *attention, dlse=dlse, **options)
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(grads, expected, bounds)
    return attention, grads


def make(
    sizes: tuple[int, int, int, int, int, int, int], dtype: Any = np.float32, seed: int = 0
) -> tuple[Array, Array, Array, Array, Array]:
    """Make q, k, v, dout and dlse of sizes B, Hq, Hkv, Nq, Nk, D, Dv."""
    B, Hq, Hkv, Nq, Nk, D, Dv = sizes
    rng = np.random.default_rng(seed)
    shapes = ((B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv), (B, Hq, Nq, Dv))
    q, k, v, dout = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    sums = np.float64 if dtype == np.float64 else np.float32
    return q, k, v, dout, rng.normal(size=(B, Hq, Nq)).astype(sums)


def relative_error(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


# --- whole problems -----------------------------------------------------------------------------


# In parts, for processes that work side by side.
@pytest.mark.parametrize("_part", range(8))
@settings(max_examples=10)
@given(case=problems(max_length=80))
def test_every_result_is_that_of_the_oracle(
    runner: Runner, case: AttentionCase, _part: int
) -> None:
    assume(runner.why_not(case.q, case.k, case.v, case.options) is None)
    check(runner, case)


@settings(max_examples=10)
@given(case=problems(head_dims=(64, 80), options=("causal", "softcap", "sinks"), edges=False))
def test_longer_problems(backend: Runner, case: AttentionCase) -> None:
    # Without lengths: over a few keys with equal large scores the plain formula has an exact lse,
    # and the scale that is folded into q, rounded the same way in all D terms, leaves a few ulp.
    assume(backend.why_not(case.q, case.k, case.v, case.options) is None)
    check(backend, case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize("sizes", [(2, 4, 2, 67, 93, 32, 24), (1, 2, 1, 270, 517, 64, 48)])
def test_accuracy_on_standard_normal_inputs(
    backend: Runner, sizes: Any, dtype: Any, bound: float, causal: bool
) -> None:
    q, k, v, dout, dlse = make(sizes, dtype)
    attention = backend.forward(q, k, v, causal=causal)
    grads = backend.backward(dout, q, k, v, *attention, dlse=dlse, causal=causal)
    expected = reference.forward(q, k, v, causal=causal)
    of_expected = reference.backward(dout, q, k, v, dlse=dlse, causal=causal)
    results = attention._asdict() | grads._asdict()
    for name, theirs in (expected._asdict() | of_expected._asdict()).items():
        if theirs is not None:
            error = relative_error(results[name], theirs)
            ok = error <= bound
            assert ok, f"{name}: {error}"


# --- sizes of several tiles ---------------------------------------------------------------------

MANY = (2, 4, 2, 67, 93, 20, 12)
"""Many small tiles; one of the NumPy backend, whose own tiles LONG fills."""
B, HQ, HKV, NQ, NK, D, DV = MANY

LONG = (2, 2, 1, 270, 520, 20, 12)
BIAS_SHAPES = [
    (B, HQ, NQ, NK),
    (1, HQ, NQ, NK),
    (B, 1, NQ, NK),
    (NQ, NK),
    (B, HQ, 1, NK),
    (HQ, NQ, 1),
    (B, 1, 1, NK),
    (B, 1, NQ, 1),
    (NK,),
    (NQ, 1),
    (HQ, 1, 1),
    (B, 1, 1, 1),
    (1, 1, 1, 1),
    (),
]


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_the_gradient_for_a_bias_sums_over_what_it_was_repeated_over(
    runner: Runner, shape: tuple[int, ...]
) -> None:
    q, k, v, dout, dlse = make(MANY)
    bias = np.asarray(np.random.default_rng(1).normal(size=shape)).astype(np.float32)
    grads = check(runner, AttentionCase(q, k, v, dout, dlse, {"bias": bias, "causal": True}))[1]
    assert grads.dbias.shape == shape


def block_mask(size: tuple[int, int]) -> BlockMask:
    """Make a mask of skipped, mixed and full blocks that differ by head."""
    return BlockMask.from_predicate(
        lambda b, h, i, j: ((i // 19 + j // 23 + h + b) % 3 > 0) & ((i + j) % 11 < 10 + (j > 50)),
        shape=(B, HQ, NQ, NK),
        block_size=size,
    )


MANY_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "causal, top left": {"causal": True, "q_offset": 0},
    "window": {"window": (30, 17), "q_offset": [5, 70]},
    "lengths": {"kv_lengths": [31, 88], "causal": True},
    "block mask": {"block_mask": block_mask((7, 10))},
    "large blocks": {"block_mask": block_mask((40, 50)), "causal": True},
    "mask": {"mask": np.random.default_rng(2).random((HQ, NQ, NK)) < 0.5},
    "dropout": {"dropout_p": 0.3, "seed": 77, "causal": True},
    "softcap and alibi": {"softcap": 2.0, "alibi_slopes": np.array([0.5, 0.1, 0.02, 0.0])},
    "sinks": {"sinks": np.array([0.3, -np.inf, 5.0, 1.0], np.float32), "window": (20, 0)},
}


@pytest.mark.parametrize("options", MANY_OPTIONS.values(), ids=MANY_OPTIONS.keys())
def test_options_over_many_tiles(runner: Runner, options: dict[str, Any]) -> None:
    check(runner, AttentionCase(*make(MANY), options))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (100, 200), "kv_lengths": [300, 517]},
        {"bias": np.random.default_rng(1).normal(size=(2, 270, 1))},
        {"bias": np.random.default_rng(1).normal(size=520)},
        {"mask": np.random.default_rng(1).random((2, 1, 270, 520)) < 0.5, "dropout_p": 0.2},
    ],
)
def test_options_over_long_tiles(backend: Runner, options: dict[str, Any]) -> None:
    check(backend, AttentionCase(*make(LONG), options))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_dtypes_over_many_tiles(runner: Runner, dtype: Any) -> None:
    check(runner, AttentionCase(*make(MANY, dtype), {"causal": True, "softcap": 3.0}))


@pytest.mark.parametrize("large", [20.0, 1000.0])
def test_large_scores(runner: Runner, large: float) -> None:
    """Maxima move from tile to tile, and most probabilities are 0."""
    q, k, v, dout, dlse = make(MANY)
    check(runner, AttentionCase(q * np.float32(large), k, v, dout, dlse, {}))


@pytest.mark.parametrize(
    "sizes", [(2, 6, 6, 33, 170, 8, 40), (2, 6, 1, 170, 33, 40, 8), (1, 1, 1, 1, 700, 16, 16)]
)
def test_heads_dimensions_and_lengths(runner: Runner, sizes: Any) -> None:
    check(runner, AttentionCase(*make(sizes), {"causal": True}))


def test_data_with_tokens_before_heads(runner: Runner) -> None:
    q, k, v, dout, dlse = make(MANY)
    expected = check(runner, AttentionCase(q, k, v, dout, dlse, {"causal": True}))
    q, k, v, dout = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v, dout))
    results = check(runner, AttentionCase(q, k, v, dout, dlse, {"causal": True}))
    for ours, theirs in zip(results, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(x, y)


def test_merge_over_split_keys(runner: Runner) -> None:
    q, k, v, _, _ = make(MANY)
    sinks = np.ones(HQ, np.float32)
    parts = [
        runner.forward(
            q,
            k[:, :, lo:hi],
            v[:, :, lo:hi],
            causal=True,
            q_offset=NK - NQ - lo,
            sinks=sinks if lo == 0 else None,
        )
        for lo, hi in ((0, 30), (30, 31), (31, 80), (80, NK))
    ]
    expected = reference.forward(q, k, v, causal=True, sinks=sinks)
    bounds = error_bound(q, k, v, causal=True, sinks=sinks)
    merged = tileattn.merge([part.out for part in parts], [part.lse for part in parts])
    assert_attention_close(merged, expected, bounds)


# --- options, each by its own words -------------------------------------------------------------

SHORT = (2, 4, 2, 29, 23, 8, 12)


def test_dropout_drops_what_dropout_mask_says(runner: Runner) -> None:
    q, k, v, _, _ = make(SHORT, np.float64)
    kept = dropout_mask((2, 4, 29, 23), 0.4, 123)
    assert 0.5 < kept.mean() < 0.7
    s = (q @ np.repeat(k, 2, axis=1).swapaxes(2, 3)) / np.sqrt(8)
    lse = np.logaddexp.reduce(s, axis=3)
    P = np.exp(s - lse[..., None]) * kept / 0.6
    expected = Attention(P @ np.repeat(v, 2, axis=1), lse)
    bounds = error_bound(q, k, v, dropout_p=0.4, seed=123)
    assert_attention_close(runner.forward(q, k, v, dropout_p=0.4, seed=123), expected, bounds)
    other = runner.forward(q, k, v, dropout_p=0.4, seed=124)
    with pytest.raises(AssertionError, match="out"):
        assert_attention_close(other, expected, bounds)


@pytest.mark.parametrize("far", [2**62, 2**63 - 1, 2**80])
def test_windows_that_reach_past_every_key(runner: Runner, far: int) -> None:
    """Positions run from -6 on: their sums with a far window do not fit 64 bits."""
    q, k, v, _, _ = make(SHORT)
    for near in (0, 3, None):
        for window, plain in (((far, near), (None, near)), ((near, far), (near, None))):
            ours = runner.forward(q, k, v, window=window)
            theirs = runner.forward(q, k, v, window=plain)
            np.testing.assert_array_equal(ours.out, theirs.out)
            np.testing.assert_array_equal(ours.lse, theirs.lse)


def test_offsets_far_away(runner: Runner) -> None:
    q, k, v, _, _ = make(SHORT)
    nothing = runner.forward(q, k, v, causal=True, q_offset=-(2**40))
    assert not nothing.out.any()
    assert np.isneginf(nothing.lse).all()
    everything = runner.forward(q, k, v, causal=True, q_offset=2**40)
    np.testing.assert_array_equal(everything.out, runner.forward(q, k, v).out)


def test_a_bias_of_minus_infinity_is_a_mask(runner: Runner) -> None:
    q, k, v, dout, dlse = make(SHORT)
    seen = np.random.default_rng(3).random((4, 29, 23)) < 0.5
    seen[:, 4] = False
    v[:, :, 5], k[:, :, 6] = np.nan, np.inf
    seen[..., 5:7] = False
    bias = np.where(seen, 0, -np.inf).astype(np.float32)
    k[:, :, 6] = 1
    attention = runner.forward(q, k, v, bias=bias)
    grads = runner.backward(dout, q, k, v, *attention, dlse=dlse, bias=bias)
    bounds = error_bound(q, k, v, dout, dlse=dlse, mask=seen)
    of_masked = reference.backward(dout, q, k, v, dlse=dlse, mask=seen)
    assert all(np.isfinite(x).any() for x in (*attention, *grads[:3]))
    assert_attention_close(attention, reference.forward(q, k, v, mask=seen), bounds)
    assert_attention_close(grads, of_masked, bounds, names=("dq", "dk", "dv"))
    assert not grads.dbias[~seen].any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (7, 1), (7, 9)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
def test_keys_that_only_queries_past_the_end_would_see(
    runner: Runner, dtype: Any, shape: tuple[int, int]
) -> None:
    """Tiles have room for more queries than there are, which see more keys."""
    q, k, v, dout, dlse = make((2, 4, 2, 7, 9, 16, 24), dtype)
    options = {"causal": True, "q_offset": -4, "bias": np.full(shape, 0.125, dtype)}
    k[:, :, 3:], v[:, :, 3:] = np.nan, np.inf
    check(runner, AttentionCase(q, k, v, dout, dlse, options))


@pytest.mark.parametrize("bias", [None, np.zeros((), np.float32)], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
def test_the_lse_of_rows_that_see_nothing_is_the_sink(
    runner: Runner, dtype: Any, bias: NDArray[np.float32] | None
) -> None:
    q, k, v, _, _ = make(SHORT, dtype)
    sinks = np.linspace(-1, 1, q.shape[1], dtype=np.float32) * np.finfo(np.float32).max
    nothing = np.zeros((1, 1, q.shape[2], 1), bool)
    out, lse = runner.forward(q, k, v, mask=nothing, sinks=sinks, bias=bias)
    assert not out.any()
    assert (lse == sinks[None, :, None]).all()


def test_16_bit_results_overflow_to_infinity_without_a_warning(runner: Runner) -> None:
    q, k, v, dout, _ = make(SHORT, np.float16)
    v, dout = v * np.float16(3000), dout * np.float16(3000)
    expected = reference.backward(dout, q, k, v, *reference.forward(q, k, v))
    far = [abs(abs(x) / np.finfo(np.float16).max - 1) > 0.02 for x in expected[:3]]
    assert all(x.all() for x in far)  # else rounding decides what overflows
    attention = runner.forward(q, k, v)
    grads = runner.backward(dout, q, k, v, *attention)
    assert np.isinf(grads.dq).any()
    assert not np.isnan(grads.dq).any()
    check(runner, AttentionCase(q, k, v, dout, None, {}))
