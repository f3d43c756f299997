"""How a persistent kernel's blocks are dealt out: held to a count of every tile, without a GPU."""

import ctypes
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests import fake_cupy
from tests.fake_cupy import Machine
from tileattn import BlockMask
from tileattn.algorithm.block_mask import EMPTY, FULL
from tileattn.algorithm.mask import SlidingWindow
from tileattn.algorithm.tiles import cut
from tileattn.backends import registry
from tileattn.kernels.config.hopper import HOPPER
from tileattn.kernels.launch import streams
from tileattn.kernels.launch.block_sparse import tile_kinds
from tileattn.kernels.launch.catalog import facts_of, problem_of
from tileattn.kernels.launch.schedule import START, TILE, Order, deal, order_of, parts_of, turns
from tileattn.kernels.launch.steps import Step, backward_steps, forward_steps
from tileattn.problem import Operands, Problem

FACTS = facts_of("sm_90a")._replace(processors=132)
CACHE = 50 << 20
CAUSAL = (None, 0)
LONG = replace(problem_of("float16", 128), B=2, Hq=12, Hkv=4, Nq=2100, Nk=2100)  # 408 blocks

Array = NDArray[Any]


def shaped(dtype: str, dim: int, **sizes: Any) -> Problem:
    return replace(problem_of(dtype, dim), **sizes)


def step_of(problem: Problem, processors: int = 132) -> Step:
    (step,) = forward_steps(problem, FACTS._replace(processors=processors))
    assert step.key.kernel == HOPPER
    return step


def operands_of(problem: Problem, lengths: Any = None, offsets: Any = None) -> Operands:
    """Lengths and offsets as validation gives them, and no arrays."""
    there = np.full(problem.B, problem.Nk) if lengths is None else lengths
    offsets = there - problem.Nq if offsets is None else offsets
    return Operands(None, None, None, there, offsets, {})


def order(
    problem: Problem, lengths: Any = None, offsets: Any = None, *, step: Step | None = None
) -> Order:
    operands = operands_of(problem, lengths, offsets)
    return order_of(problem, operands, (step or step_of(problem),), CACHE)


def works_of(blocks: int, heads: int, parts: int) -> list[tuple[int, int]]:
    """Block and head of each number in the order of the kernels."""
    return [
        (block, int(head))
        for part in np.array_split(np.arange(heads), parts)
        for block in range(blocks)
        for head in part
    ]


def costs_of(problem: Problem, operands: Operands, step: Step, parts: int) -> Array:
    """Cost of each number: every tile is looked at."""
    P, key = problem, step.key
    queries, keys = list(cut(P.Nq, key.block_q)), list(cut(P.Nk, key.block_k))
    if P.window[1] is not None:
        queries.reverse()

    mask = operands.block_mask
    size = key.block_q, key.block_k
    kinds = np.full((1, 1, 1, 1), FULL) if mask is None else tile_kinds(mask, size)
    kinds = np.broadcast_to(kinds[..., : len(keys)], (P.B, P.Hq, len(queries), len(keys)))

    @cache
    def reached(batch: int, block: int) -> Array:
        length, offset = int(operands.kv_lengths[batch]), int(operands.q_offset[batch])
        window = SlidingWindow(P.Nq, length, offset, *P.window)
        return np.array([window.kind(*queries[block], *tile) != EMPTY for tile in keys])

    def cost(batch: int, head: int, block: int) -> int:
        row = kinds[batch, head, queries[block][0] // key.block_q]
        return TILE * int((reached(batch, block) & (row != EMPTY)).sum()) + START

    works = works_of(len(queries), P.B * P.Hq, parts)
    return np.array([cost(*divmod(head, P.Hq), block) for block, head in works])


def loads_of(table: Array, costs: Array) -> Array:
    """Check that a table is one, and add up the costs of each column."""
    works = len(costs)
    dealt = table[table < works]
    assert np.array_equal(np.sort(dealt), np.arange(works))  # each of them once
    # Behind its works a column has the end only, and at least once.
    assert ((table >= 0) & (table <= works)).all()
    assert (np.diff((table == works).astype(int), axis=0) >= 0).all()
    assert (table[-1] == works).all()
    assert table.dtype == np.int32
    assert table.flags.c_contiguous
    padded = np.append(costs, 0)
    loads: Array = padded[table].sum(0)
    return loads


# --- the table ----------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_numbers_are_those_of_the_kernels(blocks: int, heads: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, heads))
    block, head, part = turns(blocks, heads, parts)
    assert list(zip(block, head, strict=True)) == works_of(blocks, heads, parts)
    firsts = [int(members[0]) for members in np.array_split(np.arange(heads), parts)]
    assert sorted(set(part.tolist())) == firsts
    assert all(max(f for f in firsts if f <= h) == p for h, p in zip(head, part, strict=True))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 9), st.randoms())
def test_who_is_free_takes_the_next(times: list[int], grid: int, random: Any) -> None:
    numbers = list(range(len(times)))
    random.shuffle(numbers)
    costs = np.array(times)
    table = deal(np.array(numbers), costs[numbers], grid)
    assert table.shape[1] == grid
    loads = loads_of(table, costs)
    assert loads.max() * grid <= loads.sum() + (grid - 1) * costs.max()
    begins = np.cumsum(np.vstack([np.zeros(grid, int), np.append(costs, 0)[table]]), axis=0)[:-1]
    when = {int(work): int(t) for work, t in zip(table.flat, begins.flat, strict=True)}
    starts = [when[n] for n in numbers]
    assert starts == sorted(starts)
    # Nobody begins while another could have begun before.
    assert max(starts) <= loads.min()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Any, Any]:
    b, hkv, group = (draw(st.integers(1, n)) for n in (3, 3, 2))
    nq, nk = draw(st.integers(1, 1400)), draw(st.integers(1, 1400))
    dim = draw(st.sampled_from([64, 128, 256]))
    sides = st.none() | st.integers(0, 600)
    lengths = st.lists(st.integers(0, nk), min_size=b, max_size=b)
    offsets = st.lists(st.integers(-2000, 2000), min_size=b, max_size=b)
    return (
        shaped(
            "float16",
            dim,
            B=b,
            Hq=group * hkv,
            Hkv=hkv,
            Nq=nq,
            Nk=nk,
            window=(draw(sides), draw(sides)),
        ),
        np.array(draw(lengths)),
        np.array(draw(offsets)),
    )


@given(problems(), st.integers(1, 8))
def test_the_table_of_any_problem(drawn: tuple[Problem, Any, Any], processors: int) -> None:
    problem, lengths, offsets = drawn
    step = step_of(problem, processors)
    found = order(problem, lengths, offsets, step=step)
    assert 1 <= found.parts <= problem.B * problem.Hkv
    costs = costs_of(problem, operands_of(problem, lengths, offsets), step, found.parts)
    differ = bool(costs.min() < costs.max())
    several = problem.Nq > step.key.block_q  # blocks of each head
    wanted = differ and several and processors < len(costs) <= 64 * processors
    assert (found.table is not None) == wanted
    if found.table is not None:
        loads = loads_of(found.table, costs)
        assert len(loads) == step.blocks == processors
        assert loads.max() * processors <= loads.sum() + (processors - 1) * costs.max()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
def test_multiprocessors_end_together(dim: int, length: int) -> None:
    heads = 2048 // dim
    sizes = {"B": 16384 // length, "Hq": heads, "Hkv": heads, "Nq": length, "Nk": length}
    problem = shaped("float16", dim, **sizes, window=CAUSAL)
    found, step = order(problem), step_of(problem)
    assert found.table is not None
    loads = loads_of(found.table, costs_of(problem, operands_of(problem), step, found.parts))
    assert loads.max() <= 1.06 * loads.mean()


@pytest.mark.parametrize(
    "problem",
    [
        LONG,
        replace(LONG, window=CAUSAL, Nq=128, Hq=80, Hkv=80),  # one block a head
        replace(LONG, window=CAUSAL, Nq=640),  # one turn
        replace(LONG, window=CAUSAL, B=1, Hq=132, Hkv=132, Nq=65 * 128, Nk=65 * 128),  # too many
    ],
    ids=["equal", "single", "turn", "many"],
)
def test_no_table_where_it_would_not_help(problem: Problem) -> None:
    assert order(problem).table is None


def test_the_most_turns_that_a_table_is_made_for() -> None:
    problem = replace(LONG, window=CAUSAL, B=1, Hq=132, Hkv=132, Nq=64 * 128, Nk=64 * 128)
    assert order(problem).table is not None


# --- what is long -------------------------------------------------------------------------------


def test_the_long_ones_of_a_part_begin() -> None:
    problem = replace(LONG, window=CAUSAL)
    found, operands = order(problem), operands_of(problem)
    assert (found.parts, found.table is not None) == (1, True)
    costs = costs_of(problem, operands, step_of(problem), 1)
    assert costs[0] == costs.max() > costs[-1] == costs.min()
    assert found.table is not None
    assert found.table[0].tolist() == list(range(132))


def test_entries_with_many_keys_begin() -> None:
    lengths = np.array([70, 2100])
    found = order(LONG, lengths)
    assert found.table is not None
    assert found.parts == 8
    blocks = -(-LONG.Nq // 128)
    assert (found.table[0] >= LONG.Hq * blocks).all()  # of the second entry
    costs = costs_of(LONG, operands_of(LONG, lengths), step_of(LONG), 8)
    loads = loads_of(found.table, costs)
    assert loads.max() - loads.min() <= costs.max()


def test_rows_that_see_nothing_cost_their_beginning_and_end() -> None:
    problem = replace(LONG, window=CAUSAL, Nk=300)  # aligned at the end: most rows see nothing
    found = order(problem)
    costs = costs_of(problem, operands_of(problem), step_of(problem), found.parts)
    assert costs.min() == START
    assert (costs == START).sum() > len(costs) // 2
    assert found.table is not None
    assert loads_of(found.table, costs).max() <= costs.sum() / 132 + START


def test_a_window_is_cut_at_its_ends() -> None:
    problem = replace(LONG, window=(300, 200))
    found = order(problem)
    costs = costs_of(problem, operands_of(problem), step_of(problem), found.parts)
    assert len(set(costs.tolist())) > 2
    assert found.table is not None
    assert loads_of(found.table, costs).max() < costs.sum() / 132 + costs.max()


@pytest.mark.parametrize("lead", [(1, 1), (1, 12), (2, 1), (2, 12)])
@pytest.mark.parametrize("window", [(None, None), CAUSAL])
def test_tiles_that_a_block_mask_skips_cost_nothing(lead: tuple[int, int], window: Any) -> None:
    """Some rows of blocks see much, and some little."""
    problem = replace(LONG, window=window)
    rng = np.random.default_rng(0)
    shown = rng.random((*lead, 17, 17)) < rng.random((*lead, 17, 1)) ** 3
    operands = operands_of(problem)._replace(block_mask=BlockMask(shown))
    step = step_of(problem)
    found = order_of(problem, operands, (step,), CACHE)
    costs = costs_of(problem, operands, step, found.parts)
    assert costs.min() == START
    assert found.table is not None
    assert loads_of(found.table, costs).max() <= costs.sum() / 132 + costs.max()


def test_what_is_on_the_gpu_is_guessed() -> None:
    """All keys, aligned at the end; a table that is made so holds every block, too."""
    problem, there = replace(LONG, window=CAUSAL, Nq=1900), object()
    lengths = np.array([2100, 900])

    def table(*given: Any) -> Array:
        found = order(problem, *given).table
        assert found is not None
        return found

    assert np.array_equal(table(there, there), table())
    assert np.array_equal(table(lengths, there), table(lengths, lengths - 1900))
    assert not np.array_equal(table(lengths), table())


# --- the parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "room", "expected"),
    [
        ((None, None), 1 << 21, 24),  # blocks of one length: each head by itself
        ((5, 0), 1 << 21, 24),
        ((None, 0), 1 << 21, 3),  # 256 KiB of keys and values a head: room for eight
        ((None, 7), 1 << 21, 3),
        ((None, 0), 1 << 19, 12),
        ((None, 0), 1, 24),
        ((None, 0), 1 << 30, 1),
    ],
)
def test_long_blocks_of_many_heads_go_first(
    window: tuple[int | None, int | None], room: int, expected: int
) -> None:
    problem = shaped("float32", 64, B=6, Hq=8, Hkv=4, Nq=512, Nk=512, window=window)
    assert parts_of(problem, room) == expected


def test_the_room_for_a_part() -> None:
    """Half of the cache for the persistent kernel; for the backward pass, a quarter of twice it."""
    cache = 8 << 20  # and a MiB a head
    problem = shaped("float16", 128, B=3, Hq=16, Hkv=16, Nq=2048, Nk=2048, window=CAUSAL)
    portable = FACTS._replace(arch="sm_80")
    both = {"deterministic": False, "sinks": False}
    for steps, expected in (
        (forward_steps(problem, FACTS), 12),
        (forward_steps(problem, portable), 3),
        (backward_steps(problem, portable, **both), 12),
    ):
        found = order_of(problem, operands_of(problem), steps, cache)
        assert found.parts == expected
        assert (found.table is not None) == (steps[0].key.kernel == HOPPER)


def test_nothing_to_start_has_an_order() -> None:
    problem = replace(LONG, Nq=0)
    assert order_of(problem, operands_of(problem), (), CACHE) == Order(8)


# --- what the kernel is given -------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cupy.machine(monkeypatch) as made:
        made.arch = "sm_90a"
        yield made


def arrays(gpu: Machine) -> tuple[Any, Any, Any]:
    q, k, v = (gpu.array((1, heads, 2200, 8), np.float16) for heads in (12, 2, 2))
    return q, k, v  # 144 blocks of 192 queries


def schedules(gpu: Machine) -> list[int]:
    return [int(params["schedule"]) for *_, params in gpu.launches]


def test_the_table_is_copied_once(gpu: Machine) -> None:
    given = arrays(gpu)
    for _ in range(3):
        tileattn.forward(*given, causal=True)
    (table,) = gpu.uploads
    assert schedules(gpu) == 3 * [table.data.ptr]
    problem = shaped("float16", 8, B=1, Hq=12, Hkv=2, Nq=2200, Nk=2200, window=CAUSAL)
    expected = order(problem)
    assert expected.table is not None
    there = (ctypes.c_int32 * expected.table.size).from_address(table.data.ptr)
    assert list(there) == expected.table.ravel().tolist()
    assert {int(params["parts"]) for *_, params in gpu.launches} == {expected.parts}


def test_lengths_make_a_table_of_their_own(gpu: Machine) -> None:
    given = arrays(gpu)
    for length in (2200, 1500, 1500):
        tileattn.forward(*given, causal=True, kv_lengths=[length])
    assert len(gpu.uploads) == 2
    assert schedules(gpu) == [gpu.uploads[n].data.ptr for n in (0, 1, 1)]


def test_explain_says_so(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda _: {"name": b"H200"})
    given = arrays(gpu)
    clause = "blocks of queries of different length are dealt out in advance, in 2 turns"
    assert clause in tileattn.explain(*given, causal=True).reasons
    assert not any("dealt" in reason for reason in tileattn.explain(*given).reasons)
    assert gpu.uploads == []


@pytest.mark.parametrize("kernel", [HOPPER, "forward"])
def test_others_have_no_table(gpu: Machine, kernel: str) -> None:
    given = arrays(gpu)
    gpu.arch = "sm_90a" if kernel == HOPPER else "sm_80"
    attention = tileattn.forward(*given, causal=kernel != HOPPER)
    tileattn.backward(attention.out, *given, *attention, causal=True)
    assert gpu.launches[0][0].kernel == kernel
    assert set(schedules(gpu)) == {0}
    assert gpu.uploads == []


def test_a_first_call_in_a_capture_does_without(gpu: Machine) -> None:
    """Also where it would have been repeated: the calls after the capture have their table."""
    given = arrays(gpu)
    gpu.capturing = True
    for _ in range(2):
        tileattn.forward(*given, causal=True)
    gpu.capturing = False
    for _ in range(2):
        tileattn.forward(*given, causal=True)
    (table,) = gpu.uploads
    assert schedules(gpu) == [0, 0, table.data.ptr, table.data.ptr]


def test_equal_blocks_are_remembered_from_a_capture(gpu: Machine) -> None:
    given = arrays(gpu)
    gpu.capturing = True
    tileattn.forward(*given)
    (known,) = registry.KNOWN.values()
    assert "repeat" in known.memo


@pytest.mark.parametrize(("captured", "stream"), [(False, 0), (True, 0), (False, 7)])
def test_a_graph_and_another_stream_keep_the_table(
    gpu: Machine, captured: bool, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they may read it, what a plan owns outlives the plan's place in the memo."""
    monkeypatch.setattr(streams, "_kept", {})
    given = arrays(gpu)
    for _ in range(2):  # the second one is a repeat
        tileattn.forward(*given, causal=True)
        gpu.capturing, gpu.stream = captured, stream
    table = weakref.ref(gpu.uploads.pop())
    registry.KNOWN.clear()
    gc.collect()
    assert (table() is not None) == (captured or stream > 0)
