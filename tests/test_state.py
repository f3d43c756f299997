"""The algebra of row states: order, grouping and splits of the keys do not matter."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tileattn.algorithm.softmax import RowState, Scratch, weigh
from tileattn.algorithm.tile_mask import Seen

Array = NDArray[Any]

HEADS, M, N, DV = 2, 5, 9, 3
DTYPE = np.dtype(np.float64)
SPREADS = [0.1, 3.0, 300.0]  # of the scores; the exponential of the last overflows without a shift


def scores(seed: int, spread: float, share: float = 0.7) -> tuple[Array, Array]:
    """Make scores, some of them -inf (all of row 0), and values."""
    rng = np.random.default_rng(seed)
    s = rng.normal(size=(HEADS, M, N)) * spread
    s[rng.random(s.shape) > share] = -np.inf
    s[:, 0] = -np.inf
    return s, rng.normal(size=(HEADS, N, DV))


def state_of(s: Array, v: Array, bounded: bool = False) -> RowState:
    state = RowState.empty(s.shape[:2], DV, DTYPE, bounded)
    state.absorb(s.copy(), v)
    return state


def copied(x: RowState) -> RowState:
    return RowState(x.m.copy(), x.l.copy(), x.acc.copy(), x.bounded)


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
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


seeds = st.integers(0, 2**32 - 1)
spreads = st.sampled_from(SPREADS)


@given(seeds, spreads, st.permutations(range(N)), st.lists(st.integers(1, N - 1), unique=True))
def test_absorbing_in_any_order_and_any_split(
    seed: int, spread: float, order: list[int], cuts: list[int]
) -> None:
    s, v = scores(seed, spread)
    state = RowState.empty((HEADS, M), DV, DTYPE)
    scratch = Scratch()
    for keys in np.split(np.array(order), sorted(cuts)):
        state.absorb(s[..., keys], v[:, keys], scratch=scratch)
    assert_same(state.finish(), dense(s, v))


@given(seeds, spreads, spreads, spreads)
def test_merge_is_associative_and_commutative(seed: int, a: float, b: float, c: float) -> None:
    parts = [scores(seed + n, spread, share=0.4) for n, spread in enumerate((a, b, c))]
    x, y, z = (state_of(*part) for part in parts)
    whole = dense(
        *(
            np.concatenate(xs, axis=n)
            for n, xs in ((2, [p[0] for p in parts]), (1, [p[1] for p in parts]))
        )
    )
    assert_same(merged(merged(x, y), z).finish(), whole)
    assert_same(merged(x, merged(y, z)).finish(), whole)
    assert_same(merged(z, y, x).finish(), whole)


@given(seeds, spreads)
def test_the_empty_state_is_the_identity(seed: int, spread: float) -> None:
    state = state_of(*scores(seed, spread))
    empty = RowState.empty((HEADS, M), DV, DTYPE)
    for total in (merged(empty, state), merged(state, empty), merged(empty, state, empty)):
        for ours, theirs in zip(total.finish(), state.finish(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_an_empty_state_has_seen_nothing() -> None:
    for bounded in (False, True):
        out, lse = RowState.empty((HEADS, M), DV, DTYPE, bounded).finish(gain=1e6)
        assert not out.any()
        assert np.isneginf(lse).all()


@given(seeds)
def test_bounded_and_unbounded_states_agree(seed: int) -> None:
    s, v = scores(seed, 3.0)
    state = RowState.empty((HEADS, M), DV, DTYPE, bounded=True)
    hidden = Seen.of(~np.isneginf(s))
    state.absorb(s[..., :4].copy(), v[:, :4], Seen.of(~np.isneginf(s[..., :4])))
    state.absorb(s[..., 4:].copy(), v[:, 4:], Seen.of(~np.isneginf(s[..., 4:])))
    assert not state.m.any()
    assert_same(state.finish(), dense(s, v))
    assert_same(state.finish(), state_of(s, v).finish())
    assert hidden.N == N


@given(seeds, spreads)
def test_a_finished_result_is_a_state_again(seed: int, spread: float) -> None:
    (s, v), (t, w) = scores(seed, spread), scores(seed + 1, spread)
    result = state_of(s, v).finish()
    assert_same(RowState.of_result(*result, DTYPE).finish(), result)
    joined = merged(RowState.of_result(*result, DTYPE), state_of(t, w))
    whole = dense(np.concatenate([s, t], axis=2), np.concatenate([v, w], axis=1))
    assert_same(joined.finish(), whole)


def test_rows_are_a_view() -> None:
    s, v = scores(0, 3.0)
    state = RowState.empty((HEADS, M), DV, DTYPE)
    for rows in (slice(3, M), slice(0, 3)):
        state.rows(rows).absorb(s[:, rows].copy(), v)
    assert_same(state.finish(), dense(s, v))


@given(seeds, spreads)
def test_a_sink_is_a_key_of_value_zero(seed: int, spread: float) -> None:
    s, v = scores(seed, spread)
    logits = np.array([[0.5], [-np.inf]])
    state = state_of(s, v)
    state.sink(logits)
    with_key = np.concatenate([s, np.broadcast_to(logits[..., None], (HEADS, M, 1))], axis=2)
    assert_same(state.finish(), dense(with_key, np.concatenate([v, np.zeros((HEADS, 1, DV))], 1)))


def test_dropout_touches_the_weighted_sum_only() -> None:
    s, v = scores(0, 3.0)
    keep = np.random.default_rng(1).random(s.shape) < 0.5
    state = RowState.empty((HEADS, M), DV, DTYPE)
    for keys in (slice(0, 4), slice(4, N)):
        state.absorb(s[..., keys].copy(), v[:, keys], keep=keep[..., keys])
    out, lse = state.finish(gain=2.0)
    p = np.exp(s - np.where(np.isneginf(dense(s, v)[1]), 0, dense(s, v)[1])[..., None])
    assert_same((out, lse), ((2 * p * keep) @ v, dense(s, v)[1]))


@pytest.mark.parametrize("first", [np.inf, -np.inf, np.nan, 1e300])
def test_infinities_are_those_of_the_plain_formula(first: float) -> None:
    s, v = np.array([[[first, 0.0, 1.0]]]), np.array([[[1.0], [2.0], [3.0]]])
    with np.errstate(all="ignore"):
        for keys in ([0, 1, 2], [2, 1, 0]):
            state = RowState.empty((1, 1), 1, DTYPE)
            for j in keys:
                state.absorb(s[..., [j]].copy(), v[:, [j]])
            out, lse = state.finish()
            np.testing.assert_array_equal(lse, np.logaddexp.reduce(s, axis=-1))
            assert np.isnan(out).all() == (first in (np.inf,) or np.isnan(first))


# --- weigh --------------------------------------------------------------------------------------


def check_weigh(seen: NDArray[np.bool_], keys: slice, bad: list[int]) -> None:
    """Compare with sums over the seen pairs alone, where some rows of x are not finite."""
    rng = np.random.default_rng(0)
    G = 3  # query heads of one key head
    p, x = rng.random((HEADS, G, M, N)), rng.normal(size=(HEADS, 1, N, DV))
    x[0, 0, bad] = np.nan
    x[1, 0, bad[:1], 1] = np.inf
    whole = np.ones((*seen.shape[:2], M, N), bool)
    whole[..., keys] = seen
    full = np.broadcast_to(whole, p.shape)
    p[~full] = 0
    expected = np.zeros((HEADS, G, M, DV))
    for b, h, i in np.ndindex(HEADS, G, M):
        row = full[b, h, i]
        expected[b, h, i] = p[b, h, i, row] @ x[b, 0, row]
    out = np.full((HEADS, G, M, DV), 7.0)
    with np.errstate(invalid="ignore"):
        assert weigh(p, x, Seen(keys, seen, N), out) is out
    np.testing.assert_allclose(out, expected, rtol=1e-13)
    assert np.isfinite(expected).any()
    assert not np.isfinite(expected).all()


@pytest.mark.parametrize("lead", [(1, 1), (HEADS, 3)])
@pytest.mark.parametrize("keys", [slice(0, N), slice(2, 7)])
def test_hidden_pairs_never_meet(lead: tuple[int, int], keys: slice) -> None:
    rng = np.random.default_rng(1)
    seen = rng.random((*lead, M, keys.stop - keys.start)) < 0.5
    check_weigh(seen, keys, [3, 5])


def test_weigh_turned_for_keys_before_queries() -> None:
    rng = np.random.default_rng(1)
    pairs = rng.random((1, 1, M, 4)) < 0.5
    seen = Seen(slice(2, 6), pairs, N)
    p, x = rng.random((HEADS, 1, M, N)), rng.normal(size=(HEADS, 1, M, DV))
    x[:, :, 1] = np.nan
    whole = np.broadcast_to(seen.whole(), p.shape)
    p[~whole] = 0
    out = np.empty((HEADS, 1, N, DV))
    weigh(p.swapaxes(-1, -2), x, seen.transposed(), out)
    expected = np.where(whole[..., None], p[..., None] * x[..., None, :], 0).sum(axis=2)
    np.testing.assert_allclose(out, expected, rtol=1e-13)
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), whole[:, :, 1])


def test_weigh_without_a_mask_is_the_product() -> None:
    rng = np.random.default_rng(1)
    p, x = rng.random((HEADS, M, N)), rng.normal(size=(HEADS, N, DV))
    x[0, 2, 1] = np.nan
    np.testing.assert_array_equal(weigh(p, x, None, np.empty((HEADS, M, DV))), p @ x)


# --- seen, scratch ------------------------------------------------------------------------------


def test_seen_keeps_the_boundary_only() -> None:
    pairs = np.array([[[True, False], [False, True]]])
    seen = Seen(slice(1, 3), pairs, 4)
    whole = np.array([[[1, 1, 0, 1], [1, 0, 1, 1]]], bool)
    np.testing.assert_array_equal(seen.whole(), whole)
    np.testing.assert_array_equal(seen.transposed().whole(), whole.swapaxes(-1, -2))
    x = np.arange(8.0).reshape(1, 2, 4)
    seen.hide(x, -1.0)
    np.testing.assert_array_equal(x, np.where(whole, np.arange(8.0).reshape(1, 2, 4), -1))
    np.testing.assert_array_equal(Seen.of(whole).whole(), whole)


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
