"""The specification against the oracle, for any block sizes and outer loop; a worked example."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import example
from tileattn import Attention, Gradients, reference
from tileattn.algorithm import spec
from tileattn.algorithm.heads import head_groups
from tileattn.algorithm.mask import schedule
from tileattn.algorithm.memory import Executor, Memory
from tileattn.algorithm.residuals import Residuals
from tileattn.algorithm.softmax import RowState
from tileattn.call.parse import parse
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]

Blocks = tuple[int, int]

ROUNDING = 4 * np.finfo(np.float64).eps  # of sums of up to four terms, worked out by hand


def forward(case: AttentionCase, blocks: Blocks, outer_loop: str = "q") -> Attention:
    """Run ``spec.forward`` in the plainest fast memory."""
    P, operands = parse(case.q, case.k, case.v, case.options)
    executor = Executor(P.accum_dtype)
    out, lse = spec.forward(P, operands, blocks, executor, outer_loop=outer_loop)
    return Attention(out.reshape(P.out_shape), lse.reshape(P.out_shape[:-1]))


def backward(case: AttentionCase, attention: Attention, blocks: Blocks) -> Gradients:
    """Run ``spec.backward`` in the plainest fast memory."""
    P, operands = parse(case.q, case.k, case.v, case.options)
    rows = (P.B, P.Hq, P.Nq)
    saved = Attention(attention.out.reshape(*rows, P.Dv), attention.lse.reshape(rows))
    dlse = None if case.dlse is None else case.dlse.reshape(rows)
    dout, executor = case.dout.reshape(saved.out.shape), Executor(P.accum_dtype)
    found = spec.backward(P, operands, dout, saved, dlse, blocks, executor)
    dq, dk, dv, dbias, dsinks = found
    dbias = None if dbias is None else dbias.reshape(case.options["bias"].shape)
    dq, dk, dv = (x.reshape(given.shape) for x, given in zip((dq, dk, dv), case[:3], strict=True))
    return Gradients(dq, dk, dv, dbias, dsinks)


def check(case: AttentionCase, blocks: Blocks, outer_loop: str = "q") -> None:
    q, k, v, dout, dlse, options = case
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    attention = forward(case, blocks, outer_loop)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    actual = backward(case, attention, blocks)
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(actual, expected, bounds)


@settings(max_examples=60)
@given(
    problems(max_length=30),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(["q", "kv"]),
)
def test_any_block_sizes_and_either_outer_loop(
    case: AttentionCase, blocks: Blocks, outer_loop: str
) -> None:
    check(case, blocks, outer_loop)


def test_another_outer_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="outer_loop must be 'q' or 'kv'; got 'query'"):
        forward(EXAMPLE, (2, 2), "query")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("options", [{}, {"softcap": 500.0}, {"bias": np.ones((30, 1))}], ids=str)
def test_both_passes_have_the_same_probabilities(dtype: Any, options: dict[str, Any]) -> None:
    """The scale is rounded into q in both, and scores of some 1e3 show the rounding of any other.

    Where v and dout are identity matrices, out is P and dv is P transposed.
    """
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 30, 48)) * 30
    v = dout = np.eye(30)[None, None].astype(dtype)
    case = AttentionCase(q.astype(dtype), k.astype(dtype), v, dout, None, {"scale": 0.3, **options})
    attention = forward(case, (30, 30))
    dv = backward(case, attention, (30, 30)).dv
    bound = error_bound(0 * case.q, 0 * case.k, v, dout)["dv"]
    assert np.linalg.norm((dv.swapaxes(2, 3) - attention.out).astype(np.float64)) <= bound.error


# --- groups of heads ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("Hq", "Hkv", "Nq", "Nk", "sizes"),
    [
        (6, 3, 5, 7, [(3, 2)]),
        (6, 3, 128, 128, [(2, 2), (1, 2)]),
        (6, 1, 128, 128, [(1, 4), (1, 2)]),
        (6, 3, 300, 300, [(1, 1)] * 6),
    ],
)
def test_every_head_is_in_one_group(
    Hq: int, Hkv: int, Nq: int, Nk: int, sizes: list[tuple[int, int]]
) -> None:
    q, k, v = np.ones((2, Hq, Nq, 2)), np.ones((2, Hkv, Nk, 2)), np.ones((2, Hkv, Nk, 3))
    found = list(head_groups(*parse(q, k, v, {})))
    assert [heads.q.shape[:2] for heads in found] == sizes * 2
    pairs = [(x.batch, h) for x in found for h in range(x.q_heads.start, x.q_heads.stop)]
    assert pairs == [(b, h) for b in range(2) for h in range(Hq)]
    for heads in found:
        assert heads.kv_head == heads.q_heads.start // (Hq // Hkv)
        assert np.shares_memory(heads.q, q)
        assert np.shares_memory(heads.kv.keys(slice(None)), k)


# --- the worked example of four tokens ----------------------------------------------------------

EXAMPLE = AttentionCase(example.Q, example.K, example.V, example.DOUT, None, {"scale": 1.0})

# The example carries three digits from step to step, hence more than half a unit in the last place.
SUMS, WEIGHTS = 0.00061, 0.0101


def trace() -> list[RowState]:
    """Return the state of the rows of each tile, after it, in tiles of 2 x 2."""
    heads = next(head_groups(*parse(*EXAMPLE[:3], EXAMPLE.options)))
    memory = Memory(heads.dtype)
    state = memory.row_state(heads, 4)
    after = []
    for tile in schedule(heads.mask, 2, 2):
        q = memory.load("q", heads.q[..., tile.queries, :], heads.scale)
        k = memory.load("k", heads.kv.keys(tile.keys))
        v = memory.load("v", heads.kv.values(tile.keys))
        rows = state.rows(tile.queries)
        spec.update_tile(heads, rows, q, k, v, tile, memory)
        after.append(RowState(rows.m[0, 0].copy(), rows.l[0, 0].copy(), rows.acc[0, 0].copy()))
    return after


def test_example_first_tile() -> None:
    first = trace()[0]
    np.testing.assert_array_equal(first.m, [1, 1])
    np.testing.assert_allclose(first.l, [1.368, 1.368], rtol=0, atol=SUMS)
    np.testing.assert_allclose(first.l, 1 + math.exp(-1), rtol=ROUNDING)
    printed = [[2.84, 4.21, 5.57, 6.94], [5.37, 6.74, 8.10, 9.47]]
    np.testing.assert_allclose(first.acc, printed, rtol=0, atol=WEIGHTS)
    weights = np.array([[1, math.exp(-1)], [math.exp(-1), 1]])
    np.testing.assert_allclose(first.acc, weights @ example.V[:2], rtol=ROUNDING)


def test_example_second_tile_rescales_the_first() -> None:
    second = trace()[1]
    np.testing.assert_array_equal(second.m, [2, 2])
    np.testing.assert_allclose(second.l, [1.638, 1.638], rtol=0, atol=SUMS)
    e1, e2 = math.exp(-1), math.exp(-2)
    np.testing.assert_allclose(second.l, (1 + e1) * e1 + 1 + e2, rtol=ROUNDING)
    printed = [[11.81, 13.44, 15.08, 16.71], [16.20, 17.83, 19.47, 21.10]]
    np.testing.assert_allclose(second.acc, printed, rtol=0, atol=WEIGHTS)
    weights = np.array([[e1, e2, 1, e2], [e2, e1, e2, 1]])
    np.testing.assert_allclose(second.acc, weights @ example.V, rtol=ROUNDING)


def test_example_lower_tiles() -> None:
    """The maximum stays at 1, so the fourth tile adds to the third without rescaling."""
    third, fourth = trace()[2:]
    np.testing.assert_array_equal(third.m, [1, 1])
    np.testing.assert_array_equal(fourth.m, [1, 1])
    np.testing.assert_allclose(fourth.l, 2 * third.l, rtol=ROUNDING)
    np.testing.assert_allclose(third.l, 1 + math.exp(-1), rtol=ROUNDING)


@pytest.mark.parametrize("outer_loop", ["q", "kv"])
@pytest.mark.parametrize("blocks", [(1, 1), (2, 2), (1, 4), (3, 2), (4, 4)])
def test_example_results(blocks: Blocks, outer_loop: str) -> None:
    attention = forward(EXAMPLE, blocks, outer_loop)
    example.check_example(attention, backward(EXAMPLE, attention, blocks))
    check(EXAMPLE, blocks, outer_loop)


# --- rows with large scores ---------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.95])
def test_rounding_explains_as_much_with_dropout(dropout_p: float) -> None:
    """Products of 1e4 cancel to scores of some 30, so that rounding of them shows in every lse."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 40, 8)).astype(np.float32)
    q[..., 0], k[..., 0], k[..., 1] = 1e2, 1e2, -1e2
    q[..., 1], q[..., 2], k[..., 2] = 1e2, 6, 5
    options = {"scale": 1.0, "dropout_p": dropout_p, "seed": 3}
    P, operands = parse(q, k, k, options)
    executor = Executor(P.accum_dtype)
    lse = spec.forward(P, operands, (8, 8), executor).lse
    off = np.float32(np.finfo(np.float32).eps * math.sqrt(8) * 1e4)
    saved = Residuals.saved(P, q, lse + off)
    assert saved.large.all()
    (heads,) = head_groups(P, operands)
    for block in saved.blocks_of_large_rows([heads], (8, 8)):
        spec.renormalise(*block, saved, Memory(heads.dtype))
    restored = np.abs(saved.lse + saved.log_l - lse)
    assert (restored < off / 2).all()  # nearer the logsumexp of these keys than what was saved
