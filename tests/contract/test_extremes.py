"""Scores of any size: amplitudes, additive masks, caps, sinks and positions near the ends.

Where scores are large, ``error_bound`` allows for the rounding of their products, and from some
1e7 on, that is any P at all. So the same calls are also made with scores that every dtype holds
exactly. P depends on differences of scores only, and the differences are a small problem with a
narrow bound.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tileattn
from tests.arrays import Array, Given, normal
from tests.conftest import Runner
from tileattn import Attention, Gradients, reference
from tileattn.oracle.dense import visibility
from tileattn.testing import AttentionCase, Bound, assert_attention_close, error_bound, problems
from tileattn.testing.arrays import largest

pytestmark = pytest.mark.usefixtures("one_blas_thread")

DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


def sums_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def vacuous(bound: Bound) -> bool:
    """True if all finite numbers of the dtype are within the bound; then infinities are too."""
    return bound.error > largest(bound.dtype)


@settings(max_examples=100)
@given(case=problems(max_length=80, extremes=True))
def test_every_result_is_that_of_the_oracle(runner: Runner, case: AttentionCase) -> None:
    q, k, v, dout, dlse, options = case
    assume(runner.why_not(q, k, v, options) is None)
    # A cap beyond the range of float32 is none, and the plain formula has no error to go by there.
    cap = options.get("softcap")
    boundable = options if cap is None or cap < 1e38 else options | {"softcap": None}
    bounds = error_bound(q, k, v, dout, dlse=dlse, **boundable)
    attention = runner.forward(q, k, v, **options)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    grads = runner.backward(dout, q, k, v, *attention, dlse=dlse, **options)
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    held = [n for n in GRADIENTS if n not in bounds or not vacuous(bounds[n])]
    assert_attention_close(grads, expected, bounds, names=held)


# --- scores that are exact ------------------------------------------------------------------------


def scores_of(q: Array, k: Array, options: dict[str, Any]) -> Array:
    """Evaluate the scores in the dtype of the sums; products of small integers are exact there."""
    q, k = (x.astype(sums_of(q.dtype)) for x in (q, k))
    k = np.repeat(k, q.shape[1] // max(k.shape[1], 1), axis=1)
    s: Array = q.dtype.type(options["scale"]) * (q @ k.swapaxes(2, 3))
    return s if options.get("bias") is None else s + options["bias"].astype(s.dtype)


def check_exact_scores(
    runner: Runner,
    arrays: Given,
    dlse: Array | None,
    options: dict[str, Any],
) -> None:
    """Compare with the problem whose scores are those of a bias: what they lack to their maximum.

    Of an ordinary row the logsumexp alone tells P, which has as many digits as that leaves it: its
    scores stay what they are.

    Where q is 0 the bias alone decides, and k still has its part in dq; where k is 0, q in dk.
    """
    q, k, v, dout = arrays
    s = scores_of(q, k, options).astype(np.float64)
    masks = {name: x for name, x in options.items() if name != "bias"}
    visible = visibility(s.shape, masks)
    m = np.max(np.where(visible, s, -np.inf), axis=3, keepdims=True, initial=-np.inf)
    attention = runner.forward(q, k, v, **options)
    ordinary = abs(attention.lse[..., None]) <= (512 if q.dtype.itemsize == 2 else 16)
    small = masks | {"bias": s - np.where(np.isinf(m) | ordinary, 0, m)}
    grads = runner.backward(dout, q, k, v, *attention, dlse=dlse, **options)
    for qs, ks, names in ((0 * q, k, ("dq", "dv")), (q, 0 * k, ("dk",))):
        bounds = error_bound(qs, ks, v, dout, dlse=dlse, **small)
        expected = reference.forward(qs, ks, v, **small)
        assert_attention_close(attention, expected, bounds, names=("out",))
        of_expected = reference.backward(dout, qs, ks, v, dlse=dlse, **small)
        assert_attention_close(grads, of_expected, bounds, names=names)


exact_cases = problems(
    max_length=80,
    options=("bias", "mask", "causal", "window", "kv_lengths", "dropout_p", "seed"),
    head_dims=(16, 24),
    poison=False,
    extremes=True,
)


@settings(max_examples=100)
@given(case=exact_cases, exponent=st.integers(-6, 22))
def test_probabilities_are_those_of_the_differences(
    runner: Runner, case: AttentionCase, exponent: int
) -> None:
    """Scores are multiples of ``2**exponent``, up to 1e8, before a mask is added."""
    assume(runner.why_not(case.q, case.k, case.v, case.options) is None)
    arrays = [x.reshape((1,) * (4 - x.ndim) + x.shape) for x in case[:4]]
    dlse = None if case.dlse is None else case.dlse.reshape(arrays[3].shape[:3])
    scale = 2.0**-8
    for n, size in ((0, exponent // 2), (1, exponent - exponent // 2)):
        whole = np.clip(np.rint(arrays[n].astype(np.float64)), -1, 1)
        arrays[n] = np.ldexp(whole, size + 4).astype(case.q.dtype)
    q, k, v, dout = arrays
    check_exact_scores(runner, (q, k, v, dout), dlse, case.options | {"scale": scale})


@pytest.mark.parametrize("exponent", [3, 8, 22])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_long_problems_too(backend: Runner, options: dict[str, Any], exponent: int) -> None:
    """Long enough for a group of one head, of which some rows are large."""
    q, k, v, dout = normal((1, 2, 1, 530, 570, 16, 20))
    q, k = (np.clip(np.rint(x), -1, 1) for x in (q, k))
    q[:, 0] = 0
    q[:, 1, 70:90] = np.ldexp(q[:, 1, 70:90], exponent)
    check_exact_scores(backend, (q, k, v, dout), None, options | {"scale": 0.25})


# --- what shifts all scores -----------------------------------------------------------------------


def ends() -> list[tuple[np.dtype[Any], float]]:
    """Additive masks that libraries use, for each dtype that holds them."""
    values = [(dtype, -largest(dtype)) for dtype in DTYPES]
    return values + [(dtype, x) for dtype in DTYPES[1:] for x in (-1e9, -1e4)]


@pytest.mark.parametrize("rows", [slice(1), slice(None)], ids=["one row", "all rows"])
@pytest.mark.parametrize(("dtype", "mask"), ends(), ids=str)
def test_a_row_that_is_masked_by_a_number_is_a_mean(
    runner: Runner, dtype: np.dtype[Any], mask: float, rows: slice
) -> None:
    """Its scores are equal; gradients must not grow with the number of keys."""
    rng = np.random.default_rng(0)
    q, k = np.zeros((2, 1, 2, 300, 8), dtype)
    v, dout = rng.normal(size=(2, 1, 2, 300, 12)).astype(dtype)
    bias = np.zeros((1, 1, 300, 300), dtype)
    bounds = error_bound(q, k, v, dout, bias=bias)
    expected = reference.forward(q, k, v, bias=bias)
    of_expected = reference.backward(dout, q, k, v, bias=bias)
    bias[:, :, rows] = mask
    attention = runner.forward(q, k, v, bias=bias)
    assert_attention_close(attention, expected, bounds, names=("out",))
    grads = runner.backward(dout, q, k, v, *attention, bias=bias)
    assert_attention_close(grads, of_expected, bounds)


@pytest.mark.parametrize(("dtype", "mask"), ends(), ids=str)
def test_a_sink_at_the_lowest_number_counts(
    runner: Runner, dtype: np.dtype[Any], mask: float
) -> None:
    rng = np.random.default_rng(0)
    q, k = np.zeros((2, 1, 3, 70, 8), dtype)
    v, dout = rng.normal(size=(2, 1, 3, 70, 12)).astype(dtype)
    small: dict[str, Any] = {
        "bias": np.zeros((3, 1, 1), dtype),
        "sinks": np.array([0, 0, -np.inf], dtype),
    }
    bounds = error_bound(q, k, v, dout, **small)
    expected = reference.forward(q, k, v, **small)
    of_expected = reference.backward(dout, q, k, v, **small)
    options = {name: x + dtype.type(mask) for name, x in small.items()}
    attention = runner.forward(q, k, v, **options)
    assert_attention_close(attention, expected, bounds, names=("out",))
    grads = runner.backward(dout, q, k, v, *attention, **options)
    assert_attention_close(grads, of_expected, bounds)


def test_an_infinite_sink_takes_all(runner: Runner) -> None:
    q, k, v, dout = np.random.default_rng(0).normal(size=(4, 2, 30, 8)).astype(np.float32)
    sinks = np.array([np.inf, 0.5], np.float32)
    attention = runner.forward(q, k, v, sinks=sinks)
    grads = runner.backward(dout, q, k, v, *attention, sinks=sinks)
    assert not attention.out[0].any()
    assert np.isposinf(attention.lse[0]).all()
    for gradient in (grads.dq, grads.dk, grads.dv):
        assert not gradient[0].any()
        assert gradient[1].all()


# --- one key --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("amplitude", [1e-3, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_key_has_all_of_the_probability(
    runner: Runner, dtype: np.dtype[Any], amplitude: float, scale: float | None
) -> None:
    """Whatever the score is: dv is dout to the bit, or off by what products of tf32 parts are."""
    rng = np.random.default_rng(0)
    q = np.clip(rng.normal(size=(1, 48)) * amplitude, -6e4, 6e4).astype(dtype)
    v, dout = rng.normal(size=(2, 1, 8)).astype(dtype)
    bounds = error_bound(0 * q, 0 * q, v, dout, scale=scale)
    expected = reference.forward(0 * q, 0 * q, v, scale=scale)
    attention = runner.forward(q, q, v, scale=scale)
    assert_attention_close(attention, expected, bounds, names=("out",))
    of_expected = reference.backward(dout, 0 * q, 0 * q, v, scale=scale)
    exact = runner.name != "cupy" or dtype != np.float32
    if exact:
        np.testing.assert_array_equal(attention.out, v)
    for order in (False, True):
        grads = runner.backward(dout, q, q, v, *attention, deterministic=order, scale=scale)
        assert_attention_close(grads, of_expected, bounds, names=("dv",))
        if exact:
            np.testing.assert_array_equal(grads.dv, dout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("amplitude", [10, 1e2, 1e3, 1e4])
@pytest.mark.parametrize(("D", "mean"), [(48, 0.0), (256, 1.0)])
@pytest.mark.parametrize("other", [False, True], ids=["its own lse", "another's lse"])
def test_probabilities_sum_to_one(
    runner: Runner, other: bool, D: int, mean: float, amplitude: float, dtype: np.dtype[Any]
) -> None:
    """Rounded scores may be those of another problem, but they have a softmax as well.

    Another backend rounds them in another way. Where all keys point the same way, sums of many
    products are off by more than their last unit.
    """
    rng = np.random.default_rng(0)
    q, k = ((rng.normal(size=(2, 3, n, D)) / 3 + mean) * amplitude for n in (90, 70))
    q, k = q.astype(dtype), k.astype(dtype)
    v, dout = np.ones((2, 3, 70, 1), dtype), np.ones((2, 3, 90, 1), dtype)
    bound = error_bound(0 * q, 0 * k, v, dout)["dv"]
    out, lse = runner.forward(q, k, v, scale=0.3)
    if other:
        lse = reference.forward(q, k, v, scale=0.3).lse.astype(lse.dtype)
    dv = runner.backward(dout, q, k, v, out, lse, scale=0.3).dv.astype(np.float64)
    assert abs(dv.sum() - 2 * 3 * 90) <= np.sqrt(dv.size) * bound.error  # Cauchy and Schwarz


# --- an lse that counts other keys ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("amplitude", [1, 3, 10])
def test_gradients_over_some_of_the_keys_add_up(
    runner: Runner, dtype: np.dtype[Any], amplitude: float
) -> None:
    """Each part of the keys gets ``out`` and ``lse`` of all: its P sums to less than 1."""
    q, k, v, dout = normal((1, 2, 1, 130, 170, 16, 20), np.float64)
    q, k, v, dout = (x.astype(dtype) for x in (q * amplitude, k * amplitude, v, dout))
    parts = [slice(0, 40), slice(40, 170)]
    bounds = error_bound(q, k, v, dout, scale=1.0)
    halves = [runner.forward(q, k[:, :, part], v[:, :, part], scale=1.0) for part in parts]
    attention = tileattn.merge([half.out for half in halves], [half.lse for half in halves])
    exact = reference.forward(q, k, v, scale=1.0)
    attention = Attention(exact.out.astype(dtype), attention.lse)  # merged out is rounded twice
    grads = [
        runner.backward(dout, q, k[:, :, part], v[:, :, part], *attention, scale=1.0)
        for part in parts
    ]
    expected = reference.backward(dout, q, k, v, scale=1.0)
    dk, dv = (np.concatenate([getattr(g, name) for g in grads], axis=2) for name in ("dk", "dv"))
    dq = grads[0].dq + grads[1].dq
    names = ("dq", "dk", "dv") if dtype == sums_of(dtype) else ("dk", "dv")  # dq is rounded twice
    assert_attention_close(Gradients(dq, dk, dv, None, None), expected, bounds, names=names)


# --- heads that differ ----------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1, 30), (20, 30), (300, 290)])
@pytest.mark.parametrize("options", [{}, {"softcap": 1e3}], ids=str)
def test_a_head_of_large_scores_changes_no_bit_of_another(
    runner: Runner, lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    q, k, v, dout = normal((2, 3, 3, *lengths, 19, 20))
    before = runner.backward(dout, q, k, v, *runner.forward(q, k, v, **options), **options)
    q[1, 2] *= 1e3
    after = runner.backward(dout, q, k, v, *runner.forward(q, k, v, **options), **options)
    for ours, theirs in zip(after[:3], before[:3], strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1, :2], theirs[1, :2])
        assert (ours[1, 2] != theirs[1, 2]).any()
