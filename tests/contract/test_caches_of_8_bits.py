"""Keys and values of 8 bits, on every backend that takes them, against the oracle."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests.conftest import Runner
from tileattn import reference
from tileattn.dtypes import CACHE_DTYPES, FLOAT8_E4M3FN, INT8, QUERY_DTYPES
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems
from tileattn.testing.options import DRAW

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]

B, HQ, HKV, NQ, NK, D, DV = 3, 4, 2, 7, 23, 16, 24


def stored(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Draw numbers of 8 bits, all of them."""
    if dtype == INT8:
        return rng.integers(-128, 128, shape).astype(INT8)
    bits = rng.integers(0, 256, shape).astype(np.uint8)
    numbers: Array = (bits - (bits & 0x7F == 0x7F)).view(FLOAT8_E4M3FN)  # without NaN
    return numbers


def check(runner: Runner, q: Array, k: Array, v: Array, options: dict[str, Any]) -> None:
    """Compare a call with the oracle."""
    reason = runner.why_not(q, k, v, options)
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")
    found = runner.forward(q, k, v, **options)
    expected = reference.forward(q, k, v, **options)
    assert_attention_close(found, expected, error_bound(q, k, v, **options))


def in_pages(case: AttentionCase, page: int) -> AttentionCase:
    """Move keys, values and descales of tokens to pages; unused rows are poisoned."""
    q, k, v = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in case[:3])
    options = dict(case.options)
    rng = np.random.default_rng(page)
    count, heads, rows = k.shape[:3]
    lengths = np.broadcast_to(options.get("kv_lengths", rows), count)
    n = -(-rows // page) + 1
    pages = count * n + 2
    table = rng.permutation(pages)[: count * n].reshape(count, n)

    def moved(x: Array) -> Array:
        wrong = -128 if x.dtype == INT8 else np.nan
        found = np.full((pages, heads, page, *x.shape[3:]), wrong, x.dtype)
        for b, length in enumerate(lengths):
            for j in range(length):
                found[table[b, j // page], :, j % page] = x[b, :, j]
        return found

    for name, x in (("k_descale", k), ("v_descale", v)):
        if np.shape(options[name]) == x.shape[4 - case.k.ndim : -1]:
            options[name] = moved(options[name].reshape(x.shape[:-1]))
    for name in {"bias", "mask"} & options.keys():
        if options[name].shape[-1:] == (rows,) and rows != 1:
            beside = [(0, 0)] * (options[name].ndim - 1)
            options[name] = np.pad(options[name], [*beside, (0, n * page - rows)])
    paged = moved(k), moved(v)
    for b, length in enumerate(lengths):
        table[b, -(-length // page) :] = rng.choice([-1, pages, 2**40])
    options |= {"kv_lengths": lengths, "block_table": table}
    return case._replace(q=q, k=paged[0], v=paged[1], options=options)


# Few examples, since LLVM compiles kernels for most of them.
@settings(max_examples=40)
@given(case=problems(max_length=60, quantised=True))
def test_every_result_is_that_of_the_oracle(runner: Runner, case: AttentionCase) -> None:
    check(runner, case.q, case.k, case.v, case.options)


@settings(max_examples=20)
@given(case=problems(max_length=60, quantised=True, packed=True))
def test_packed_sequences(runner: Runner, case: AttentionCase) -> None:
    check(runner, case.q, case.k, case.v, case.options)


@settings(max_examples=25)
@given(
    case=problems(max_length=60, quantised=True, options=[*DRAW.keys() - {"block_mask"}]),
    page=st.sampled_from([1, 3, 16]),
)
def test_pages(runner: Runner, case: AttentionCase, page: int) -> None:
    paged = in_pages(case, page)
    check(runner, paged.q, paged.k, paged.v, paged.options)
    found = runner.forward(paged.q, paged.k, paged.v, **paged.options)
    dense = reference.forward(case.q, case.k, case.v, **case.options)
    out, lse = (x.reshape(y.shape) for x, y in zip(found, dense, strict=True))
    bounds = error_bound(case.q, case.k, case.v, **case.options)
    assert_attention_close((out, lse), dense, bounds)


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "dense": ((B, HQ, NQ), (B, HKV, NK), {}),
    "without batch": ((HQ, NQ), (HKV, NK), {}),
    "packed": (
        (HQ, 9),
        (HKV, 30),
        {"cu_seqlens_q": [0, 3, 3, 9], "cu_seqlens_k": [0, 10, 12, 30]},
    ),
    "pages": (
        (B, HQ, NQ),
        (8, HKV, 5),
        {"block_table": [[4, 0, 2], [1, 5, 3], [7, 7, 7]], "kv_lengths": [12, 5, 0]},
    ),
    "as many pages as sequences, of one key": (
        (B, HQ, 2),
        (B, HKV, 1),
        {"block_table": [[2, 0], [1, 0], [0, 2]], "kv_lengths": [2, 1, 2]},
    ),
}


# Either dtype of a cache in each layout, and every pair of dtypes in some.
_PAIRS = [*itertools.product(QUERY_DTYPES, CACHE_DTYPES)]
WITH_DTYPES = [
    pytest.param(layout, *_PAIRS[(n + m) % len(_PAIRS)], marks=[pytest.mark.slow] * (m > 0))
    for n, layout in enumerate(LAYOUTS)
    for m in (0, 3)
]


@pytest.mark.parametrize(("layout", "q_dtype", "dtype"), WITH_DTYPES, ids=str)
def test_descales_of_every_shape(
    runner: Runner, layout: str, q_dtype: np.dtype[Any], dtype: np.dtype[Any]
) -> None:
    rng = np.random.default_rng(0)
    of_q, of_k, options = LAYOUTS[layout]
    q = rng.normal(size=(*of_q, D)).astype(q_dtype)
    k, v = (stored(rng, (*of_k, columns), dtype) for columns in (D, DV))
    entries = 1 if layout == "without batch" else B
    kinds: list[Any] = [0.02, (), (HKV,), (entries, HKV), of_k]
    for pair in itertools.product(kinds, kinds):
        descales = [
            x if x == 0.02 else np.asarray(rng.uniform(0, 0.04, x), np.float32) for x in pair
        ]
        named = dict(zip(("k_descale", "v_descale"), descales, strict=True))
        check(runner, q, k, v, {**options, **named, "causal": True, "softcap": 5.0})


def call(dtype: np.dtype[Any], seed: int = 0) -> tuple[Array, Array, Array, dict[str, Any]]:
    """Make a call with a descale for each token."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, HQ, NQ, D)).astype(np.float32)
    k, v = (stored(rng, (B, HKV, NK, columns), dtype) for columns in (D, DV))
    descales = rng.uniform(0.001, 0.02, (2, B, HKV, NK)).astype(np.float32)
    return q, k, v, dict(zip(("k_descale", "v_descale"), descales, strict=True))


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_what_no_query_attends_to_never_counts(runner: Runner, dtype: np.dtype[Any]) -> None:
    q, k, v, options = call(dtype)
    options |= {"kv_lengths": [20, 7, 0], "causal": True, "q_offset": [5, 0, 0]}
    expected = reference.forward(q, k, v, **options)
    bounds = error_bound(q, k, v, **options)
    for b, end in enumerate([12, 7, 0]):
        for x in (k, v):
            x[b, :, end:] = -128 if dtype == INT8 else np.nan
        for name in ("k_descale", "v_descale"):
            options[name][b, :, end:] = np.nan
    reason = runner.why_not(q, k, v, options)
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")
    assert_attention_close(runner.forward(q, k, v, **options), expected, bounds)


@pytest.mark.parametrize("name", ["k", "v", "k_descale", "v_descale"])
def test_nan_reach_the_queries_that_attend_to_them(runner: Runner, name: str) -> None:
    q, k, v, options = call(FLOAT8_E4M3FN)
    arrays = {"k": k, "v": v, **options}
    arrays[name][1, 1, 18] = np.nan
    options["causal"] = True
    check(runner, q, k, v, options)
    out = reference.forward(q, k, v, **options).out
    assert not np.isnan(out[1, 2:, :2]).any()  # at positions 16 and 17
    assert np.isnan(out[1, 2:, 2:]).all()


def test_minus_128_is_a_number(runner: Runner) -> None:
    q, k, v, options = call(INT8)
    k[:], v[:, :, ::2] = -128, -128
    check(runner, q, k, v, options)


def test_descales_of_zero(runner: Runner) -> None:
    q, k, v, _ = call(FLOAT8_E4M3FN)
    check(runner, q, k, v, {"k_descale": 0.0, "v_descale": 0})
    found = reference.forward(q, k, v, k_descale=0.0, v_descale=0)
    assert not found.out.any()
    np.testing.assert_allclose(found.lse, np.log(NK))


def test_one_batch_entry_has_the_bits_that_it_has_alone(runner: Runner) -> None:
    q, k, v, options = call(FLOAT8_E4M3FN)
    reason = runner.why_not(q, k, v, options)
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")
    found = runner.forward(q, k, v, **options)
    alone = runner.forward(q[1:2], k[1:2], v[1:2], **{n: x[1:2] for n, x in options.items()})
    for mine, other in zip(found, alone, strict=True):
        np.testing.assert_array_equal(mine[1:2], other)


def test_calls_that_repeat_are_told_apart_by_their_dtypes_and_descales(runner: Runner) -> None:
    """A call goes through the cache of validated calls from the second one on."""
    for n in range(12):
        dtype = CACHE_DTYPES[n % 2]
        q, k, v, options = call(dtype, seed=n)
        if n % 4 > 1:
            options["k_descale"] = 0.01 * n
        if n % 3 == 0:
            options["v_descale"] = np.float32(0.01 * (n + 1))
        check(runner, q, k, v, options)


@pytest.mark.parametrize("shape", [(), (HKV,), (B, HKV), (B, HKV, NK)], ids=str)
@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_a_descale_that_is_written_to(runner: Runner, name: str, shape: tuple[int, ...]) -> None:
    """Calls that repeat read it again, and validate it again if it has numbers of heads."""
    q, k, v, options = call(INT8)
    options[name] = np.full(shape, 0.01, np.float32)
    for value in (0.01, 0.01, 0.01, 0.01, 0.02, 0.005):
        options[name][...] = value
        check(runner, q, k, v, options)
    options[name][...] = np.nan
    if len(shape) < 3:
        with pytest.raises(ValueError, match=f"{name} must "):
            runner.forward(q, k, v, **options)
    else:
        assert np.isnan(runner.forward(q, k, v, **options).out).all()


def test_the_output_may_be_given() -> None:
    q, k, v, options = call(INT8)
    out = np.full((B, HQ, NQ, DV), np.nan, np.float32)
    found = tileattn.forward(q, k, v, out=out, **options)
    assert found.out is out
    np.testing.assert_array_equal(out, tileattn.forward(q, k, v, **options).out)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_explain_counts_bytes_of_8_bits(dtype: np.dtype[Any]) -> None:
    q, k, v, options = call(dtype)
    narrow = tileattn.explain(q, k, v, backend="numpy", **options)
    wide = tileattn.explain(q, k.astype(q.dtype), v.astype(q.dtype), backend="numpy")
    assert [4 * narrow.bytes_moved[name] for name in "kv"] == [wide.bytes_moved[n] for n in "kv"]
    assert narrow.bytes_moved["q"] == wide.bytes_moved["q"]


def test_a_call_of_numpy_arrays_runs_on_a_backend_that_takes_it() -> None:
    q, k, v, options = call(FLOAT8_E4M3FN)
    q = q.astype(ml_dtypes.bfloat16)
    found = tileattn.forward(q, k, v, **options)
    assert (found.out.dtype, found.lse.dtype) == (q.dtype, np.float32)
