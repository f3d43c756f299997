"""Cascades on every backend, against the oracle over the same keys without pages."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tileattn
from tests.conftest import Runner
from tests.on_gpu import sent
from tests.shared_pages import SharedCache, shared_cache
from tileattn import reference
from tileattn.dtypes import BFLOAT16, CACHE_DTYPES
from tileattn.testing import assert_attention_close, error_bound

pytestmark = pytest.mark.usefixtures("one_blas_thread")


def run(runner: Runner, made: SharedCache, shared: Any, **options: Any) -> tileattn.Attention:
    there = made.paged | options | {"shared_lengths": shared}
    there |= {"q": made.q, "k": made.k_pages, "v": made.v_pages}
    if runner.name == "cupy":
        there = {name: sent(x) for name, x in there.items()}
    found = tileattn.cascade(**there, backend=runner.name)
    return tileattn.Attention(*map(runner._fetched, found))


def check(runner: Runner, made: SharedCache, shared: Any = None, **options: Any) -> None:
    """Compare with the oracle; each part of a result of 16 bits is rounded, too."""
    reason = runner.why_not(made.q, *made[4:6], made.paged | options)
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")
    found = run(runner, made, made.shared_lengths if shared is None else shared, **options)
    given = made.dense | options
    expected = reference.forward(*made[:3], **given)
    assert_attention_close(found, expected, error_bound(*made[:3], **given))


@st.composite
def calls(draw: Any) -> tuple[SharedCache, dict[str, Any]]:
    """Draw a cache and options."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    G, R, Nq = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 5]))
    shared = draw(st.lists(st.integers(0, 5), min_size=G, max_size=G))
    own = draw(st.lists(st.integers(Nq, Nq + 20), min_size=G * R, max_size=G * R))
    kind = draw(st.sampled_from([None, None, *CACHE_DTYPES]))
    narrow = [np.float16, np.float32, BFLOAT16]
    made = shared_cache(
        *(rng, shared, own, draw(st.sampled_from([1, 3, 16]))),
        heads=draw(st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)])),
        Nq=Nq,
        dims=draw(st.sampled_from([(8, 8), (24, 20), (16, 40)])),
        dtype=draw(st.sampled_from(narrow if kind is not None else [*narrow, np.float64])),
        kv_dtype=kind,
        more_columns=draw(st.integers(0, 2)),
    )
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["softcap"] = 5.0
    if draw(st.booleans()):
        wide = np.float64 if made.q.dtype == np.float64 else np.float32
        options["sinks"] = np.asarray(rng.normal(size=made.q.shape[1]), wide)
    if draw(st.booleans()):
        options["scale"] = 0.3
    if draw(st.booleans()):
        options["tree_mask"] = rng.random((draw(st.sampled_from([1, G * R])), Nq, Nq)) < 0.6
    return made, options


@settings(max_examples=80)
@given(call=calls())
def test_results_match_the_oracle(runner: Runner, call: tuple[SharedCache, dict[str, Any]]) -> None:
    made, options = call
    check(runner, made, **options)


@pytest.mark.parametrize("Nq", [1, 5])
def test_many_pages_and_one_group(runner: Runner, Nq: int) -> None:
    rng = np.random.default_rng(0)
    own = [Nq, Nq + 30, Nq + 1, 90]
    made = shared_cache(rng, [40], own, 16, (8, 2), Nq, (64, 64), more_columns=3)
    check(runner, made, causal=True)
    check(runner, made, shared=16 * 40, causal=True)
    check(runner, made, shared=np.int32(16), causal=True, sinks=np.ones(8, np.float32))


def test_fewer_keys_may_be_shared_than_the_same_pages_have(runner: Runner) -> None:
    made = shared_cache(np.random.default_rng(1), [3, 4], [2, 9, 2, 3, 1, 70], 5, Nq=1)
    for shared in ([0, 20], [15, 5], [5, 0], 0, [0] * 3, [15, 15, 10, 0, 20, 5]):
        check(runner, made, shared)


@pytest.mark.parametrize("of", [(), (2,), (4, 2)], ids=str)
@pytest.mark.parametrize("kind", CACHE_DTYPES, ids=str)
def test_descales_of_heads(runner: Runner, kind: Any, of: tuple[int, ...]) -> None:
    """The sequences of a group have the same descales."""
    rng = np.random.default_rng(2)
    made = shared_cache(rng, [3, 1], [4, 9, 5, 6], 8, kv_dtype=kind)
    factors = [np.asarray(rng.uniform(0.001, 0.02, of), np.float32) for _ in "kv"]
    if len(of) == 2:
        for x in factors:
            x[1::2] = x[::2]
    named = dict(zip(("k_descale", "v_descale"), factors, strict=True))
    check(runner, made._replace(dense=made.dense | named, paged=made.paged | named))
    numbers = {"k_descale": 0.01, "v_descale": np.float32(0.5)}
    check(runner, made._replace(dense=made.dense | numbers, paged=made.paged | numbers))


def test_strided_queries_and_pages(runner: Runner) -> None:
    made = shared_cache(np.random.default_rng(3), [2, 1], [3, 4, 7, 5], 16, Nq=3)
    strided = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (made.q, *made[4:6])]
    check(runner, made._replace(q=strided[0], k_pages=strided[1], v_pages=strided[2]), causal=True)


@pytest.mark.parametrize("shape", [(0, 4, 1, 24), (2, 4, 0, 24), (2, 0, 1, 24)], ids=str)
def test_axes_of_length_zero(shape: tuple[int, ...]) -> None:
    q, (k, v) = np.zeros(shape, np.float32), np.zeros((2, 3, min(shape[1], 2), 4, 24), np.float32)
    places: dict[str, Any] = {"kv_lengths": 6}
    places["block_table"] = np.array([[0, 1], [0, 2]])[: shape[0]]
    out, lse = tileattn.cascade(q, k, v, shared_lengths=4, **places)
    assert (out.shape, lse.shape) == (shape, shape[:3])


def test_nothing_that_is_given_is_written_to() -> None:
    made = shared_cache(np.random.default_rng(4), [2], [3, 4], 16)
    before = [x.copy() for x in (made.q, *made[4:6], *made.paged.values())]
    run(Runner("numpy"), made, 32)
    for x, y in zip((made.q, *made[4:6], *made.paged.values()), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_sequence_has_no_influence_on_others(backend: Runner) -> None:
    made = shared_cache(np.random.default_rng(5), [3, 2], [3, 4, 7, 5], 8)
    expected = run(backend, made, made.shared_lengths)
    j = made.paged["kv_lengths"][1] - 1
    made.v_pages[made.paged["block_table"][1, j // 8], :, j % 8] = np.nan
    found = run(backend, made, made.shared_lengths)
    assert np.isnan(found.out[1]).all()
    for b in (0, 2, 3):
        np.testing.assert_array_equal(found.out[b], expected.out[b])


# --- errors ---------------------------------------------------------------------------------------

VALID: dict[str, Any] = {
    "q": np.ones((4, 4, 2, 8), np.float32),
    "k": np.ones((9, 2, 4, 8), np.float32),
    "v": np.ones((9, 2, 4, 6), np.float32),
    "shared_lengths": [8, 4],
    "block_table": [[0, 1, 2], [0, 1, 3], [4, 5, 6], [4, 7, 8]],
    "kv_lengths": [10, 12, 6, 11],
}
_WHAT = r"shared_lengths must be an integer, or integers of shape \(G,\) for G groups, where G "
_BYTES = {
    "k": VALID["k"].astype(np.int8),
    "v": VALID["v"].astype(np.int8),
    "k_descale": 0.5,
}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"shared_lengths": None}, TypeError, _WHAT + r"divides the batch size 4; got None"),
        ({"shared_lengths": 8.0}, TypeError, _WHAT + r"divides the batch size 4; got 8\.0"),
        ({"shared_lengths": True}, TypeError, _WHAT + r".*; got True"),
        ({"shared_lengths": [4] * 3}, ValueError, _WHAT + r".*; got shape \(3,\)"),
        ({"shared_lengths": []}, ValueError, _WHAT + r".*; got shape \(0,\)"),
        ({"shared_lengths": [[4]]}, ValueError, _WHAT + r".*; got shape \(1, 1\)"),
        (
            {"shared_lengths": [8, 3]},
            *(
                ValueError,
                r"shared_lengths must be multiples of the page size, 4, and not neg",
            ),
        ),
        ({"shared_lengths": [8, -4]}, ValueError, r"shared_lengths .* got -4 for group 1"),
        (
            {"kv_lengths": [9, 12, 6, 11]},
            *(
                ValueError,
                r"shared_lengths must leave the last Nq = 2 keys to each sequence; ",
            ),
        ),
        ({"kv_lengths": [10, 12, 6, 5]}, ValueError, r".* kv_lengths has 5 keys for sequence 3"),
        (
            {"block_table": [[0, 1, 2], [0, 8, 3], [4, 5, 6], [4, 7, 8]]},
            ValueError,
            r"block_table must have the same pages of shared keys for all sequences of a group; "
            r"got 8 for page 1 of sequence 1, and 1 for sequence 0",
        ),
        ({"block_table": None}, TypeError, r"block_table must be integers of shape \(B, .*None"),
        ({"block_table": [[0, 1, 2]] * 3}, ValueError, r"block_table must have shape \(4, pages"),
        ({"block_table": [[0, 1, 9]] * 4}, ValueError, r"block_table must hold pages from 0 to 8"),
        ({"kv_lengths": None}, ValueError, r"kv_lengths must be given with block_table; got None"),
        ({"kv_lengths": 13}, ValueError, r"kv_lengths must be from 0 to Nk = 12; got 13"),
        ({"kv_lengths": [9, 9]}, ValueError, r"kv_lengths must be an integer, or integers of sha"),
        ({"q": VALID["q"][0]}, ValueError, r"q must have shape \(B, Hq, Nq, D\); got \(4, 2, 8\)"),
        ({"k": VALID["k"][0]}, ValueError, r"k must have shape \(pages, Hkv, page, D\); got \(2,"),
        ({"q": 3}, TypeError, r"q must be a NumPy or CuPy array; got 3"),
        ({"q": VALID["q"].astype(int)}, TypeError, r"q must have dtype "),
        ({"k": VALID["k"].astype(float)}, TypeError, r"k must have the dtype of q, float32"),
        ({"v": VALID["v"][:8]}, ValueError, r"v must have the number of pages of k, 9; got 8"),
        ({"causal": 1}, TypeError, r"causal must be True or False; got 1"),
        ({"scale": "a"}, TypeError, r"scale must be "),
        ({"softcap": -1.0}, ValueError, r"softcap must be "),
        (
            {"sinks": np.ones(3, np.float32)},
            ValueError,
            r"sinks must have shape \(4,\); got ",
        ),
        ({"tree_mask": np.ones((1, 3, 3), bool)}, ValueError, r"tree_mask must have shape "),
        ({"backend": "abc"}, ValueError, r"backend must be one of auto, "),
        ({"k_descale": 0.5}, ValueError, r"k_descale must be None with k of dtype float32"),
        (_BYTES, ValueError, r"v_descale must be given with k of dtype int8; got None"),
        (
            _BYTES | {"v_descale": np.array([[1, 1], [1, 1], [2, 2], [2, 3]], np.float32)},
            ValueError,
            r"v_descale must have the same numbers for all sequences of a group; got 3\.0 for head "
            r"1 of sequence 3, and 2\.0 for sequence 2",
        ),
    ],
)
def test_what_is_not_accepted_is_named(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    tileattn.cascade(**VALID)
    with pytest.raises(error, match=f"^{message}"):
        tileattn.cascade(**VALID | changed)


def test_options_that_depend_on_positions_are_no_arguments() -> None:
    with pytest.raises(TypeError, match=re.escape("unexpected keyword argument 'window'")):
        tileattn.cascade(**VALID | {"window": (3, 0)})
