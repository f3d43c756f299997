"""Packed calls in the helpers: what the strategy draws, what the bounds and the comparison do."""

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
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems
from tileattn.testing.options import DRAW
from tileattn.testing.strategies import UNPACKED

# --- the bound and the comparison ---------------------------------------------------------------

CU_Q, CU_K = [0, 13, 13, 14, 20], [0, 9, 11, 11, 22]
OPTIONS: dict[str, Any] = {
    "cu_seqlens_q": CU_Q,
    "cu_seqlens_k": CU_K,
    "causal": True,
    "softcap": 20.0,
    "sinks": np.array([0.5, -0.5, 0.1, 1.0], np.float32),
}
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def arrays(dtype: Any) -> tuple[Given, Array]:
    q, k, v, dout = (x[0] for x in normal((1, 4, 2, 20, 22, 8, 6), dtype, seed=4))
    sums = np.float64 if dtype is np.float64 else np.float32
    return (q, k, v, dout), np.random.default_rng(5).normal(size=q.shape[:2]).astype(sums)


def unfused(dtype: Any) -> tuple[Attention, Gradients]:
    """Evaluate the formula in a dtype, as a backend that stores what it should would."""
    (q, k, v, dout), dlse = arrays(dtype)
    forward = evaluate_forward(q, k, v, dlse.dtype, OPTIONS)
    dq, dk, dv, _, dsinks = evaluate_backward(forward, dout, dlse).grads
    of_arrays = dq[0].astype(dtype), dk[0].astype(dtype), dv[0].astype(dtype)
    return (
        Attention(forward.results.out[0].astype(dtype), forward.results.lse[0]),
        Gradients(*of_arrays, None, dsinks.astype(np.float32)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_formula_in_low_precision_passes_and_a_wrong_result_fails(dtype: Any) -> None:
    (q, k, v, dout), dlse = arrays(dtype)
    bounds = error_bound(q, k, v, dout, dlse=dlse, **OPTIONS)
    attention, gradients = unfused(dtype)
    of_attention = reference.forward(q, k, v, **OPTIONS)
    of_gradients = reference.backward(dout, q, k, v, dlse=dlse, **OPTIONS)
    assert_attention_close(attention, of_attention, bounds)
    assert_attention_close(gradients, of_gradients, bounds)
    wrong = attention._replace(out=attention.out[:, ::-1])
    with pytest.raises(AssertionError, match="out has error"):
        assert_attention_close(wrong, of_attention, bounds)
    dk = (gradients.dk.astype(np.float64) * 1.05).astype(dtype)
    with pytest.raises(AssertionError, match="dk has error"):
        assert_attention_close(gradients._replace(dk=dk), of_gradients, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [0.0, 1e4, -np.inf])
def test_padding_adds_nothing_to_a_bound(dtype: Any, sink: float) -> None:
    """A sequence has the bounds that it has alone; next to it stand five that are empty."""
    (q, k, v, dout), dlse = arrays(dtype)
    options: dict[str, Any] = {"sinks": np.full(4, sink + 0.1), "causal": True, "q_offset": 3}
    alone = error_bound(q, k, v, dout, dlse=dlse, **options)
    ends: dict[str, Any] = {"cu_seqlens_q": [0] * 3 + [20] * 4, "cu_seqlens_k": [0] * 3 + [22] * 4}
    together = error_bound(q, k, v, dout, dlse=dlse, **options, **ends)
    assert together.keys() == alone.keys()
    for name, bound in together.items():
        assert bound.error == pytest.approx(alone[name].error, rel=0.02), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_are_those_of_the_sequences_together(dtype: Any) -> None:
    """The norm of all rows is no less than that of some, and no more than the sum of the parts."""
    (q, k, v, dout), dlse = arrays(dtype)
    options: dict[str, Any] = {"sinks": np.full(4, 30.0, np.float32)}
    ends: dict[str, Any] = {"cu_seqlens_q": [0, 18, 19, 20], "cu_seqlens_k": [0, 20, 21, 22]}
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options, **ends)
    parts = [
        error_bound(*(q[:, :-2], k[:, :-2], v[:, :-2], dout[:, :-2]), dlse=dlse[:, :-2], **options),
        *(
            error_bound(
                *(x[:, j : j + 1 or None] for x in (q, k, v, dout)),
                dlse=dlse[:, j : j + 1 or None],
                **options,
            )
            for j in (-2, -1)
        ),
    ]
    for name, bound in bounds.items():
        errors = [part[name].error for part in parts]
        assert 0.7 * max(errors) <= bound.error <= 1.3 * sum(errors), name
        assert bound.dtype == parts[0][name].dtype


# --- the strategy -------------------------------------------------------------------------------

FEW = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def lengths(case: AttentionCase, of: str) -> Array:
    return np.diff(np.asarray(case.options[f"cu_seqlens_{of}"], np.int64))


@FEW
@given(problems(packed=True, max_length=40))
def test_packed_problems_are_calls_that_the_oracle_answers(case: AttentionCase) -> None:
    q, k, v, dout, dlse, options = case
    queries, keys = lengths(case, "q"), lengths(case, "k")
    S = len(queries)
    assert len(keys) == S <= 5
    assert (queries.sum(), keys.sum()) == (q.shape[-2], k.shape[-2])
    assert all(0 <= n <= 40 for n in (*queries, *keys))
    assert q.ndim == k.ndim == v.ndim == dout.ndim
    assert q.ndim < 4 or len(q) == len(k) == len(v) == len(dout) == 1
    assert options.keys().isdisjoint(UNPACKED)
    if "kv_lengths" in options:
        assert options["kv_lengths"].shape == keys.shape
        assert (options["kv_lengths"] >= 0).all()
        assert (options["kv_lengths"] <= keys).all()
    assert np.shape(options.get("q_offset", 0)) in ((), (S,))
    assert np.shape(options.get("alibi_slopes", 0))[:-1] in ((), (S,))
    out, lse = reference.forward(q, k, v, **options)
    assert out.shape == dout.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == q.shape[:-1]
    assert dlse is None or dlse.shape == lse.shape
    grads = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert [x.shape for x in grads[:3]] == [x.shape for x in (q, k, v)]
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    assert all(np.isfinite(bound.error) for bound in bounds.values())


@FEW
@given(problems(packed=True, edges=False, poison=False, max_length=40))
def test_without_edges_there_are_tokens_and_without_poison_results_are_finite(
    case: AttentionCase,
) -> None:
    q, k, v, _, _, options = case
    assert len(lengths(case, "q")) > 0
    assert min(q.shape[-2], k.shape[-2]) > 1
    out, lse = reference.forward(q, k, v, **options)
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()


@FEW
@given(problems(packed=True, options=("causal", "bias"), dtypes=[np.float32], head_dims=(64,)))
def test_packed_problems_can_be_narrowed(case: AttentionCase) -> None:
    assert case.options.keys() <= {"causal", "cu_seqlens_q", "cu_seqlens_k"}
    assert case.q.dtype == np.float32
    assert case.q.shape[-1] in (0, 1, 64)


def has_option(name: str, case: AttentionCase) -> bool:
    return name in case.options


def has_sequences(number: int, case: AttentionCase) -> bool:
    return len(lengths(case, "q")) == number


def has_axes(axes: int, case: AttentionCase) -> bool:
    return case.q.ndim == axes


def has_ends(kind: str, case: AttentionCase) -> bool:
    ends = case.options["cu_seqlens_q"]
    return kind == (ends.dtype.name if isinstance(ends, np.ndarray) else type(ends).__name__)


def masked_out_nan(case: AttentionCase) -> bool:
    """True if a key holds NaN and the result none."""
    out = reference.forward(case.q, case.k, case.v, **case.options).out
    return bool(np.isnan(case.k.astype(float)).any() and np.isfinite(out).all() and out.any())


def attended_nan(case: AttentionCase) -> bool:
    """True if some rows of the result are NaN, and some are not."""
    rows = np.isnan(reference.forward(case.q, case.k, case.v, **case.options).out)
    return bool(rows.any() and not rows.all())


OCCURS: dict[str, Callable[[AttentionCase], bool]] = {
    **{f"option {name}": partial(has_option, name) for name in DRAW if name not in UNPACKED},
    **{f"{number} sequences": partial(has_sequences, number) for number in range(6)},
    **{f"{axes} axes": partial(has_axes, axes) for axes in (2, 3, 4)},
    **{f"ends as {kind}": partial(has_ends, kind) for kind in ("list", "int32", "int64")},
    "an empty sequence among others": lambda c: bool(
        ((lengths(c, "q") == 0) & (lengths(c, "k") == 0)).any() and c.q.size and c.k.size
    ),
    "queries without keys": lambda c: bool(
        ((lengths(c, "q") > 0) & (lengths(c, "k") == 0)).any() and c.k.size
    ),
    "keys without queries": lambda c: bool(
        ((lengths(c, "q") == 0) & (lengths(c, "k") > 0)).any() and c.q.size
    ),
    "one query of many keys": lambda c: bool(
        ((lengths(c, "q") == 1) & (lengths(c, "k") > 5)).any()
    ),
    "more queries than keys": lambda c: bool((lengths(c, "q") > lengths(c, "k")).any()),
    "as many queries as keys": lambda c: bool(
        len(lengths(c, "q")) > 2 and (lengths(c, "q") == lengths(c, "k")).all() and c.q.size
    ),
    "three long sequences": lambda c: sum(lengths(c, "q") > 20) > 2,
    "no tokens": lambda c: len(lengths(c, "q")) > 0 and c.q.shape[-2] == 0,
    "lengths below those of the keys": lambda c: bool(
        (c.options.get("kv_lengths", lengths(c, "k")) < lengths(c, "k")).any()
    ),
    "slopes by sequence": lambda c: np.ndim(c.options.get("alibi_slopes", 0)) == 2,
    "offsets below 0": lambda c: bool(np.any(np.less(c.options.get("q_offset", 0), 0))),
    "layout (T, H, D)": lambda c: (
        c.q.ndim == 3 and c.q.size > 0 and c.q.strides[0] < c.q.strides[1]
    ),
    "negative strides": lambda c: min(c.k.strides) < 0,
    "GQA": lambda c: c.q.ndim > 2 and c.q.shape[-3] > c.k.shape[-3] > 1,
    "dlse": lambda c: c.dlse is not None,
    "masked-out NaN": masked_out_nan,
    "attended NaN": attended_nan,
}
SEARCH = settings(max_examples=2000, deadline=None, database=None, phases=[Phase.generate])


@pytest.mark.slow
@pytest.mark.parametrize("condition", OCCURS.values(), ids=OCCURS.keys())
def test_packed_problems_include(condition: Callable[[AttentionCase], bool]) -> None:
    assert condition(find(problems(packed=True), condition, settings=SEARCH))


def test_packed_extremes_include_far_offsets() -> None:
    def far(case: AttentionCase) -> bool:
        return bool(np.any(np.less(case.options.get("q_offset", 0), -(2**59))))

    case = find(problems(packed=True, extremes=True), far, settings=SEARCH)
    assert far(case)
    reference.forward(case.q, case.k, case.v, **case.options)
