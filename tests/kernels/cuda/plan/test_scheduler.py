"""The tile scheduler of persistent kernels, tested against a count of every tile; no GPU."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.cuda.plan.assigned import ends_of, loads_of
from tests.kernels.cuda.plan.planning import H200
from tests.kernels.cuda.plan.schedules import (
    CAUSAL,
    ON_GPU,
    launch_of,
    layout_of,
    schedule,
    shaped,
)
from tileattn import BlockMask
from tileattn.algorithm.mask import SlidingWindow
from tileattn.algorithm.tiles import cut
from tileattn.call.block_mask import EMPTY, FULL
from tileattn.call.problem import Problem, problem_of
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.plan.assignment import TPC, work_tiles
from tileattn.kernels.cuda.plan.block_sparse import tile_kinds
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.scheduler import schedule_of
from tileattn.kernels.cuda.tuning import DEFAULT

TILE_COST, START_COST = DEFAULT.tile_cost, DEFAULT.work_tile_cost
LONG = replace(problem_of("float16", 128), B=2, Hq=12, Hkv=4, Nq=2100, Nk=2100)  # 408 blocks

Array = NDArray[Any]


def works_of(blocks: int, heads: int, parts: int) -> list[tuple[int, int]]:
    """Block and head of each number in the order of the kernels."""
    return [
        (block, int(head))
        for part in np.array_split(np.arange(heads), parts)
        for block in range(blocks)
        for head in part
    ]


def costs_of(problem: Problem, layout: CallLayout, launch: KernelLaunch, groups: int) -> Array:
    """Cost of each number: every tile is looked at."""
    P, key = problem, launch.key
    queries, keys = list(cut(P.Nq, key.block_q)), list(cut(P.Nk, key.block_k))
    if P.window[1] is not None:
        queries.reverse()

    mask = layout.block_mask
    size = key.block_q, key.block_k
    kinds = np.full((1, 1, 1, 1), FULL) if mask is None else tile_kinds(mask, size)
    kinds = np.broadcast_to(
        kinds[..., : len(queries), : len(keys)], (P.B, P.Hq, len(queries), len(keys))
    )

    assert layout.kv_lengths is not None
    assert layout.q_offset is not None
    places = list(zip(layout.kv_lengths, layout.q_offset, strict=True))

    @cache
    def reached(batch: int, block: int) -> Array:
        window = SlidingWindow(P.Nq, *places[batch], *P.window)
        return np.array([window.kind(*queries[block], *tile) != EMPTY for tile in keys])

    def cost(batch: int, head: int, block: int) -> int:
        row = kinds[batch, head, queries[block][0] // key.block_q]
        return TILE_COST * int((reached(batch, block) & (row != EMPTY)).sum()) + START_COST

    works = works_of(len(queries), P.B * P.Hq, groups)
    return np.array([cost(*divmod(head, P.Hq), block) for block, head in works])


# --- the table ----------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_numbers_are_those_of_the_kernels(blocks: int, heads: int, data: st.DataObject) -> None:
    """Claimed in order, a head has its blocks in order: none waits for one that is not claimed."""
    parts = data.draw(st.integers(1, heads))
    block, head, part = work_tiles(blocks, heads, parts)
    assert list(zip(block, head, strict=True)) == works_of(blocks, heads, parts)
    firsts = [int(members[0]) for members in np.array_split(np.arange(heads), parts)]
    assert sorted(set(part.tolist())) == firsts
    assert all(max(f for f in firsts if f <= h) == p for h, p in zip(head, part, strict=True))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Any, Any]:
    b, hkv, group = (draw(st.integers(1, n)) for n in (3, 3, 2))
    nq, nk = (
        draw(st.integers(65, 1400)),
        draw(st.integers(1, 1400)),
    )  # not so few that keys are split
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
def test_the_table_of_any_problem(drawn: tuple[Problem, Any, Any], sm_count: int) -> None:
    problem, lengths, offsets = drawn
    launch = launch_of(problem, sm_count)
    found = schedule(problem, lengths, offsets, launch=launch)
    assert 1 <= found.head_groups <= problem.B * problem.Hkv
    costs = costs_of(problem, layout_of(problem, lengths, offsets), launch, found.head_groups)
    assert found.dynamic_tiles in (0, len(costs))
    if found.assignment is None:
        return
    assert not found.dynamic_tiles
    loads = loads_of(found.assignment, costs)
    assert len(loads) == launch.workers
    # Graham's bound of list scheduling, for single workers or for the two SMs of a TPC in step: the
    # longest is at most one tile above the mean of the others.
    steps = np.append(costs, 0)[found.assignment]

    def is_bounded(team: int) -> bool:
        ends = steps.reshape(len(steps), -1, team).max(2).sum(0)
        return bool(ends.max() * len(ends) <= ends.sum() + (len(ends) - 1) * costs.max())

    assert is_bounded(1) or (sm_count % TPC == 0 and is_bounded(TPC))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("length", [4096, 8192, 16384])
def test_sms_end_together(dim: int, length: int) -> None:
    heads = 2048 // dim
    sizes = {"B": 16384 // length, "Hq": heads, "Hkv": heads, "Nq": length, "Nk": length}
    problem = shaped("float16", dim, **sizes, window=CAUSAL)
    found, launch = schedule(problem), launch_of(problem)
    assert found.assignment is not None
    costs = costs_of(problem, layout_of(problem), launch, found.head_groups)
    ends = ends_of(loads_of(found.assignment, costs), launch.workers)
    tiles = 6 if launch.key.tile == (192, 64) else 3  # of half as many keys
    assert ends.max() <= ends.mean() + min(tiles * TILE_COST, 0.025 * ends.mean())


TALL = replace(problem_of("float16", 64), Hq=16, Hkv=16, Nq=6145, Nk=6145)  # 33 blocks of 192


@pytest.mark.parametrize("window", [(None, None), CAUSAL])
@pytest.mark.parametrize("lengths", [None, np.array([6000])])
def test_the_last_tall_tiles_go_to_late_thread_blocks(window: Any, lengths: Any) -> None:
    """A sixteenth of the work at most, and nearly that; each is among the shortest of its group."""
    problem, launch = replace(TALL, window=window), launch_of(TALL)
    found = schedule(problem, lengths, launch=launch)
    assert found.assignment is not None
    costs = costs_of(problem, layout_of(problem, lengths), launch, found.head_groups)
    loads = loads_of(found.assignment, costs)
    late = found.assignment[0, launch.workers :]
    share = costs.sum() / 16
    assert share - costs.max() < costs[late].sum() <= share
    assert costs[late].tolist() == loads[launch.workers :].tolist()
    assert costs[late].max() <= np.median(costs)


# --- what is long -------------------------------------------------------------------------------


def test_entries_with_many_keys_begin() -> None:
    lengths = np.array([70, 2100])
    found = schedule(LONG, lengths)
    assert found.assignment is not None
    assert found.head_groups == 8
    blocks = -(-LONG.Nq // launch_of(LONG).key.block_q)
    assert (found.assignment[0] >= LONG.Hq * blocks).all()  # of the second entry
    costs = costs_of(LONG, layout_of(LONG, lengths), launch_of(LONG), 8)
    loads = loads_of(found.assignment, costs)
    assert loads.max() - loads.min() <= costs.max()


RNG = np.random.default_rng(0)
SHOWN = [  # some rows of blocks are attended to by many, and some by few
    BlockMask(RNG.random((*lead, rows, 17)) < RNG.random((*lead, rows, 1)) ** 3, (size, 128))
    for lead in ((1, 1), (1, 12), (2, 1), (2, 12))
    for rows, size in ((17, 128), (9, 256))  # which reach beyond the queries
]


@pytest.mark.parametrize(
    ("changed", "mask"),
    [
        # Aligned at the end: most rows attend to nothing.
        ({"window": CAUSAL, "Nk": 300, "enabled_options": frozenset({"mask"})}, None),
        ({"window": (300, 200)}, None),
        *(({"window": window}, mask) for window in ((None, None), CAUSAL) for mask in SHOWN),
    ],
)
def test_tiles_that_are_skipped_cost_nothing(
    changed: dict[str, Any], mask: BlockMask | None
) -> None:
    masked: dict[str, Any] = {} if mask is None else {"enabled_options": frozenset({"block_mask"})}
    problem = replace(LONG, **changed, **masked)
    launch = launch_of(problem)
    layout = layout_of(problem)._replace(block_mask=mask)
    found = schedule_of(problem, layout, (launch,), H200)
    costs = costs_of(problem, layout, launch, found.head_groups)
    assert found.assignment is not None
    assert len(set(costs.tolist())) > 2
    longest = costs.max()
    if problem.Nk == 300:
        assert (costs == START_COST).sum() > len(costs) // 2
        longest = START_COST
    if mask is not None:
        assert costs.min() == START_COST
    assert loads_of(found.assignment, costs).max() <= costs.sum() / 132 + longest


def test_what_is_on_the_gpu_is_guessed() -> None:
    """All keys, aligned at the end; a table that is made so holds every block, too."""
    problem, there = replace(LONG, window=CAUSAL, Nq=1900), ON_GPU
    lengths = np.array([2100, 900])

    def table(*given: Any) -> Array:
        found = schedule(problem, *given).assignment
        assert found is not None
        return found

    assert np.array_equal(table(there, there), table())
    assert np.array_equal(table(lengths, there), table(lengths, lengths - 1900))
    assert not np.array_equal(table(lengths), table())
