"""Blocks that join tokens which are not adjacent, and calls of some query heads."""

from typing import Any

import numpy as np
import pytest

from tests.distributed.in_groups import tireless
from tests.distributed.whole_sequence import check, comparison, layouts
from tileattn.call.parse import parse
from tileattn.distributed import Layout
from tileattn.distributed.model.memory_plan import CPU, PassPlanner
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.schedules.schedule import schedule_of
from tileattn.distributed.visibility import Visibility
from tileattn.testing import AttentionCase


def positions(layout: Layout, rank: int) -> Any:
    return np.array([n for start, stop in layout.parts[rank] for n in range(start, stop)], int)


@pytest.mark.parametrize("right", [None, 0, 3, -4])
@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_hold_what_is_visible(right: int | None, rows: int | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, Nq, Nk = int(rng.integers(1, 5)), 61, 53
    queries, keys = layouts(rng, Nq, ranks), layouts(rng, Nk, ranks)
    offset = int(rng.integers(-20, 20))
    visibility = Visibility((None, right), np.array([Nk] * 2), np.array([offset] * 2))
    for rank in range(ranks):
        blocks = RankBlocks(visibility, queries, keys, rank, rows, only_order=True)
        number = np.zeros(queries.length_of(rank), int)
        for source in range(ranks):
            p, j = positions(queries, rank) + offset, positions(keys, source)
            expected = np.ones((len(p), len(j)), bool)
            if right is not None:
                expected = j <= p[:, np.newaxis] + right
            found = np.zeros_like(expected)
            for c, some in blocks.of(source):
                for a in some:
                    number[a.rows] += 1
                    assert a.stop - a.start == a.rows.stop - a.rows.start
                    i, k = np.arange(a.start, a.stop) + offset, np.arange(c.start, c.stop)
                    seen = np.ones((len(i), len(k)), bool)
                    if right is not None:
                        seen = k <= i[:, np.newaxis] + right
                    assert not found[a.rows, c.rows].any()
                    found[a.rows, c.rows] = seen
            assert np.array_equal(found, expected)
        row_ranges = blocks.row_ranges
        assert [n for x in row_ranges for n in range(x.start, x.stop)] == [*range(len(number))]
        for x in row_ranges:
            assert {*number[x].tolist()} == {blocks.number[x.start]}


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("right", [None, 0])
def test_a_zigzag_has_a_block_for_each_rank(ranks: int, right: int | None) -> None:
    layout, n = Layout.zigzag(120, ranks), np.array([120])
    visibility = Visibility((None, right), n, n - 120)
    for rank in range(ranks):
        blocks = RankBlocks(visibility, layout, layout, rank, only_order=True)
        assert [len(blocks.of(source)) for source in range(ranks)] == [1] * ranks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", ["ring", "gather", ("heads", 2)], ids=str)
@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(np.float16, marks=pytest.mark.slow)], ids=str
)
def test_query_heads_of_a_key_head_in_several_calls(
    causal: bool, schedule: Any, dtype: Any
) -> None:
    rng = np.random.default_rng(1)
    shapes = (1, 8, 45, 16), (1, 2, 45, 16), (1, 2, 45, 24), (1, 8, 45, 24)
    q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    dlse = rng.standard_normal((1, 8, 45)).astype(np.float32)
    case = AttentionCase(q, k, v, dout, dlse, {"causal": causal})
    problem, _ = parse(q, k, v, case.options)
    visibility = Visibility(problem.window, np.array([45]), np.array([0]))
    same = Layout.zigzag(45, 4), Layout.zigzag(45, 4)
    given = problem, same, schedule_of(schedule, 4), tireless(CPU), visibility
    assert PassPlanner(*given, backward=True, only_order=True).plan.splits > 1
    compare = comparison(case)
    for layout in (Layout.zigzag(45, 4), layouts(rng, 45, 4), Layout.contiguous([0, 30, 0, 15])):
        check(case, layout, layout, compare, schedule=schedule)
