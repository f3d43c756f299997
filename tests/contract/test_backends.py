"""The contract suite: every backend, the same problems, the same bounds.

``backend`` (in ``conftest.py``) is each backend that can run here, one that cannot is skipped with
the sentence that it gives; ``runner`` is that, and a backend whose tiles are small.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from numpy.typing import NDArray

import tileattn
from tests.arrays import Array, Sizes, normal, relative_error
from tests.conftest import Runner
from tileattn import Attention, Gradients, reference
from tileattn.dtypes import DTYPES
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems

pytestmark = pytest.mark.usefixtures("one_blas_thread")


def check(runner: Runner, case: AttentionCase) -> tuple[Attention, Gradients]:
    """Compare every result of both passes with the oracle."""
    q, k, v, dout, dlse, options = case
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    attention = runner.forward(q, k, v, **options)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    grads = runner.backward(dout, q, k, v, *attention, dlse=dlse, **options)
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(grads, expected, bounds)
    return attention, grads


def make(sizes: Sizes, dtype: Any = np.float32) -> tuple[Array, Array, Array, Array, Array]:
    """Make q, k, v, dout and dlse."""
    sums = np.float64 if dtype == np.float64 else np.float32
    dlse = np.random.default_rng(1).normal(size=(*sizes[:2], sizes[3]))
    return *normal(sizes, dtype), dlse.astype(sums)


# --- whole problems -----------------------------------------------------------------------------


# In parts, for processes that work side by side.
@pytest.mark.parametrize(
    "_part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
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


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 6, 6, 33, 170, 8, 40), {"causal": True}),
        ((2, 6, 1, 170, 33, 40, 8), {"causal": True}),
        ((1, 1, 1, 1, 700, 16, 16), {"causal": True}),
        (LONG, {"causal": True}),
        (LONG, {"window": (100, 200), "kv_lengths": [300, 517]}),
        (LONG, {"bias": np.random.default_rng(1).normal(size=(2, 270, 1))}),
        (LONG, {"bias": np.random.default_rng(1).normal(size=520)}),
        (LONG, {"mask": np.random.default_rng(1).random((2, 1, 270, 520)) < 0.5, "dropout_p": 0.2}),
    ],
)
def test_longer_than_tiles(runner: Runner, sizes: Any, options: dict[str, Any]) -> None:
    check(runner, AttentionCase(*make(sizes), options))


def test_data_with_tokens_before_heads(runner: Runner) -> None:
    q, k, v, dout, dlse = make(MANY)
    expected = check(runner, AttentionCase(q, k, v, dout, dlse, {"causal": True}))
    q, k, v, dout = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v, dout))
    results = check(runner, AttentionCase(q, k, v, dout, dlse, {"causal": True}))
    for ours, theirs in zip(results, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_over_split_keys(runner: Runner, dtype: Any) -> None:
    q, k, v, _, _ = make(MANY, dtype)
    sinks = np.linspace(-1, 1, HQ, dtype=np.float32)
    parts = [
        runner.forward(
            q,
            k[:, :, lo:hi],
            v[:, :, lo:hi],
            causal=True,
            q_offset=NK - NQ - lo,
            sinks=sinks if hi == 30 else None,
        )
        for lo, hi in ((0, 0), (0, 30), (30, 31), (31, NK))
    ]
    expected = reference.forward(q, k, v, causal=True, sinks=sinks)
    bounds = error_bound(q, k, v, causal=True, sinks=sinks)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        outs: Any = tuple(parts[n].out for n in order)
        lses: Any = (parts[n].lse for n in order)
        assert_attention_close(tileattn.merge(outs, lses), expected, bounds)


# --- options ------------------------------------------------------------------------------------

SHORT = (2, 4, 2, 29, 23, 8, 12)


def test_a_bias_of_minus_infinity_is_a_mask(runner: Runner) -> None:
    q, k, v, dout, dlse = make(SHORT)
    visible = np.random.default_rng(3).random((4, 29, 23)) < 0.5
    visible[:, 4] = False
    v[:, :, 5] = np.nan
    visible[..., 5:7] = False
    bias = np.where(visible, 0, -np.inf).astype(np.float32)
    attention = runner.forward(q, k, v, bias=bias)
    grads = runner.backward(dout, q, k, v, *attention, dlse=dlse, bias=bias)
    bounds = error_bound(q, k, v, dout, dlse=dlse, mask=visible)
    of_masked = reference.backward(dout, q, k, v, dlse=dlse, mask=visible)
    assert all(np.isfinite(x).any() for x in (*attention, *grads[:3]))
    assert_attention_close(attention, reference.forward(q, k, v, mask=visible), bounds)
    assert_attention_close(grads, of_masked, bounds, names=("dq", "dk", "dv"))
    assert not grads.dbias[~visible].any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (7, 1), (7, 9)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
def test_keys_that_only_queries_past_the_end_would_attend_to(
    runner: Runner, dtype: Any, shape: tuple[int, int]
) -> None:
    """Tiles hold more queries than there are, which would attend to more keys."""
    q, k, v, dout, dlse = make((2, 4, 2, 7, 9, 16, 24), dtype)
    options = {"causal": True, "q_offset": -4, "bias": np.full(shape, 0.125, dtype)}
    k[:, :, 3:], v[:, :, 3:] = np.nan, np.inf
    check(runner, AttentionCase(q, k, v, dout, dlse, options))


@pytest.mark.parametrize("bias", [None, np.zeros((), np.float32)], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
def test_the_lse_of_rows_without_a_key_is_the_sink(
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
