"""The specification against the oracle, for any block sizes and either order; a worked example."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tileattn import Attention, Gradients, reference
from tileattn.algorithm import spec
from tileattn.algorithm.heads import Lane, lanes, load
from tileattn.algorithm.mask import schedule, sizes_for_memory
from tileattn.algorithm.softmax import RowState, Scratch
from tileattn.problem import parse
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]

Blocks = tuple[int, int]


def forward_by_lanes(case: AttentionCase, blocks: Blocks, order: str) -> Attention:
    """Run ``spec.forward`` on every lane."""
    P, operands = parse(case.q, case.k, case.v, case.options)
    out = np.zeros((P.B, P.Hq, P.Nq, P.Dv), P.dtype)
    lse = np.zeros((P.B, P.Hq, P.Nq), P.sum_dtype)
    with np.errstate(all="ignore"):
        for lane in lanes(P, operands):
            for whole, part in zip((out, lse), spec.forward(lane, *blocks, order), strict=True):
                lane.heads_of(whole)[...] = part
    return Attention(out.reshape(P.out_shape), lse.reshape(P.out_shape[:-1]))


def upstream(lane: Lane, dout: Array, attention: Attention, dlse: Array | None) -> spec.Upstream:
    out, lse = attention
    delta = (dout.astype(lane.dtype) * out.astype(lane.dtype)).sum(axis=-1)
    delta = delta if dlse is None else delta - dlse
    finite = np.where(np.isneginf(lse), 0, lse)
    return spec.Upstream(*(lane.heads_of(x) for x in (dout, finite, delta)))


def backward_by_lanes(
    case: AttentionCase, attention: Attention, blocks: Blocks, order: str
) -> Gradients:
    """Run ``spec.backward`` on every lane."""
    P, operands = parse(case.q, case.k, case.v, case.options)
    rows = (P.B, P.Hq, P.Nq)
    whole = Attention(attention.out.reshape(*rows, P.Dv), attention.lse.reshape(rows))
    dlse = None if case.dlse is None else case.dlse.reshape(rows)
    dq, dk, dv = (np.zeros(x.shape, P.sum_dtype) for x in (operands.q, operands.k, operands.v))
    with np.errstate(all="ignore"):
        for lane in lanes(P, operands):
            up = upstream(lane, case.dout.reshape(whole.out.shape), whole, dlse)
            for total, part in zip(
                (dq, dk, dv), spec.backward(lane, up, *blocks, order), strict=True
            ):
                if total is dq:
                    lane.heads_of(dq)[...] = part
                else:
                    total[lane.batch, lane.kv : lane.kv + len(part)] += part[:, 0]
        results = [
            x.reshape(given.shape).astype(P.dtype)
            for x, given in zip((dq, dk, dv), (case.q, case.k, case.v), strict=True)
        ]
    dq, dk, dv = results
    return Gradients(dq, dk, dv, None, None)


def check(case: AttentionCase, blocks: Blocks, orders: tuple[str, str]) -> None:
    q, k, v, dout, dlse, options = case
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    attention = forward_by_lanes(case, blocks, orders[0])
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    actual = backward_by_lanes(case, attention, blocks, orders[1])
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(actual, expected, bounds, names=("dq", "dk", "dv"))


orders = st.sampled_from(["query", "key"])


@settings(max_examples=50)
@given(
    problems(max_length=30),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(orders, orders),
)
def test_any_block_sizes_in_either_order(
    case: AttentionCase, blocks: Blocks, orders: tuple[str, str]
) -> None:
    check(case, blocks, orders)


@settings(max_examples=20)
@given(problems(max_length=70, edges=False), st.integers(64, 4096))
def test_algorithm_1_of_flash_attention(case: AttentionCase, M: int) -> None:
    """Key blocks in the outer loop, both passes, with the block sizes of its first line."""
    check(case, sizes_for_memory(M, case.q.shape[-1]), ("key", "key"))


def arrays(seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    shapes = ((2, 4, 17, 3), (2, 2, 23, 3), (2, 2, 23, 6), (2, 4, 17, 6))
    return [rng.normal(size=shape) for shape in shapes]


@settings(max_examples=30)
@given(st.permutations(range(23)), st.integers(1, 25), st.integers(1, 25))
def test_the_order_of_the_keys_does_not_matter(keys: list[int], bq: int, bk: int) -> None:
    q, k, v, dout = arrays()
    mask = np.random.default_rng(1).random((17, 23)) < 0.6
    options = {"mask": mask}
    turned = {"mask": mask[:, keys]}
    plain = AttentionCase(q, k, v, dout, None, options)
    moved = AttentionCase(q, k[:, :, keys], v[:, :, keys], dout, None, turned)
    expected = forward_by_lanes(plain, (bq, bk), "query")
    actual = forward_by_lanes(moved, (bq, bk), "query")
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-13)
    grads = backward_by_lanes(plain, expected, (bq, bk), "key")
    moved_grads = backward_by_lanes(moved, actual, (bq, bk), "key")
    np.testing.assert_allclose(moved_grads.dq, grads.dq, rtol=1e-12, atol=1e-13)
    for name in ("dk", "dv"):
        ours, theirs = getattr(moved_grads, name), getattr(grads, name)[:, :, keys]
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("options", [{}, {"softcap": 500.0}, {"bias": np.ones((30, 1))}], ids=str)
def test_both_passes_have_the_same_probabilities(dtype: Any, options: dict[str, Any]) -> None:
    """The scale is rounded into q in both, and scores of some 1e3 show the rounding of any other.

    Where v and dout are identity matrices, out is P and dv is P transposed.
    """
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 30, 48)) * 30
    v = dout = np.eye(30)[None, None].astype(dtype)
    case = AttentionCase(q.astype(dtype), k.astype(dtype), v, dout, None, {"scale": 0.3, **options})
    attention = forward_by_lanes(case, (30, 30), "query")
    dv = backward_by_lanes(case, attention, (30, 30), "query").dv
    bound = error_bound(0 * case.q, 0 * case.k, v, dout)["dv"]
    assert np.linalg.norm((dv.swapaxes(2, 3) - attention.out).astype(np.float64)) <= bound.error


# --- lanes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("Hq", "Hkv", "Nq", "Nk", "sizes"),
    [
        (6, 3, 5, 7, [(3, 2)]),
        (6, 3, 128, 128, [(2, 2), (1, 2)]),
        (6, 1, 128, 128, [(1, 4), (1, 2)]),
        (6, 3, 300, 300, [(1, 1)] * 6),
    ],
)
def test_every_head_is_in_one_lane(
    Hq: int, Hkv: int, Nq: int, Nk: int, sizes: list[tuple[int, int]]
) -> None:
    q, k, v = np.ones((2, Hq, Nq, 2)), np.ones((2, Hkv, Nk, 2)), np.ones((2, Hkv, Nk, 3))
    found = list(lanes(*parse(q, k, v, {})))
    assert [lane.q.shape[:2] for lane in found] == sizes * 2
    heads = [(lane.batch, h) for lane in found for h in range(lane.heads.start, lane.heads.stop)]
    assert heads == [(b, h) for b in range(2) for h in range(Hq)]
    for lane in found:
        assert lane.kv == lane.heads.start // (Hq // Hkv)
        assert np.shares_memory(lane.q, q)
        assert np.shares_memory(lane.k, k)


def bounded_lane(scale_of_q: float = 1.0, **options: Any) -> tuple[Lane, AttentionCase]:
    """Make a lane of one head that is long enough for its norms to be looked at."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 300, 6)).astype(np.float32)
    v, dout = rng.normal(size=(2, 1, 1, 300, 8)).astype(np.float32)
    case = AttentionCase(q * np.float32(scale_of_q), k, v, dout, None, options)
    return next(lanes(*parse(*case[:3], options))), case


@pytest.mark.parametrize("order", ["query", "key"])
def test_small_scores_need_no_maximum(order: str) -> None:
    lane, case = bounded_lane(causal=True)
    assert lane.bounded
    check(case, (64, 100), (order, order))
    assert not RowState.empty((3,), 2, lane.dtype, lane.bounded).m.any()


@pytest.mark.parametrize("scale_of_q", [30.0, 1e4, 1e30, math.inf, math.nan])
def test_large_scores_are_not_bounded(scale_of_q: float) -> None:
    with np.errstate(all="ignore"):
        lane, case = bounded_lane(scale_of_q)
        assert not lane.bounded
    if scale_of_q < 1e30:
        check(case, (64, 100), ("query", "key"))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.0},
        {"bias": np.zeros(300, np.float32)},
        {"alibi_slopes": np.ones(1)},
        {"mask": np.ones(300, bool)},
    ],
)
def test_only_plain_scores_are_bounded(options: dict[str, Any]) -> None:
    assert not bounded_lane(**options)[0].bounded


@pytest.mark.parametrize("large", [1e30, math.nan, math.inf, -math.inf])
def test_large_values_are_not_bounded(large: float) -> None:
    lane, _ = bounded_lane()
    lane.v[0, 0, 7, 3] = large
    assert not lane.bounded


def test_what_nobody_sees_does_not_decide() -> None:
    """Queries 0 to 49 see nothing; keys from 200 on are past the length."""
    lane, _ = bounded_lane(kv_lengths=200, causal=True, q_offset=-50)
    lane.q[:, :, :50] = math.nan
    lane.k[:, :, 200:] = math.inf
    lane.v[:, :, 200:] = 1e38
    assert lane.bounded
    lane, _ = bounded_lane(kv_lengths=200, causal=True, q_offset=-50)
    lane.k[:, :, 199] = math.inf
    assert not lane.bounded


# --- load ---------------------------------------------------------------------------------------


def test_load_copies_only_what_a_matrix_product_cannot_read() -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    scratch = Scratch()
    view: Array
    for view in (x, x[:, :4], x[1:3], x[::2], x[:1, ::-1][:, ::-1]):
        assert load(view, x.dtype, "x", scratch) is view
    for view in (x.T, x[::-1], x[:, ::2], np.broadcast_to(x[0], (3, 6)), x.astype(np.float16)):
        copy = load(view, x.dtype, "x", scratch)
        assert not np.shares_memory(copy, x)
        assert copy.dtype == x.dtype
        np.testing.assert_array_equal(copy, view)
    np.testing.assert_array_equal(load(x, x.dtype, "x", scratch, 0.5), x / 2)


# --- the worked example of four tokens ----------------------------------------------------------

Q4 = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
K4 = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]])
V4 = np.arange(1.0, 17).reshape(4, 4)
DOUT4 = np.array([[1.0] * 4, [0] * 4, [1] * 4, [0] * 4])
EXAMPLE = AttentionCase(Q4, K4, V4, DOUT4, None, {"scale": 1.0})

# The example carries three digits from step to step, hence more than half a unit in the last place.
SUMS, WEIGHTS = 0.00061, 0.0101


def trace() -> list[RowState]:
    """Return the state of the rows of each tile, after it, in tiles of 2 x 2."""
    lane = next(lanes(*parse(Q4, K4, V4, EXAMPLE.options)))
    state = RowState.empty((1, 1, 4), 4, lane.dtype, lane.bounded)
    after = []
    for tile in schedule(lane.sight, 2, 2):
        q = load(lane.q[..., tile.queries, :], lane.dtype, "q", Scratch(), lane.scale)
        rows = state.rows(tile.queries)
        kv = spec.load_keys(lane, tile.k0, tile.k1, Scratch())
        spec.absorb_tile(lane, rows, q, kv, tile, Scratch())
        after.append(RowState(rows.m[0, 0].copy(), rows.l[0, 0].copy(), rows.acc[0, 0].copy()))
    return after


def test_example_first_tile() -> None:
    first = trace()[0]
    np.testing.assert_array_equal(first.m, [1, 1])
    np.testing.assert_allclose(first.l, [1.368, 1.368], rtol=0, atol=SUMS)
    np.testing.assert_allclose(first.l, 1 + math.exp(-1), rtol=1e-15)
    printed = [[2.84, 4.21, 5.57, 6.94], [5.37, 6.74, 8.10, 9.47]]
    np.testing.assert_allclose(first.acc, printed, rtol=0, atol=WEIGHTS)
    weights = np.array([[1, math.exp(-1)], [math.exp(-1), 1]])
    np.testing.assert_allclose(first.acc, weights @ V4[:2], rtol=1e-15)


def test_example_second_tile_rescales_the_first() -> None:
    second = trace()[1]
    np.testing.assert_array_equal(second.m, [2, 2])
    np.testing.assert_allclose(second.l, [1.638, 1.638], rtol=0, atol=SUMS)
    e1, e2 = math.exp(-1), math.exp(-2)
    np.testing.assert_allclose(second.l, (1 + e1) * e1 + 1 + e2, rtol=1e-15)
    printed = [[11.81, 13.44, 15.08, 16.71], [16.20, 17.83, 19.47, 21.10]]
    np.testing.assert_allclose(second.acc, printed, rtol=0, atol=WEIGHTS)
    weights = np.array([[e1, e2, 1, e2], [e2, e1, e2, 1]])
    np.testing.assert_allclose(second.acc, weights @ V4, rtol=1e-15)


def test_example_lower_tiles() -> None:
    """The maximum stays at 1, so the fourth tile adds to the third without rescaling."""
    third, fourth = trace()[2:]
    np.testing.assert_array_equal(third.m, [1, 1])
    np.testing.assert_array_equal(fourth.m, [1, 1])
    np.testing.assert_allclose(fourth.l, 2 * third.l, rtol=1e-15)
    np.testing.assert_allclose(third.l, 1 + math.exp(-1), rtol=1e-15)


@pytest.mark.parametrize("order", ["query", "key"])
@pytest.mark.parametrize("blocks", [(1, 1), (2, 2), (1, 4), (3, 2), (4, 4)])
def test_example_results(blocks: Blocks, order: str) -> None:
    attention = forward_by_lanes(EXAMPLE, blocks, order)
    first = np.array([7.20, 9.88, 6.08, 7.92])
    printed: Array = first[:, None] + np.arange(4)
    np.testing.assert_allclose(attention.out, printed, rtol=0, atol=0.0051)
    np.testing.assert_allclose(np.exp(attention.lse[:2]), [12.107, 12.107], rtol=0, atol=0.0005)
    dq, dk, dv, _, _ = backward_by_lanes(EXAMPLE, attention, blocks, order)
    by_key = np.array([0.590, 0.217, 0.976, 0.217])
    np.testing.assert_allclose(dv, np.repeat(by_key[:, None], 4, axis=1), rtol=0, atol=0.00051)
    printed = np.array([[-1.19, 1.18, 4.38, 1.91], [0] * 4, [-3.14, 3.14, 4.28, 3.72], [0] * 4])
    np.testing.assert_allclose(dq, printed, rtol=0, atol=0.0151)
    printed = np.zeros((4, 4))
    printed[:, 0], printed[:, 2] = [-12.99, -1.31, 8.66, 5.64], [-5.57, -0.73, 4.38, 1.91]
    np.testing.assert_allclose(dk, printed, rtol=0, atol=0.0151)
    check(EXAMPLE, blocks, (order, order))
