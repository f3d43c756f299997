"""The algebra of row states: order, grouping and splits of the keys do not matter."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tileattn.algorithm.softmax import RowState, masked_matmul
from tileattn.algorithm.tile_mask import TileMask
from tileattn.backends.numpy.memory import BoundedRowState, Scratch, TileMemory

Array = NDArray[Any]

HEADS, M, N, DV = 2, 5, 9, 3
DTYPE = np.dtype(np.float64)
SPREADS = [0.1, 3.0, 300.0]  # of the scores; the exponential of the last overflows without a shift
LARGEST = 6 * SPREADS[-1]
"""Bound of the scores that are drawn."""

# `testing.error_bound` bounds whole calls. Here exp(s - m) has a relative error of half a unit in
# the last place of s, and no more than four such errors meet in a result.
ROUNDING = 4 * LARGEST * float(np.finfo(DTYPE).eps) / 2


def scores(seed: int, spread: float, density: float = 0.7) -> tuple[Array, Array]:
    """Make scores, some of them -inf (all of row 0), and values."""
    rng = np.random.default_rng(seed)
    s = rng.normal(size=(HEADS, M, N)) * spread
    s[rng.random(s.shape) > density] = -np.inf
    s[:, 0] = -np.inf
    return s, rng.normal(size=(HEADS, N, DV))


def of_numpy(small: bool = False) -> RowState:
    """Make the state that the NumPy backend runs the specification with."""
    memory = TileMemory(DTYPE, Scratch(), {})
    return BoundedRowState.made((HEADS, M), DV, memory, small)


EMPTY = {"specification": lambda: RowState.empty((HEADS, M), DV, DTYPE), "numpy": of_numpy}


def state_of(s: Array, v: Array, kind: str = "specification") -> RowState:
    state = EMPTY[kind]()
    state.update(s.copy(), v)
    return state


def copied(x: RowState) -> RowState:
    return RowState(x.m.copy(), x.l.copy(), x.acc.copy())


def merged(*states: RowState) -> RowState:
    total = copied(states[0])
    for state in states[1:]:
        total.merge(state)
    return total


def dense(s: Array, v: Array) -> tuple[Array, Array]:
    with np.errstate(divide="ignore"):
        lse = np.logaddexp.reduce(s, axis=-1)
    p = np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None])
    return p @ v, lse


def assert_same(actual: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=ROUNDING, atol=ROUNDING)


seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from([*EMPTY])
every_kind = pytest.mark.parametrize("kind", [*EMPTY])
spreads = st.sampled_from(SPREADS)


@given(
    kinds, seeds, spreads, st.permutations(range(N)), st.lists(st.integers(1, N - 1), unique=True)
)
def test_updates_in_any_order_and_any_split(
    kind: str, seed: int, spread: float, order: list[int], cuts: list[int]
) -> None:
    s, v = scores(seed, spread)
    state = EMPTY[kind]()
    for keys in np.split(np.array(order), sorted(cuts)):
        state.update(s[..., keys], v[:, keys])
    assert_same(state.finalize(), dense(s, v))


@given(seeds, spreads, spreads, spreads)
def test_merge_is_associative_and_commutative(seed: int, a: float, b: float, c: float) -> None:
    parts = [scores(seed + n, spread, density=0.4) for n, spread in enumerate((a, b, c))]
    x, y, z = (state_of(*part) for part in parts)
    whole = dense(
        *(
            np.concatenate(xs, axis=n)
            for n, xs in ((2, [p[0] for p in parts]), (1, [p[1] for p in parts]))
        )
    )
    assert_same(merged(merged(x, y), z).finalize(), whole)
    assert_same(merged(x, merged(y, z)).finalize(), whole)
    assert_same(merged(z, y, x).finalize(), whole)


@given(seeds, spreads)
def test_the_empty_state_is_the_identity(seed: int, spread: float) -> None:
    state = state_of(*scores(seed, spread))
    empty = RowState.empty((HEADS, M), DV, DTYPE)
    for total in (merged(empty, state), merged(state, empty), merged(empty, state, empty)):
        for ours, theirs in zip(total.finalize(), state.finalize(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_an_empty_state_has_no_keys() -> None:
    for empty in (EMPTY["specification"](), of_numpy(), of_numpy(small=True)):
        out, lse = empty.finalize(dropout_scale=1e6)
        assert not out.any()
        assert np.isneginf(lse).all()


@given(seeds)
def test_a_state_of_small_scores_takes_no_maximum(seed: int) -> None:
    s, v = scores(seed, 3.0)
    state = of_numpy(small=True)
    state.update(s[..., :4].copy(), v[:, :4], TileMask.of(~np.isneginf(s[..., :4])))
    state.update(s[..., 4:].copy(), v[:, 4:], TileMask.of(~np.isneginf(s[..., 4:])))
    assert not state.m.any()
    result = state.finalize()
    assert_same(result, dense(s, v))
    assert_same(result, state_of(s, v).finalize())


@given(kinds, seeds, spreads)
def test_a_finalized_result_is_a_state(kind: str, seed: int, spread: float) -> None:
    (s, v), (t, w) = scores(seed, spread), scores(seed + 1, spread)
    result = state_of(s, v, kind).finalize()
    assert_same(RowState.of_result(*result, DTYPE).finalize(), result)
    joined = merged(RowState.of_result(*result, DTYPE), state_of(t, w))
    whole = dense(np.concatenate([s, t], axis=2), np.concatenate([v, w], axis=1))
    assert_same(joined.finalize(), whole)


@every_kind
def test_rows_are_a_view(kind: str) -> None:
    s, v = scores(0, 3.0)
    state = EMPTY[kind]()
    for rows in (slice(3, M), slice(0, 3)):
        state.rows(rows).update(s[:, rows].copy(), v)
    assert_same(state.finalize(), dense(s, v))


@given(kinds, seeds, spreads)
def test_a_sink_is_a_key_of_value_zero(kind: str, seed: int, spread: float) -> None:
    s, v = scores(seed, spread)
    logits = np.array([[0.5], [-np.inf]])
    state = state_of(s, v, kind)
    state.sink(logits)
    with_key = np.concatenate([s, np.broadcast_to(logits[..., None], (HEADS, M, 1))], axis=2)
    assert_same(state.finalize(), dense(with_key, np.concatenate([v, np.zeros((HEADS, 1, DV))], 1)))


@every_kind
def test_dropout_touches_the_weighted_sum_only(kind: str) -> None:
    s, v = scores(0, 3.0)
    keep = np.random.default_rng(1).random(s.shape) < 0.5
    state = EMPTY[kind]()
    for keys in (slice(0, 4), slice(4, N)):
        state.update(s[..., keys].copy(), v[:, keys], weights=keep[..., keys])
    out, lse = state.finalize(dropout_scale=2.0)
    p = np.exp(s - np.where(np.isneginf(dense(s, v)[1]), 0, dense(s, v)[1])[..., None])
    assert_same((out, lse), ((2 * p * keep) @ v, dense(s, v)[1]))


@every_kind
@pytest.mark.parametrize("first", [np.inf, -np.inf, np.nan, 1e300])
def test_infinities_are_those_of_the_formula(first: float, kind: str) -> None:
    s, v = np.array([[[first, 0.0, 1.0]]]), np.array([[[1.0], [2.0], [3.0]]])
    with np.errstate(all="ignore"):
        for keys in ([0, 1, 2], [2, 1, 0]):
            state = RowState.empty((1, 1), 1, DTYPE)
            if kind == "numpy":
                state = BoundedRowState.made((1, 1), 1, TileMemory(DTYPE, Scratch(), {}), False)
            for j in keys:
                state.update(s[..., [j]].copy(), v[:, [j]])
            out, lse = state.finalize()
            np.testing.assert_array_equal(lse, np.logaddexp.reduce(s, axis=-1))
            assert np.isnan(out).all() == (first in (np.inf,) or np.isnan(first))


# --- masked_matmul ------------------------------------------------------------------------------

# Two orders of a sum of N terms differ by N units in the last place of the largest; these sums
# cancel to a fiftieth of it at most.
OF_SUMS = 50 * N * float(np.finfo(DTYPE).eps)


def check_masked_matmul(visible: NDArray[np.bool_], keys: slice, bad: list[int]) -> None:
    """Compare with sums over the visible pairs alone, where some rows of x are not finite."""
    rng = np.random.default_rng(0)
    G = 3  # query heads of one key head
    p, x = rng.random((HEADS, G, M, N)), rng.normal(size=(HEADS, 1, N, DV))
    x[0, 0, bad] = np.nan
    x[1, 0, bad[:1], 1] = np.inf
    whole = np.ones((*visible.shape[:2], M, N), bool)
    whole[..., keys] = visible
    full = np.broadcast_to(whole, p.shape)
    p[~full] = 0
    expected = np.zeros((HEADS, G, M, DV))
    for b, h, i in np.ndindex(HEADS, G, M):
        row = full[b, h, i]
        expected[b, h, i] = p[b, h, i, row] @ x[b, 0, row]
    out = np.full((HEADS, G, M, DV), 7.0)
    with np.errstate(invalid="ignore"):
        assert masked_matmul(p, x, TileMask(keys, visible, N), out) is out
    np.testing.assert_allclose(out, expected, rtol=OF_SUMS)
    assert np.isfinite(expected).any()
    assert not np.isfinite(expected).all()


@pytest.mark.parametrize("lead", [(1, 1), (HEADS, 3)])
@pytest.mark.parametrize("keys", [slice(0, N), slice(2, 7)])
def test_masked_out_pairs_add_nothing(lead: tuple[int, int], keys: slice) -> None:
    rng = np.random.default_rng(1)
    visible = rng.random((*lead, M, keys.stop - keys.start)) < 0.5
    check_masked_matmul(visible, keys, [3, 5])


def test_masked_matmul_with_keys_before_queries() -> None:
    rng = np.random.default_rng(1)
    pairs = rng.random((1, 1, M, 4)) < 0.5
    visible = TileMask(slice(2, 6), pairs, N)
    p, x = rng.random((HEADS, 1, M, N)), rng.normal(size=(HEADS, 1, M, DV))
    x[:, :, 1] = np.nan
    whole = np.broadcast_to(visible.dense(), p.shape)
    p[~whole] = 0
    out = np.empty((HEADS, 1, N, DV))
    masked_matmul(p.swapaxes(-1, -2), x, visible.transposed(), out)
    expected = np.where(whole[..., None], p[..., None] * x[..., None, :], 0).sum(axis=2)
    np.testing.assert_allclose(out, expected, rtol=OF_SUMS)
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), whole[:, :, 1])


def test_masked_matmul_without_a_mask_is_the_product() -> None:
    rng = np.random.default_rng(1)
    p, x = rng.random((HEADS, M, N)), rng.normal(size=(HEADS, N, DV))
    x[0, 2, 1] = np.nan
    np.testing.assert_array_equal(masked_matmul(p, x, None, np.empty((HEADS, M, DV))), p @ x)


# --- tile masks, scratch ------------------------------------------------------------------------


def test_a_tile_mask_stores_the_boundary_only() -> None:
    pairs = np.array([[[True, False], [False, True]]])
    visible = TileMask(slice(1, 3), pairs, 4)
    whole = np.array([[[1, 1, 0, 1], [1, 0, 1, 1]]], bool)
    np.testing.assert_array_equal(visible.dense(), whole)
    np.testing.assert_array_equal(visible.transposed().dense(), whole.swapaxes(-1, -2))
    x = np.arange(8.0).reshape(1, 2, 4)
    visible.masked_fill(x, -1.0)
    np.testing.assert_array_equal(x, np.where(whole, np.arange(8.0).reshape(1, 2, 4), -1))
    np.testing.assert_array_equal(TileMask.of(whole).dense(), whole)


def test_scratch_hands_the_same_memory_out_again() -> None:
    scratch = Scratch()
    large = scratch.take("a", (4, 6), np.dtype(np.float32))
    assert large.shape == (4, 6)
    assert large.dtype == np.float32
    small = scratch.take("a", (5, 2), np.dtype(np.float64))
    assert small.shape == (5, 2)
    assert np.shares_memory(large, small)
    assert not np.shares_memory(small, scratch.take("b", (5, 2), np.dtype(np.float64)))
    assert scratch.take("a", (100,), np.dtype(np.float64)).shape == (100,)
    assert scratch.take("a", (0, 7), np.dtype(np.float64)).shape == (0, 7)
