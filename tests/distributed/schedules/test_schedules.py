"""Results of every schedule, against the oracle on the whole sequence."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

from tests.distributed.whole_sequence import check, layouts, results
from tileattn import Attention, reference
from tileattn.distributed import Layout
from tileattn.distributed.validation import REFUSED
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems
from tileattn.testing.functions import MASKS, SCORES, draw_functions
from tileattn.testing.options import DRAW, Choices

OPTIONS = tuple(name for name in DRAW if name not in REFUSED)


@pytest.mark.parametrize(
    "schedule",
    ["ring", *(pytest.param(x, marks=pytest.mark.slow) for x in ("heads", "groups", "gather"))],
)
@given(case=problems(options=OPTIONS, max_length=60))
@settings(max_examples=75, deadline=None, derandomize=True)
def test_results_are_those_of_the_oracle(schedule: Any, case: AttentionCase) -> None:
    rng = np.random.default_rng(abs(hash((case.q.shape, case.k.shape))) % 2**32)
    Hkv, ranks = case.k.shape[-3] if case.k.ndim > 2 else 1, int(rng.integers(1, 6))
    if schedule == "heads":
        ranks = max(n for n in (1, 2, 3, 4) if Hkv % n == 0)
    elif schedule == "groups":
        n = max(n for n in (1, 2, 3) if Hkv % n == 0)
        assume(n > 1)
        schedule, ranks = ("heads", n), n * int(rng.integers(2, 6 // n + 1))
    queries, keys = (layouts(rng, x.shape[-2], ranks) for x in (case.q, case.k))
    check(case, queries, keys, schedule=schedule)


@given(case=problems(options=OPTIONS, max_length=60))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_blocks_run_on_any_backend(case: AttentionCase) -> None:
    pytest.importorskip("llvmlite")
    queries, keys = (Layout.zigzag(x.shape[-2], 3) for x in (case.q, case.k))
    check(case, queries, keys, backend="llvm")


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
def test_gradients_of_large_scores(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    q, dout = (rng.standard_normal((2, 4, 37, 8)) for _ in range(2))
    k, v = rng.standard_normal((2, 2, 2, 53, 8))
    q, k, v, dout = (x.astype(dtype) for x in (100 * q, 10 * k, v, dout))
    case = AttentionCase(q, k, v, dout, None, {"causal": True, "sinks": np.full(4, 900.0)})
    for schedule in ("ring", "gather", ("heads", 2)):
        check(case, Layout.zigzag(37, 4), Layout.zigzag(53, 4), schedule=schedule)


@pytest.mark.parametrize("schedule", ["ring", "gather", ("heads", 2)], ids=str)
@pytest.mark.parametrize("shift", [64.0, -4096.0, 2.0**18])
def test_a_constant_in_all_scores_changes_nothing(shift: float, schedule: Any) -> None:
    """Scores are multiples of a sixteenth: each is exact in float32, but no logsumexp is."""
    rng = np.random.default_rng(3)
    q = (rng.integers(-2, 3, (2, 4, 37, 16)) / 2).astype(np.float32)
    k = (rng.integers(-2, 3, (2, 2, 53, 16)) / 2).astype(np.float32)
    v, dout = (rng.standard_normal(x.shape, np.float32) for x in (k, q))
    options: dict[str, Any] = {"scale": 0.25, "causal": True}
    queries, keys = Layout.zigzag(37, 4), Layout.zigzag(53, 4)

    bias = np.full(1, shift, np.float32)
    case = AttentionCase(q, k, v, dout, None, options | {"bias": bias})
    found, grads = results(case, queries, keys, schedule=schedule)
    bounds, expected = error_bound(q, k, v, dout, **options), reference.forward(q, k, v, **options)
    attention = Attention(found.out, expected.lse.astype(np.float32))
    assert_attention_close(attention, expected, bounds)
    grads = grads._replace(dbias=None)
    assert_attention_close(grads, reference.backward(dout, q, k, v, **options), bounds)


@pytest.mark.slow
@pytest.mark.parametrize("mask_mod", [None, *MASKS])
@pytest.mark.parametrize("score_mod", [None, *SCORES])
def test_functions(score_mod: str | None, mask_mod: str | None) -> None:
    # Each function is shared by two ranks and by three.
    ranks = 2 + ([None, *SCORES].index(score_mod) + [None, *MASKS].index(mask_mod)) % 2
    rng = np.random.default_rng(ranks)
    q, dout = rng.standard_normal((2, 2, 4, 37, 8))
    k, v = rng.standard_normal((2, 2, 2, 53, 8))
    own = draw_functions(Choices(rng), score_mod, mask_mod, (2, 4, 37, 53))
    case = AttentionCase(q, k, v, dout, None, own | {"dropout_p": 0.2, "seed": 9, "causal": True})
    check(case, layouts(rng, 37, ranks), layouts(rng, 53, ranks))
    queries, keys = layouts(rng, 37, 2 * ranks), layouts(rng, 53, 2 * ranks)
    check(case, queries, keys, schedule=("heads", 2))
    if ranks == 2:
        check(case, layouts(rng, 37, 2), layouts(rng, 53, 2), schedule="heads")
