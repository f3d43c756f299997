"""Cascades on JAX arrays, against the oracle over the same keys without pages."""

from typing import Any

import numpy as np
import pytest

from tests.shared_pages import SharedCache, shared_cache
from tileattn import reference
from tileattn.dtypes import BFLOAT16, CACHE_DTYPES
from tileattn.testing import assert_attention_close, error_bound

jax = pytest.importorskip("jax", reason="it takes arrays of JAX: pip install jax")

from tileattn.cascading import cascade_tables  # noqa: E402 - after the skip
from tileattn.jax import cascade  # noqa: E402 - after the skip
from tileattn.jax.cascading import _tables  # noqa: E402 - after the skip


def call(made: SharedCache, **options: Any) -> dict[str, Any]:
    given = {"q": made.q, "k": made.k_pages, "v": made.v_pages, **made.paged}
    return given | {"shared_lengths": made.shared_lengths} | options


def check(found: Any, made: SharedCache, **options: Any) -> None:
    given = made.dense | options
    expected = reference.forward(*made[:3], **given)
    assert_attention_close(tuple(found), expected, error_bound(*made[:3], **given))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("traced", ["nothing", "arrays", "integers"])
def test_results_match_the_oracle(traced: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    made = shared_cache(rng, [3, 0], [6, 5, 9, 20], 4, Nq=5, dtype=dtype)
    names = {"nothing": (), "arrays": ("q", "k", "v")}.get(traced, (*"qkv", *INTEGERS))
    for options in ({}, {"causal": True, "sinks": np.ones(4, np.float32), "softcap": 3.0}):
        given = call(made, **options)
        given["shared_lengths"] = np.array(given["shared_lengths"])
        moving = {name: given.pop(name) for name in names}
        check(jax.jit(lambda moving, own=given: cascade(**moving, **own))(moving), made, **options)


INTEGERS = "shared_lengths", "block_table", "kv_lengths"


@pytest.mark.parametrize("kind", CACHE_DTYPES, ids=str)
def test_pages_of_8_bits(kind: Any) -> None:
    made = shared_cache(np.random.default_rng(1), [2], [1, 7, 3], 8, kv_dtype=kind)
    check(cascade(**call(made)), made)
    heads = {name: np.full((3, 2), 0.01, np.float32) for name in ("k_descale", "v_descale")}
    made = made._replace(dense=made.dense | heads, paged=made.paged | heads)
    check(cascade(**call(made)), made)


def test_large_groups_are_divided() -> None:
    rng = np.random.default_rng(5)
    made = shared_cache(rng, [3, 2], rng.integers(1, 9, 160).tolist(), 4)
    text = str(jax.make_jaxpr(lambda q: cascade(**call(made) | {"q": q}))(made.q))
    heads, columns = made.q.shape[1], made.q.shape[3]
    assert f"[4,{heads},40,{columns}]" in text  # two groups of 80 sequences as four of 40
    check(cascade(**call(made)), made)


@pytest.mark.parametrize("shared", [[4], [7, -3, 1 << 30], [0, 8, 20, 0, 4, 12]])
def test_tables(shared: list[int]) -> None:
    """Shared lengths that JAX traces are rounded down to whole pages, and clamped."""
    table, lengths = np.arange(30).reshape(6, 5) * 7 % 31, np.array([20, 17, 12, 13, 9, 20])
    expected = cascade_tables(table, lengths, np.array(shared), 4)
    found = jax.jit(lambda table, lengths, shared: _tables(table, lengths, shared, 4))(
        table, lengths, np.array(shared)
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_descales_are_equal_in_a_group() -> None:
    """Also in a group that is divided."""
    made = shared_cache(np.random.default_rng(6), [2], [3] * 128, 4, kv_dtype=CACHE_DTYPES[0])
    descale = np.full((128, made.k_pages.shape[1]), 0.5, np.float32)
    descale[64:] = 0.25
    given = call(made) | {"k_descale": descale, "v_descale": np.full_like(descale, 0.5)}
    with pytest.raises(ValueError, match=r"^k_descale must have the same numbers"):
        cascade(**given)


def test_groups_of_one_and_numbers_as_lengths() -> None:
    made = shared_cache(np.random.default_rng(2), [2], [5, 5], 8)
    check(cascade(**call(made, shared_lengths=[16, 16])), made)
    check(cascade(**call(made, shared_lengths=jax.numpy.array(16), kv_lengths=21)), made)
    check(cascade(**call(made, kv_lengths=jax.numpy.array(21))), made)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"shared_lengths": None}, TypeError, "shared_lengths must be integers; got None"),
        ({"shared_lengths": [8, 8, 8]}, ValueError, "shared_lengths must be an integer, or integ"),
        ({"shared_lengths": 7}, ValueError, "shared_lengths must be multiples of the page size"),
        ({"kv_lengths": [3.0, 2]}, TypeError, "kv_lengths must be an integer, or a sequence"),
        ({"block_table": None}, TypeError, "block_table must be integers; got None"),
        ({"q": np.ones((4, 1, 24), np.float32)}, ValueError, r"q must have shape \(B, Hq, Nq, D\)"),
        ({"k": 3}, TypeError, "k must be a JAX or NumPy array; got 3"),
        ({"causal": 1}, TypeError, "causal must be True or False; got 1"),
    ],
)
def test_what_is_not_accepted_is_named(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    made = shared_cache(np.random.default_rng(3), [2], [5, 5], 8)
    with pytest.raises(error, match=f"^{message}"):
        cascade(**call(made) | changed)


def test_there_are_no_gradients() -> None:
    given = call(shared_cache(np.random.default_rng(4), [2], [5, 5], 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="does not support block_table"):
        jax.grad(lambda q: cascade(**given | {"q": q}).out.sum())(jax.numpy.asarray(given["q"]))
