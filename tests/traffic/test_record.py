"""The NumPy backend loads and stores what is counted and modelled."""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tileattn
from tileattn import BlockMask
from tileattn.algorithm import spec
from tileattn.algorithm.heads import Array, head_groups
from tileattn.algorithm.residuals import has_large_lse
from tileattn.backends import threads
from tileattn.backends.numpy.backend import NumpyBackend, Workers
from tileattn.backends.numpy.memory import Scratch, TileMemory
from tileattn.call.parse import parse
from tileattn.call.problem import Operands, Problem
from tileattn.testing import AttentionCase, problems
from tileattn.testing.options import DRAW
from tileattn.traffic import Traffic, counted, modelled, recorded

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Call = tuple[Array, Array, Array, dict[str, Any]]


def without_zeros(traffic: Traffic) -> tuple[dict[str, tuple[int, int]], ...]:
    """Reads and writes with sizes; an array that is never touched counts as absent."""
    reads, writes, sizes = traffic
    return tuple(
        {name: (n, sizes[name]) for name, n in counts.items() if n} for counts in (reads, writes)
    )


def made(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@st.composite
def calls(draw: st.DrawFn, sparse: bool, tile: tuple[int, int] | None = None) -> Call:
    """Draw arrays with a window, or with a mask whose blocks are the tile."""
    B, Hq, Hkv = draw(st.sampled_from([(1, 1, 1), (2, 6, 2), (1, 6, 1)]))
    D, Dv = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    options: dict[str, Any] = {}
    if sparse and tile is not None:
        counts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        by_head = draw(st.booleans())
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        blocks = rng.random((B, Hq if by_head else 1, *counts)) < draw(st.floats(0, 1))
        blocks[:, :, 0] = True
        options["block_mask"] = BlockMask(blocks, tile)
        Nq, Nk = (n * block for n, block in zip(counts, tile, strict=True))
    else:
        Nq, Nk = draw(st.integers(0, 40)), draw(st.integers(0, 40))
        side = st.none() | st.integers(0, 50)
        options["window"] = draw(st.none() | st.tuples(side, side))
        options["causal"] = draw(st.booleans())
    shapes = (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)
    q, k, v = (made(shape, dtype) for shape in shapes)
    return q, k, v, options


tiles = st.tuples(st.integers(1, 30), st.integers(1, 30))
cases = st.tuples(tiles, st.booleans()).flatmap(
    lambda drawn: st.tuples(st.just(drawn[0]), calls(drawn[1], drawn[0]))
)


def shared(problem: Problem, operands: Operands) -> int:
    """Query heads of a group that one head group holds: they share loads of k and v."""
    return max(int(heads.q.shape[1]) for heads in head_groups(problem, operands))


def check(
    found: Traffic, call: tuple[Problem, Operands], tile: tuple[int, int], *which: Any
) -> None:
    problem, operands = call
    algorithm, kind, heads_per_load = which
    assert without_zeros(found) == without_zeros(
        counted(problem, operands, tile, algorithm, kind, heads_per_load)
    )
    mask = operands.block_mask
    density = None if mask is None else mask.density
    assert without_zeros(found) == without_zeros(
        modelled(problem, tile, algorithm, kind, density, heads_per_load)
    )


OPTIONS = [name for name in DRAW if name != "invariant"]  # its tiles are whole


@settings(max_examples=60)
@given(problems(max_length=30, options=OPTIONS), tiles)
def test_any_call_moves_what_is_counted(case: AttentionCase, tile: tuple[int, int]) -> None:
    """All options: lengths, offsets, biases that are summed over heads, blocks of any size."""
    problem, operands = parse(case.q, case.k, case.v, case.options)
    backend = NumpyBackend(tile, tile)
    dout = case.dout.reshape((problem.B, problem.Hq, problem.Nq, problem.Dv))
    with recorded() as forward:
        attention = backend.forward(problem, operands, None)
    with recorded() as backward:
        backend.backward(problem, operands, dout, attention, None, False)
    loads = max((heads.q.shape[1] for heads in head_groups(problem, operands)), default=1)
    for found, kind, heads in (
        (forward, "forward", loads),
        (backward, "backward", problem.group),
    ):
        expected = counted(problem, operands, tile, "flash2", kind, max(heads, 1))
        if kind == "backward" and has_large_lse(attention.lse, problem.dtype).any():
            for name in ("q", "k", "lse"):  # that of some rows is computed again
                assert found.reads.pop(name, 0) >= expected.reads.pop(name, 0)
        assert without_zeros(found) == without_zeros(expected)


def test_a_tall_tile_that_is_cut_in_two_moves_what_is_counted() -> None:
    q, k, v = (made((1, 1, 600, 4), np.float32) for _ in range(3))
    problem, operands = parse(q, k, v, {"causal": True})
    with recorded() as found:
        NumpyBackend((300, 100)).forward(problem, operands, None)
    assert found.moved == counted(problem, operands, (300, 100)).moved


@pytest.mark.parametrize("window", [(None, None), (70, 0), (30, 9)])
def test_an_invariant_call_moves_what_rows_of_one_query_do(
    window: tuple[int | None, int | None],
) -> None:
    q, k, v = made((2, 6, 90, 4), np.float32), *(made((2, 2, 110, 4), np.float32) for _ in "kv")
    problem, operands = parse(q, k, v, {"invariant": True, "window": window})
    with recorded() as found:
        NumpyBackend((30, 32)).forward(problem, operands, None)
    assert found.moved == counted(problem, operands, (1, 32), heads_per_load=3).moved


@settings(max_examples=100)
@given(cases, st.sampled_from([("q", "flash2"), ("kv", "flash1")]))
def test_both_outer_loops_of_the_specification(
    case: tuple[tuple[int, int], Call], order: tuple[str, str]
) -> None:
    tile, (q, k, v, options) = case
    call = parse(q, k, v, options)
    with recorded() as found:
        spec.forward(*call, tile, Workers(call[0]), outer_loop=order[0])
    if order[0] == "kv" and "out" in found.sizes:  # a sum, which is rounded and stored at the end
        rounded = call[0].B * call[0].Hq * call[0].Nq
        found.writes["out"] -= rounded * call[0].Dv
        del found.writes["lse"], found.sizes["lse"]
        found.sizes["out"] = call[0].accum_dtype.itemsize
    check(found, call, tile, order[1], "forward", shared(*call))


@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_a_group_share_loads_of_keys(causal: bool) -> None:
    """The forward pass with its own tiles: several heads of a group in a task, on all workers."""
    q, k, v = (made((1, heads, 700, 16), np.float32) for heads in (6, 2, 2))
    call = problem, operands = parse(q, k, v, {"causal": causal})
    backend = NumpyBackend()
    together, tile = backend._forward_tile(problem)
    with recorded() as found:
        tileattn.forward(q, k, v, causal=causal, backend="numpy")
    heads_per_load = max(heads.q.shape[1] for heads in head_groups(problem, operands, together))
    assert heads_per_load == (3 if causal else 1)
    check(found, call, tile, "flash2", "forward", heads_per_load)


# --- whose calls are recorded -------------------------------------------------------------------

X = made((1, 2, 60, 8), np.float32)
forward = partial(tileattn.forward, backend="numpy")


def test_nothing_is_recorded_outside_the_block() -> None:
    with recorded() as found:
        pass
    forward(X, X, X)
    assert found == Traffic({}, {}, {})
    with pytest.raises(RuntimeError, match="stop"), recorded() as found:
        raise RuntimeError("stop")
    forward(X, X, X)
    assert found.elements == found.nbytes == 0


def test_calls_add_up_and_the_inner_block_counts() -> None:
    with recorded() as outer:
        forward(X, X, X)
        with recorded() as inner:
            forward(X, X, X)
        forward(X, X, X)
    assert outer.nbytes == 2 * inner.nbytes > 0


def test_workers_are_recorded_and_other_threads_are_not() -> None:
    """A load on each worker at the same time, while a thread of the caller's loads as well."""
    barrier = threading.Barrier(min(threads.worker_count(), 2))

    def task() -> None:
        memory = TileMemory(X.dtype, Scratch(), {})
        barrier.wait()
        for _ in range(500):
            for name in "kv":
                memory.load(name, X)

    stranger = threading.Thread(target=forward, args=(X, X, X))
    with recorded() as found:
        stranger.start()
        threads.run([task] * barrier.parties)
        stranger.join()
    assert found.reads == dict.fromkeys("kv", 500 * barrier.parties * X.size)
