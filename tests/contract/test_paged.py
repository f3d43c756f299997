"""Caches in pages on every backend that takes them, against the keys that they stand for."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests.conftest import Runner
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]

HQ, HKV, D, DV = 4, 2, 24, 20


class Cache(NamedTuple):
    """Keys and values, as arrays of one batch entry for each sequence and in pages."""

    k: Array
    v: Array
    k_pages: Array
    v_pages: Array
    paged: dict[str, Any]  # options


def cache(lengths: list[int], page: int, dtype: Any, rng: np.random.Generator) -> Cache:
    """Make a cache whose unused rows are poisoned, and whose unused entries of the table wrong."""
    B, longest = len(lengths), max(lengths, default=0)
    n = -(-longest // page) + 1
    k, v = (rng.normal(size=(B, HKV, longest, columns)).astype(dtype) for columns in (D, DV))
    pages = B * n + 3
    table = rng.permutation(pages)[: B * n].reshape(B, n)
    k_pages, v_pages = (
        np.full((pages, HKV, page, columns), wrong, dtype)
        for columns, wrong in ((D, np.nan), (DV, np.inf))
    )
    for b, length in enumerate(lengths):
        for j in range(length):
            place = table[b, j // page], slice(None), j % page
            k_pages[place], v_pages[place] = k[b, :, j], v[b, :, j]
        table[b, -(-length // page) :] = rng.choice([-1, pages, 2**40])
    return Cache(k, v, k_pages, v_pages, {"block_table": table, "kv_lengths": lengths})


def able(runner: Runner) -> None:
    rng = np.random.default_rng(0)
    made = cache([1], 1, np.float32, rng)
    q = np.zeros((1, HQ, 1, D), np.float32)
    reason = runner.why_not(q, made.k_pages, made.v_pages, made.paged)
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")


def check(runner: Runner, q: Array, made: Cache, options: dict[str, Any]) -> None:
    found = runner.forward(q, made.k_pages, made.v_pages, **made.paged, **options)
    dense = options | {"kv_lengths": made.paged["kv_lengths"]}
    expected = reference.forward(q, made.k, made.v, **dense)
    assert_attention_close(found, expected, error_bound(q, made.k, made.v, **dense))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softcap": 3.0},
    "window": {"window": (30, 4), "sinks": np.linspace(-1, 1, HQ)},
    "mask": {"mask_mod": lambda b, h, i, j: (j + b) % 5 != h},  # noqa: ARG005 - a mask_mod's
    "function": {"score_mod": lambda s, b, h, i, j: s - 0.1 * abs(i - j) * h + b},
}
LENGTHS = [150, 0, 1, 64, 77]
SLOW = pytest.mark.slow  # each is another kernel


@pytest.mark.parametrize(
    "dtype",
    [
        np.float16,
        *(pytest.param(x, marks=SLOW) for x in (ml_dtypes.bfloat16, np.float32, np.float64)),
    ],
    ids=lambda x: x.__name__,
)
@pytest.mark.parametrize("Nq", [1, 3, pytest.param(40, marks=SLOW)])
@pytest.mark.parametrize("page", [1, 7, *(pytest.param(n, marks=SLOW) for n in (16, 256))])
def test_pages_of_any_size(runner: Runner, page: int, Nq: int, dtype: Any) -> None:
    able(runner)
    rng = np.random.default_rng(page)
    q = rng.normal(size=(len(LENGTHS), HQ, Nq, D)).astype(dtype)
    check(runner, q, cache(LENGTHS, page, dtype, rng), {"causal": Nq > 1})


@pytest.mark.parametrize("Nq", [2, 40])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(runner: Runner, options: dict[str, Any], Nq: int) -> None:
    able(runner)
    rng = np.random.default_rng(1)
    q = rng.normal(size=(len(LENGTHS), HQ, Nq, D))
    check(runner, q, cache(LENGTHS, 16, np.float64, rng), options)


@settings(max_examples=40)
@given(data=st.data())
def test_packed_queries_over_pages(runner: Runner, data: Any) -> None:
    able(runner)
    count = data.draw(st.integers(0, 4))
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=count, max_size=count))
    queries = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    made = cache(lengths, data.draw(st.integers(1, 40)), dtype, rng)
    q = rng.normal(size=(HQ, sum(queries), D)).astype(dtype)
    options: dict[str, Any] = {"cu_seqlens_q": np.cumsum([0, *queries])}
    options["causal"] = data.draw(st.booleans())
    found = runner.forward(q, made.k_pages, made.v_pages, **made.paged, **options)
    k, v = (
        np.concatenate([np.zeros((HKV, 0, columns), dtype), *map(alone, x, lengths)], axis=1)
        for x, columns in ((made.k, D), (made.v, DV))
    )
    dense = options | {"cu_seqlens_k": np.cumsum([0, *lengths])}
    expected = reference.forward(q, k, v, **dense)
    assert_attention_close(found, expected, error_bound(q, k, v, **dense))


def alone(x: Array, length: int) -> Array:
    """Return the rows of one sequence."""
    return x[:, :length]


@pytest.mark.parametrize("Nq", [1, 32])
def test_pages_have_the_bits_of_a_contiguous_cache(backend: Runner, Nq: int) -> None:
    able(backend)
    rng = np.random.default_rng(2)
    made = cache(LENGTHS, 16, np.float32, rng)
    q = rng.normal(size=(len(LENGTHS), HQ, Nq, D)).astype(np.float32)
    found = backend.forward(q, made.k_pages, made.v_pages, **made.paged)
    expected = backend.forward(q, made.k, made.v, kv_lengths=LENGTHS)
    np.testing.assert_array_equal(found.out, expected.out)
    np.testing.assert_array_equal(found.lse, expected.lse)


def test_pages_may_have_any_strides(runner: Runner) -> None:
    able(runner)
    rng = np.random.default_rng(3)
    made = cache(LENGTHS, 5, np.float32, rng)
    q = rng.normal(size=(len(LENGTHS), HQ, 3, D)).astype(np.float32)
    k, v = (
        np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (made.k_pages, made.v_pages)
    )
    check(runner, q, made._replace(k_pages=k, v_pages=v), {})


def test_gradients_are_not_of_pages() -> None:
    made = cache([5], 4, np.float32, np.random.default_rng(4))
    q = np.ones((1, HQ, 2, D), np.float32)
    attention = tileattn.forward(q, made.k_pages, made.v_pages, **made.paged)
    message = "^{} does not support block_table: pages have no gradients; gather them"
    with pytest.raises(tileattn.UnsupportedError, match=message.format("backward")):
        tileattn.backward(attention.out, q, made.k_pages, made.v_pages, *attention, **made.paged)
    with pytest.raises(tileattn.UnsupportedError, match=message.format("vjp")):
        tileattn.vjp(q, made.k_pages, made.v_pages, **made.paged)
