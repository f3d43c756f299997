"""Which rows that share keys the Hopper kernel takes, and how it is launched over splits."""

from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, forward
from tileattn.call.problem import Problem, problem_of
from tileattn.expressions.functions import mask_expression
from tileattn.kernels.cuda.families.decode import DECODE
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.kernels.cuda.families.size_class import split_keys
from tileattn.kernels.cuda.families.split import COMBINE, SPLIT
from tileattn.kernels.cuda.families.split_sm90 import tile_of
from tileattn.kernels.cuda.families.tiles import HEAD_DIM_BUCKETS
from tileattn.kernels.cuda.tuning import DEFAULT

TREE = mask_expression(lambda _b, _h, i, j: i >= j, (), "mask_mod")


def wide(options: Any = (), **changed: Any) -> Problem:
    sizes = {"B": 3, "Hq": 128, "Hkv": 2, "Nq": 2, "Nk": 10_000, "D": 128, "Dv": 128}
    return replace(problem_of("bfloat16", 128, {"kv_lengths", *options}), **sizes | changed)


@pytest.mark.parametrize(
    "problem",
    [
        wide(),
        wide(B=30),
        wide(Nk=17 << 10),
        wide(Dv=200),
        wide(Hq=2, Nq=1),
    ],
)
def test_splits_are_joined(problem: Problem) -> None:
    """By a warp or a thread block for each query."""
    plan = forward(problem, H200)
    first, join = plan.launches
    assert join.key.kernel == COMBINE
    assert plan.fields["split_keys"] * plan.fields["splits"] >= problem.Nk
    assert "assignment" not in plan.constants
    queries, rows = problem.B * problem.Hq * problem.Nq, join.key.warps_m
    assert (join.grid - 1) * rows < queries <= join.grid * rows
    assert first.key.split_kv
    assert first.key.kernel == (HOPPER if problem.Hq > 2 else DECODE)
    assert [x.name for x in plan.tensor_maps[first.tensor_maps]] == ["q", "k", "v"]
    assert first.grid <= H200.sm_count * first.key.min_blocks_per_sm


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (wide(["alibi_slopes"]), "alibi_slopes is in use"),
        (wide(["mask"]), "mask is in use"),
        (wide(["tree_mask"], mask_mod=TREE, mask_options=("tree_mask",)), "tree_mask is in use"),
        (wide(["mask_mod"], mask_mod=TREE), "mask_mod is in use"),
        (wide(Dv=124), "the head dimension of v is not a multiple of 8"),
    ],
)
def test_what_it_leaves_to_the_generic_kernel(problem: Problem, why: str) -> None:
    first = forward(problem, H200).launches[0]
    assert first.key.kernel == SPLIT
    assert first.why.startswith(f"not the Hopper kernel over splits, because {why}; few queries")


@pytest.mark.parametrize("Nq", [17, 33, 64])
@pytest.mark.parametrize("Nk", [600, 10_000])
def test_blocks_of_rows(Nq: int, Nk: int) -> None:
    """More rows than a tile has share keys: each work tile has one block of them."""
    plan = forward(wide(B=1, Hq=16, Nq=Nq, Nk=Nk), H200)
    first, splits = plan.launches[0], plan.fields["splits"]
    assert (first.key.kernel, first.key.split_kv) == (HOPPER, True)
    assert [x.key.kernel for x in plan.launches[1:]] == [COMBINE] * (splits > 1)
    assert first.grid == min(2 * splits * -(-8 * Nq // 128), H200.sm_count)
    assert plan.fields["split_keys"] >= 64 * Nq


@pytest.mark.parametrize(
    "problem",
    [
        wide(Nq=65),
        wide(["mask_mod"], mask_mod=TREE, Nq=17),
        wide(["bias"], Nq=17),
        wide(Hq=16, Nq=17, Nk=200),
    ],
)
def test_many_rows_that_are_not_split(problem: Problem) -> None:
    launches = forward(problem, H200).launches
    assert not any(x.key.split_kv or x.key.kernel in (SPLIT, COMBINE) for x in launches)


def test_few_rows_and_other_gpus() -> None:
    few = forward(wide(Hq=2), H200).launches[0]
    assert few.key.kernel == DECODE
    assert few.why.startswith("few queries")
    assert forward(wide(), A100).launches[0].key.kernel == SPLIT


@pytest.mark.parametrize("dim", HEAD_DIM_BUCKETS)
@pytest.mark.parametrize("value", HEAD_DIM_BUCKETS)
def test_a_tile_divides_a_split_and_fits(dim: int, value: int) -> None:
    problem = wide(D=dim, Dv=value)
    tile = tile_of(problem, DEFAULT)
    assert split_keys(problem, DEFAULT) % tile.block_k == 0
    assert tile == tile_of(replace(problem, B=1, Nk=1 << 20), DEFAULT)
    assert forward(problem, H200).launches[0].shared_bytes <= H200.shared_limit - 2048


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_splits_are_joined_as_they_lie(dim: int) -> None:
    for problem in (wide(D=dim, Dv=dim), wide(D=64, Dv=dim), wide(D=dim, Dv=64)):
        plan = forward(problem, H200)
        first, join = plan.launches
        assert first.key.split_kv
        assert first.key.value_dim == join.key.value_dim
        rows = problem.B * problem.Hq * problem.Nq * plan.fields["splits"]
        starts = plan.workspace.starts
        room = starts["partial_sums"] - starts["partial_out"]
        assert room >= rows * join.key.value_dim * 4
