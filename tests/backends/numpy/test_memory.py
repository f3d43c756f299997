"""The NumPy backend's shortcuts: scores that need no maximum, and one more column in products."""

import math
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tileattn import reference
from tileattn.algorithm.heads import HeadGroup, head_groups
from tileattn.algorithm.memory import Memory, RowConstant
from tileattn.backends.numpy import blas
from tileattn.backends.numpy.backend import NumpyBackend, Workers
from tileattn.backends.numpy.memory import Scratch, TileMemory
from tileattn.backends.numpy.small_scores import has_small_scores
from tileattn.call.parse import parse
from tileattn.testing import AttentionCase, assert_attention_close, error_bound

Array = NDArray[Any]


# --- small scores -------------------------------------------------------------------------------


def check(case: AttentionCase) -> None:
    """Compare the NumPy backend, in tiles of 64 x 100, with the oracle."""
    q, k, v, dout, _, options = case
    backend, (problem, operands) = NumpyBackend((64, 100), (64, 100)), parse(q, k, v, options)
    attention = backend.forward(problem, operands, None)
    bounds = error_bound(q, k, v, dout, **options)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    actual = backend.backward(problem, operands, dout, attention, None, False)
    assert_attention_close(actual, reference.backward(dout, q, k, v, **options), bounds)


def one_head(scale_of_q: float = 1.0, **options: Any) -> tuple[HeadGroup, AttentionCase]:
    """Make a problem of one head that is long enough for its norms to be looked at."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 300, 6)).astype(np.float32)
    v, dout = rng.normal(size=(2, 1, 1, 300, 8)).astype(np.float32)
    case = AttentionCase(q * np.float32(scale_of_q), k, v, dout, None, options)
    return next(head_groups(*parse(*case[:3], options))), case


def test_small_scores_need_no_maximum() -> None:
    heads, case = one_head(causal=True)
    assert has_small_scores(heads) is True
    check(case)
    memory = TileMemory(heads.dtype, Scratch(), {})
    assert not memory.row_state(heads, 3).m.any()


@pytest.mark.parametrize("large", [30.0, 1e4, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("where", ["q", "v"])
def test_large_scores_and_values_need_a_maximum(where: str, large: float) -> None:
    """Without one their exponentials, or products of those, would overflow."""
    if where == "v" and large < 1e30:
        large = -math.inf
    heads, case = one_head()
    array = heads.q if where == "q" else heads.kv.values(slice(None))
    with np.errstate(all="ignore"):
        array[0, 0, 7] *= large
        assert not has_small_scores(heads)
    if large < 1e30 and where == "q":
        check(case)


def test_what_is_masked_out_does_not_decide() -> None:
    """Queries 0 to 49 attend to no key; keys from 200 on are past the length."""
    heads, _ = one_head(kv_lengths=200, causal=True, q_offset=-50)
    heads.q[:, :, :50] = math.nan
    heads.kv.keys(slice(200, None))[...] = math.inf
    heads.kv.values(slice(200, None))[...] = 1e38
    assert has_small_scores(heads)
    heads, _ = one_head(kv_lengths=200, causal=True, q_offset=-50)
    heads.kv.keys(slice(199, 200))[...] = math.inf
    assert not has_small_scores(heads)


# --- one BLAS thread ----------------------------------------------------------------------------


@pytest.mark.skipif(not blas._libraries(of_thread=False), reason="BLAS has no number of threads")
def test_a_small_problem_runs_here_with_one_blas_thread() -> None:
    q, k, v = np.ones((3, 1, 1, 5, 4))
    problem, _ = parse(q, k, v, {})
    (library, *_), found = blas._libraries(of_thread=False), []
    before = library.get_num_threads()
    library.set_num_threads(2)
    try:

        def task(_: Memory) -> None:
            found.append((library.get_num_threads(), threading.current_thread()))

        Workers(problem).compute(lambda executor: executor.run([task, task]))
        assert found == [(1, threading.current_thread())] * 2
        assert library.get_num_threads() == 2
    finally:
        library.set_num_threads(before)


# --- loads and products -------------------------------------------------------------------------


@pytest.mark.parametrize("low", [None, [True, False], [True, True]], ids=str)
@pytest.mark.parametrize("between", [None, np.tanh], ids=str)
def test_products_subtract_what_those_of_the_specification_do(low: Any, between: Any) -> None:
    """A head without low words has the same bits as alone."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 1, 5, 4)), rng.normal(size=(2, 1, 7, 4))
    high, words = rng.normal(size=(2, 1, 5)), rng.normal(size=(2, 1, 5))
    split = np.array(low or [False] * 2).reshape(2, 1, 1, 1)
    words = np.where(split[..., 0], words, 0.0)
    modify = None if between is None else lambda s: between(s, out=s)

    def product(memory: Memory, heads: slice = slice(None)) -> Array:
        constant = RowConstant("lse", high[heads])
        if split[heads].any():
            constant = RowConstant("lse", high[heads], words[heads], split[heads])
        left = memory.load_left("q", a[heads], constant, 0.5)
        right = memory.load_right("k", b[heads]).rows(slice(1, 6))
        return memory.matmul_minus("s", left, right, modify).copy()

    fast = product(TileMemory(a.dtype, Scratch(), {}))
    # A sum of n terms is off by at most n - 1 roundings of the sum of their sizes; tanh shrinks it.
    size = np.abs(a / 2) @ np.abs(b[:, :, 1:6]).swapaxes(-1, -2) + np.abs(high)[..., None]
    size += np.abs(words)[..., None]
    terms = a.shape[-1] + 2
    assert (
        np.abs(fast - product(Memory(a.dtype))) <= 2 * terms * np.finfo(a.dtype).eps * size
    ).all()
    if low == [True, False] and between is None:
        alone = product(TileMemory(a.dtype, Scratch(), {}), slice(1, 2))
        np.testing.assert_array_equal(fast[1:], alone)
