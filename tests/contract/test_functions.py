"""Score and mask functions of one's own, on every backend that takes them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.arrays import normal
from tests.conftest import Runner
from tests.contract.test_backends import check
from tests.gallery import calls
from tileattn import reference
from tileattn.algorithm.scores import learned_elements
from tileattn.dtypes import DTYPES
from tileattn.problem import parse
from tileattn.testing import AttentionCase, problems

pytestmark = pytest.mark.usefixtures("one_blas_thread")

SIZES = (2, 4, 2, 67, 93, 12, 20)
B, HQ, HKV, NQ, NK, D, DV = SIZES
GALLERY = calls(B, HQ, NQ, NK)
NAMES = sorted(GALLERY)
SCORES = [name for name in NAMES if "score_mod" in GALLERY[name]]


def able(runner: Runner, options: dict[str, Any]) -> None:
    """Skip where the backend has no functions."""
    q, k, v, _ = normal(SIZES)
    reason = runner.why_not(q, k, v, options)
    score_mod = parse(q, k, v, options)[0].score_mod
    if runner.name == "cupy" and score_mod is not None and learned_elements(score_mod):
        reason = "no gradients of aux; tests/gpu/test_functions.py has the others"
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")


COMBINED = {
    "alone": {},
    "causal": {"causal": True, "dropout_p": 0.2, "seed": 3},
    "sinks": {"sinks": np.linspace(-1, 2, HQ), "softcap": 4.0, "kv_lengths": [93, 50]},
    "bias": {"bias": np.random.default_rng(2).normal(size=(HQ, 1, NK)), "window": (40, 9)},
}


@pytest.mark.parametrize("more", COMBINED.values(), ids=COMBINED.keys())
@pytest.mark.parametrize("name", NAMES)
def test_the_gallery(runner: Runner, name: str, more: dict[str, Any]) -> None:
    options = calls(B, HQ, NQ, NK)[name] | more
    able(runner, options)
    q, k, v, dout = normal(SIZES, np.float64)
    dlse = np.random.default_rng(1).normal(size=(B, HQ, NQ))
    check(runner, AttentionCase(q, k, v, dout, dlse, options))


@pytest.mark.parametrize("name", NAMES)
def test_the_gallery_in_less_precision(backend: Runner, name: str) -> None:
    dtype = (np.float16, np.float32)[NAMES.index(name) % 2]
    options = calls(B, HQ, NQ, NK, np.float32)[name]
    able(backend, options)
    q, k, v, dout = normal(SIZES, dtype)
    check(backend, AttentionCase(q, k, v, dout, None, options))


def smooth(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    """Return a score of which every function but ``remainder`` has a derivative."""
    x = np.arctan(s) + np.log1p(t[h] * t[h]) * np.expm1(0.1 * s) + (i - j) * 0.375 % -1.25
    return np.logaddexp(x, t[h] * s) + s.erf() * s.sigmoid()


def stepping(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    """Return a score that jumps, at numbers that are exact in every dtype."""
    distance = (i - j) * 0.25
    x = np.ceil(distance) - np.round(distance) + (j * 0.5 + b) % 3.5 + np.isin(i % 7, (1, 5))
    return s * t[h] + 0.1 * x.clip(-2, max=9).float()


@pytest.mark.parametrize("score_mod", [smooth, stepping])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_functions_beyond_the_gallery(runner: Runner, score_mod: Any, dtype: Any) -> None:
    table = np.random.default_rng(0).normal(size=HQ).astype(dtype)
    options = {"score_mod": score_mod, "aux": (table,)}
    able(runner, options)
    q, k, v, dout = normal(SIZES, dtype)
    check(runner, AttentionCase(q, k, v, dout, None, options))


FROM_THE_END: dict[str, tuple[Any, tuple[int, ...]]] = {
    "distance": (lambda b, h, i, j: (h, i - j), (HQ, NQ + NK)),
    "negative": (lambda b, h, i, j: (-1 - h, j - NK), (HQ, NK)),
    "mixed": (lambda b, h, i, j: (h - 2, (i + j) % 5 - 3), (HQ, 7)),
    "loaded": (None, (10,)),
}
"""Indices of which some are negative, or None for those in another array; the array's shape."""


@pytest.mark.parametrize("name", FROM_THE_END)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_negative_indices_count_from_the_end(runner: Runner, name: str, dtype: Any) -> None:
    """As NumPy's own do: what it reads is a bias and a mask, and gradients land where it reads."""
    indices, shape = FROM_THE_END[name]
    rng = np.random.default_rng(0)
    table, seen = rng.normal(size=shape).astype(dtype), rng.random(shape) < 0.7
    steps = np.arange(-9, 3)

    def place(b: Any, h: Any, i: Any, j: Any, loaded: Any) -> Any:
        return (loaded[(i + j) % 12],) if indices is None else indices(b, h, i, j)

    options: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, t, _, n: s + t[place(b, h, i, j, n)],
        "mask_mod": lambda b, h, i, j, _, m, n: m[place(b, h, i, j, n)],
        "aux": (table, seen, steps),
    }
    able(runner, options)
    q, k, v, dout = normal(SIZES, dtype)
    b, h, i, j = np.ogrid[:1, :HQ, :NQ, :NK]
    read = np.broadcast_arrays(*place(b, h, i, j, steps))
    plain = {"bias": table[tuple(read)], "mask": seen[tuple(read)]}
    expected = reference.backward(dout, q, k, v, **plain)
    assert expected.dbias is not None
    by_element = np.zeros(shape)
    np.add.at(by_element, tuple(read), expected.dbias)
    of_table = (reference.backward(dout, q, k, v, **options).daux or ())[0]
    np.testing.assert_allclose(of_table, by_element, rtol=1e-9, atol=1e-12)
    check(runner, AttentionCase(q, k, v, dout, None, options))


@pytest.mark.parametrize("turn", range(len(SCORES)), ids=SCORES)
@settings(max_examples=3)
@given(data=st.data())
def test_functions_with_any_other_options(backend: Runner, turn: int, data: Any) -> None:
    """With one dtype and one mask, so that fewer kernels are compiled."""
    able(backend, GALLERY[SCORES[turn]])
    dtypes, mask = [DTYPES[turn % 4]], ("sliding_window", "scattered")[turn // 4 % 2]
    case = data.draw(problems(dtypes=dtypes, max_length=80, edges=False))
    batch, heads, Nq = (1, 1, *case.q.shape)[-4:-1]
    of_score, of_mask = (
        calls(batch, heads, Nq, case.k.shape[-2])[name] for name in (SCORES[turn], mask)
    )

    def mask_mod(b: Any, h: Any, i: Any, j: Any, *_: Any) -> Any:
        return of_mask["mask_mod"](b, h, i, j)

    options = case.options | of_score | {"mask_mod": mask_mod}
    assume(backend.why_not(case.q, case.k, case.v, options) is None)
    check(backend, case._replace(options=options))
