"""The helpers that everything else is checked with: what must fail does, what must pass does."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from tests.arrays import Array, Given, normal
from tileattn import reference
from tileattn.oracle.dense import evaluate_backward, evaluate_forward
from tileattn.results import Attention, Gradients
from tileattn.testing import AttentionCase, Bound, assert_attention_close, error_bound, problems
from tileattn.testing.options import DRAW

OPTIONS: dict[str, Any] = {
    "causal": True,
    "softcap": 20.0,
    "bias": np.linspace(-1, 1, 9, dtype=np.float32),
    "sinks": np.array([0.5, -0.5, 0.1, 1.0], np.float32),
}
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def arrays(dtype: Any) -> Given:
    return normal((2, 4, 2, 13, 9, 8, 6), dtype, seed=4)


def plain(dtype: Any) -> tuple[Attention, Gradients]:
    """Evaluate the formula in a dtype, as a backend that stores what it should would."""
    q, k, v, dout = arrays(dtype)
    sums = np.float64 if dtype is np.float64 else np.float32
    forward = evaluate_forward(q, k, v, sums, OPTIONS)
    dq, dk, dv, dbias, dsinks = evaluate_backward(forward, dout, None).grads
    as_option = [x.astype(np.float32) for x in (dbias, dsinks)]
    return (
        Attention(forward.out.astype(dtype), forward.lse),
        Gradients(*(x.astype(dtype) for x in (dq, dk, dv)), *as_option),
    )


def oracle(dtype: Any) -> tuple[Attention, Gradients, dict[str, Bound]]:
    q, k, v, dout = arrays(dtype)
    return (
        reference.forward(q, k, v, **OPTIONS),
        reference.backward(dout, q, k, v, **OPTIONS),
        error_bound(q, k, v, dout, **OPTIONS),
    )


# --- the comparison -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_formula_in_low_precision_passes(dtype: Any) -> None:
    (result, grads), (expected, expected_grads, bounds) = plain(dtype), oracle(dtype)
    assert_attention_close(result, expected, bounds)
    assert_attention_close(grads, expected_grads, bounds)


def test_equal_results_pass_with_no_error_allowed() -> None:
    expected = oracle(np.float64)[0]
    exact = {name: Bound(0.0, np.dtype(np.float64)) for name in ("out", "lse")}
    assert_attention_close(expected, expected, exact)


def put(x: Array, index: tuple[int, ...], value: float) -> Array:
    """Copy an array with one other value."""
    x = x.copy()
    x[index] = value
    return x


Change = Callable[[Array], Any]
WRONG: dict[str, tuple[str, Change, str]] = {
    "a NaN": (
        "out",
        lambda x: put(x, (1, 2, 5, 3), np.nan),
        r"has NaN at other positions than expected; at \(1, 2, 5, 3\)",
    ),
    "all NaN": ("out", lambda x: x * np.float32(np.nan), "has NaN"),
    "an infinity": (
        "lse",
        lambda x: put(x, (1, 2, 5), np.inf),
        r"has \+inf at other positions than",
    ),
    "-infinity": ("lse", lambda x: put(x, (0, 0, 6), -np.inf), "has -inf at other positions than"),
    "swapped heads": (
        "out",
        lambda x: x[:, [0, 2, 1, 3]],
        r"has error .*, above its bound .*; the norm of the expected result is .*; worst at \(",
    ),
    "swapped batches": ("out", lambda x: x[::-1], "has error"),
    "lse in base 2": ("lse", lambda x: (x / np.log(2)).astype(np.float32), "has error"),
    "lse without its sinks": ("lse", lambda x: x - np.float32(1e-3), "has error"),
    "one element": (
        "out",
        lambda x: put(x, (1, 3, 12, 5), 0.0),
        r"has error .* worst at \(1, 3, 12, 5\)",
    ),
    "a relative error of 1e-5": ("out", lambda x: x * np.float32(1 + 1e-5), "has error"),
    "shape": (
        "out",
        lambda x: x[:, :, :-1],
        r"has shape \(2, 4, 12, 6\), expected \(2, 4, 13, 6\)",
    ),
    "a shape that broadcasts": ("lse", lambda x: x[..., None], "has shape"),
    "dtype": ("out", lambda x: x.astype("f8"), "has dtype float64, expected float32"),
    "dtype of lse": ("lse", lambda x: x.astype("f8"), "has dtype float64, expected float32"),
    "no array": ("out", lambda x: x.tolist(), r"is builtins\.list, expected numpy"),
    "nothing": ("lse", lambda _: None, "is None, expected numpy"),
}


@pytest.mark.parametrize(("name", "change", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_result_fails(name: str, change: Change, message: str) -> None:
    right, (expected, _, bounds) = plain(np.float32)[0], oracle(np.float32)
    assert_attention_close(right, expected, bounds)
    wrong = right._replace(**{name: change(getattr(right, name))})
    with pytest.raises(AssertionError, match=f"{name} {message}"):
        assert_attention_close(wrong, expected, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", Gradients._fields)
def test_a_gradient_off_by_a_percent_fails(name: str, dtype: Any) -> None:
    grads, (_, expected, bounds) = plain(dtype)[1], oracle(dtype)
    factor = 1.05 if dtype is ml_dtypes.bfloat16 else 1.01
    x = getattr(grads, name)
    wrong = grads._replace(**{name: (x.astype(np.float64) * factor).astype(x.dtype)})
    with pytest.raises(AssertionError, match=f"^{name} has error"):
        assert_attention_close(wrong, expected, bounds)
    others = [other for other in Gradients._fields if other != name]
    assert_attention_close(wrong, expected, bounds, names=others)


def test_a_gradient_where_there_is_none_fails_and_so_does_a_missing_one() -> None:
    grads, (_, expected, bounds) = plain(np.float32)[1], oracle(np.float32)
    with pytest.raises(AssertionError, match=r"dsinks is None, expected numpy"):
        assert_attention_close(grads._replace(dsinks=None), expected, bounds)
    with pytest.raises(AssertionError, match=r"dbias is numpy\.ndarray, expected None"):
        assert_attention_close(grads, expected._replace(dbias=None), bounds)


def test_a_bound_or_an_error_of_nan_passes_nothing() -> None:
    expected = oracle(np.float64)[0]
    bound = {"out": Bound(float("nan"), np.dtype(np.float64))}
    with pytest.raises(AssertionError, match="out has error"):
        assert_attention_close(expected, expected, bound, names=["out"])


def test_a_result_without_a_bound_fails() -> None:
    result, (expected, _, bounds) = plain(np.float32)[0], oracle(np.float32)
    del bounds["lse"]
    with pytest.raises(AssertionError, match="lse has no bound; bounds are given for out, dq"):
        assert_attention_close(result, expected, bounds)


def test_the_type_of_the_result_counts() -> None:
    (result, grads), (expected, _, bounds) = plain(np.float32), oracle(np.float32)
    with pytest.raises(AssertionError, match="the result is Gradients, expected Attention"):
        assert_attention_close(grads, expected, bounds)
    with pytest.raises(AssertionError, match="the result has dq, dk, dv, dbias, dsinks, expected"):
        assert_attention_close(tuple(grads), expected, bounds)
    with pytest.raises(AssertionError, match="the result has 6 arrays, expected at most 5"):
        assert_attention_close((*grads, result.out), expected, bounds)


class OnDevice:
    """Array of another library."""

    def __init__(self, x: Array) -> None:
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def get(self) -> Array:
        return self.x


def test_arrays_of_another_library_are_copied_where_they_are_expected() -> None:
    result, (expected, _, bounds) = plain(np.float32)[0], oracle(np.float32)
    elsewhere = Attention(*map(OnDevice, result))
    assert_attention_close(elsewhere, expected, bounds, array_type=OnDevice)
    with pytest.raises(AssertionError, match=r"out is .*OnDevice, expected numpy\.ndarray"):
        assert_attention_close(elsewhere, expected, bounds)
    with pytest.raises(AssertionError, match=r"out is numpy\.ndarray, expected .*OnDevice"):
        assert_attention_close(result, expected, bounds, array_type=OnDevice)


def test_nan_and_infinities_in_the_same_places_pass_and_others_do_not() -> None:
    expected = Attention(np.array([1.0, np.nan, np.inf, -np.inf]), np.zeros(1))
    bounds = {"out": Bound(1e-3, np.dtype(np.float32))}
    right = expected._replace(out=expected.out.astype(np.float32))
    assert_attention_close(right, expected, bounds, names=["out"])
    for place in range(4):
        wrong = right._replace(out=put(right.out, (place,), 2.0))
        with pytest.raises(AssertionError, match=r"^out "):
            assert_attention_close(wrong, expected, bounds, names=["out"])


def test_an_overflow_of_the_dtype_of_the_result_is_no_difference() -> None:
    expected = Attention(np.array([1e5, 2.0]), np.zeros(1))
    bounds = {"out": Bound(1e-3, np.dtype(np.float16))}
    right = expected._replace(out=np.array([np.inf, 2.0], np.float16))
    assert_attention_close(right, expected, bounds, names=["out"])


# --- the bound ----------------------------------------------------------------------------------


# Relative to the norm of the result: never nothing, never more than a few units in the last place.
LIMITS = {
    np.dtype(np.float16): (2e-4, 4e-3),
    np.dtype(ml_dtypes.bfloat16): (2e-3, 3e-2),
    np.dtype(np.float32): (2e-8, 4e-6),
    np.dtype(np.float64): (4e-17, 1e-14),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_are_a_few_units_in_the_last_place(dtype: Any) -> None:
    expected, grads, bounds = oracle(dtype)
    for name, x in (expected._asdict() | grads._asdict()).items():
        relative = bounds[name].error / np.linalg.norm(np.where(np.isfinite(x), x, 0))
        # An option may have another dtype than q; the coarser of the two decides.
        of_result, of_arrays = LIMITS[bounds[name].dtype], LIMITS[np.dtype(dtype)]
        ok = of_result[0] <= relative <= max(of_result[1], of_arrays[1])
        assert ok, (name, relative)


def test_dtypes_are_those_of_the_contract() -> None:
    q, k, v, dout = arrays(ml_dtypes.bfloat16)
    bounds = error_bound(q, k, v, dout, bias=np.zeros((13, 9), np.float64))
    dtypes = {name: bound.dtype for name, bound in bounds.items()}
    half = np.dtype(ml_dtypes.bfloat16)
    assert dtypes == {
        "out": half, "lse": np.float32, "dq": half, "dk": half, "dv": half, "dbias": np.float64
    }  # fmt: skip
    assert error_bound(*arrays(np.float64)[:3]).keys() == {"out", "lse"}


def test_a_result_that_is_zero_for_one_key_may_be_off_by_rounding() -> None:
    """With one key dq is zero, and dP - delta is a rounding error of the two sums."""
    q, k, v, dout = arrays(np.float32)
    bounds = error_bound(q, k[:, :, :1], v[:, :, :1], dout)
    # The bound itself is tested: far below the size of the terms that cancel, which is 1.
    assert 0 < bounds["dq"].error < 1e-4


def test_infinite_and_masked_out_entries_do_not_spoil_a_bound() -> None:
    q, k, v, dout = arrays(np.float32)
    clean = error_bound(q, k, v, dout, kv_lengths=[7, 7])
    k[:, :, 7:], v[:, :, 8:] = np.nan, np.inf
    spoiled = error_bound(q, k, v, dout, kv_lengths=[7, 7])
    for name, bound in clean.items():
        # An estimate from other random signs: equal to three digits.
        assert spoiled[name].error == pytest.approx(bound.error, rel=1e-3)


# --- the strategy -------------------------------------------------------------------------------

FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


@FEW
@given(problems())
def test_problems_are_calls_that_the_oracle_answers(case: AttentionCase) -> None:
    q, k, v, dout, dlse, options = case
    out, lse = reference.forward(q, k, v, **options)
    assert out.shape == dout.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == q.shape[:-1]
    assert dlse is None or dlse.shape == lse.shape
    assert k.shape[:-1] == v.shape[:-1]
    assert q.dtype == k.dtype == v.dtype == dout.dtype
    grads = reference.backward(dout, q, k, v, dlse=dlse, **options)
    for name, x in {"q": q, "k": k, "v": v, **options}.items():
        if name in ("q", "k", "v", "bias", "sinks"):
            assert getattr(grads, "d" + name).shape == np.shape(x)
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    assert all(np.isfinite(bound.error) for bound in bounds.values())


@FEW
@given(problems(edges=False, poison=False))
def test_without_edges_axes_differ_and_without_poison_results_are_finite(
    case: AttentionCase,
) -> None:
    q, k, v, _, _, options = case
    if q.ndim == 4:
        B, Hq, Nq, D = q.shape
        assert len({B, Hq, Nq, k.shape[2], D}) == 5
        assert Hq % k.shape[1] == 0
    out, lse = reference.forward(q, k, v, **options)
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()


@FEW
@given(problems(options=("causal", "scale"), dtypes=[np.float32], max_length=40, head_dims=(64,)))
def test_problems_can_be_narrowed(case: AttentionCase) -> None:
    assert case.options.keys() <= {"causal", "scale"}
    assert case.q.dtype == np.float32
    assert case.q.shape[-2] <= 40
    assert case.q.shape[-1] in (0, 1, 64)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"options must be among scale, softcap, .*; got 'is_causal'"
    ):
        problems(options=("is_causal",))


def has_option(name: str, case: AttentionCase) -> bool:
    return name in case.options


def has_axes(axes: int, case: AttentionCase) -> bool:
    return case.q.ndim == axes


def has_dtype(dtype: Any, case: AttentionCase) -> bool:
    return bool(case.q.dtype == dtype)


def masked_out_nan(case: AttentionCase) -> bool:
    """True if a key holds NaN and the result none."""
    out = reference.forward(case.q, case.k, case.v, **case.options).out
    return bool(np.isnan(case.k.astype(float)).any() and np.isfinite(out).all() and out.any())


# The first example will do: nothing is gained by shrinking it.
SEARCH = settings(max_examples=2000, deadline=None, database=None, phases=[Phase.generate])

OCCURS: dict[str, Callable[[AttentionCase], bool]] = {
    **{f"option {name}": partial(has_option, name) for name in DRAW},
    **{f"{axes} axes": partial(has_axes, axes) for axes in (2, 3, 4)},
    **{str(np.dtype(t)): partial(has_dtype, t) for t in DTYPES},
    "GQA": lambda c: c.q.ndim > 2 and c.q.shape[-3] > c.k.shape[-3] > 1,
    "D != Dv": lambda c: c.q.shape[-1] != c.v.shape[-1],
    "more queries than keys": lambda c: c.q.shape[-2] > c.k.shape[-2] > 1,
    "no queries": lambda c: c.q.shape[-2] == 0,
    "no keys": lambda c: c.q.shape[-2] > 0 and c.k.shape[-2] == 0,
    "one key": lambda c: c.k.shape[-2] == 1,
    "layout (B, N, H, D)": lambda c: c.q.ndim == 4 and c.q.strides[1] < c.q.strides[2],
    "negative strides": lambda c: min(c.k.strides) < 0,
    "dlse": lambda c: c.dlse is not None,
    "masked-out NaN": masked_out_nan,
    "attended NaN": lambda c: bool(
        np.isnan(reference.forward(c.q, c.k, c.v, **c.options).out).any()
    ),
    "scores above 50": lambda c: bool((reference.forward(c.q, c.k, c.v).lse > 50).any()),
    "lengths of 0": lambda c: 0 in np.atleast_1d(c.options.get("kv_lengths", 1)),
    "offsets below 0": lambda c: bool(np.any(np.less(c.options.get("q_offset", 0), 0))),
    "window open on a side": lambda c: None in c.options.get("window", ()),
    "window of 0": lambda c: 0 in c.options.get("window", ()),
    "bias with fewer axes": lambda c: 0 < np.ndim(c.options.get("bias", 0)) < 4,
    "bias of -inf": lambda c: bool(np.isneginf(np.float64(c.options.get("bias", 0))).any()),
    "sink of -inf": lambda c: bool(np.isneginf(np.float64(c.options.get("sinks", 0))).any()),
    "alibi by batch": lambda c: np.ndim(c.options.get("alibi_slopes", 0)) == 2,
    "half of the options": lambda c: len(c.options) >= len(DRAW) // 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("condition", OCCURS.values(), ids=OCCURS.keys())
def test_problems_include(condition: Callable[[AttentionCase], bool]) -> None:
    found = find(problems(), condition, settings=SEARCH)
    assert condition(found)


def scores_above(least: float, case: AttentionCase) -> bool:
    lse = reference.forward(case.q, case.k, case.v).lse
    return bool((np.where(np.isfinite(lse), lse, 0) > least).any())


EXTREMES: dict[str, Callable[[AttentionCase], bool]] = {
    "scores above 1e8": partial(scores_above, 1e8),
    "scores near 0": lambda c: bool(c.q.size) and float(np.abs(np.float64(c.q)).max()) < 0.01,
    "rows masked by a number": lambda c: bool(np.any(np.float64(c.options.get("bias", 0)) < -1e8)),
    "infinite sinks": lambda c: bool(np.isposinf(np.float64(c.options.get("sinks", 0))).any()),
    "caps below float32": lambda c: 0 < c.options.get("softcap", 1) < 1e-44,
    "caps above float32": lambda c: c.options.get("softcap", 1) > 3.5e38,
    "far offsets": lambda c: bool(np.any(np.less(c.options.get("q_offset", 0), -(2**59)))),
    "far windows": lambda c: 2**63 - 1 in c.options.get("window", ()),
}


@pytest.mark.parametrize("condition", EXTREMES.values(), ids=EXTREMES.keys())
def test_extremes_include(condition: Callable[[AttentionCase], bool]) -> None:
    assert condition(find(problems(extremes=True), condition, settings=SEARCH))


def test_hypothesis_is_needed_only_for_the_strategy() -> None:
    code = """
import sys
sys.modules["hypothesis"] = None
import tileattn.testing
tileattn.testing.error_bound
try:
    tileattn.testing.problems()
except ModuleNotFoundError as error:
    print(error)
"""
    path = ":".join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout == "tileattn.testing.problems needs Hypothesis: pip install hypothesis\n"
