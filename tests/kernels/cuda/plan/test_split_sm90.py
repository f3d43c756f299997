"""Which rows that share keys the Hopper kernel takes, and how it is launched over splits."""

from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, forward, kernels
from tileattn.call.problem import Problem, problem_of
from tileattn.expressions.functions import mask_expression
from tileattn.kernels.cuda.families import split
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.kernels.cuda.families.split_sm90 import tile_of
from tileattn.kernels.cuda.families.tiles import HEAD_DIM_BUCKETS
from tileattn.kernels.cuda.tuning import DEFAULT

TREE = mask_expression(lambda _b, _h, i, j: i >= j, (), "mask_mod")


def wide(options: Any = (), **changed: Any) -> Problem:
    sizes = {"B": 3, "Hq": 128, "Hkv": 2, "Nq": 2, "Nk": 10_000, "D": 128, "Dv": 128}
    return replace(problem_of("bfloat16", 128, {"kv_lengths", *options}), **sizes | changed)


def test_it_is_launched_over_pieces() -> None:
    plan = forward(wide(), H200)
    assert kernels(plan) == [HOPPER, split.COMBINE]
    first, join = plan.launches
    assert first.key.split_kv
    assert first.key.tile == (128, 128)
    assert first.grid == 3 * 2 * 10  # heads, and splits of 1,024 keys
    assert forward(wide(B=30), H200).launches[0].grid == H200.sm_count
    assert join.grid == 3 * 128 * 2 // 8  # a warp for each query
    assert (plan.fields["split_keys"], plan.fields["splits"]) == (1024, 10)
    assert "assignment" not in plan.constants
    assert [x.name for x in plan.tensor_maps[first.tensor_maps]] == ["q", "k", "v"]


@pytest.mark.parametrize(
    ("problem", "warps"),
    [
        (wide(), (8, 1)),
        (wide(Nk=16 << 10), (8, 1)),
        (wide(Nk=17 << 10), (1, 8)),
        (wide(Dv=200), (1, 8)),  # more columns than a warp's registers hold sums of
        (wide(Hq=2, Nq=1), (8, 1)),
    ],
)
def test_a_warp_or_a_thread_block_joins_the_pieces_of_a_query(
    problem: Problem, warps: tuple[int, int]
) -> None:
    join = forward(problem, H200).launches[-1]
    assert (join.key.kernel, join.key.warps_m, join.key.warps_n) == (split.COMBINE, *warps)
    queries = problem.B * problem.Hq * problem.Nq
    assert (join.grid - 1) * warps[0] < queries <= join.grid * warps[0]


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (wide(["alibi_slopes"]), "alibi_slopes is in use"),
        (wide(["mask"]), "mask is in use"),
        (wide(["tree_mask"], mask_mod=TREE, mask_options=("tree_mask",)), "tree_mask is in use"),
        (wide(["mask_mod"], mask_mod=TREE), "mask_mod is in use"),
        (wide(Nk=1024), "there is one split"),
        (wide(Dv=124), "the head dimension of v is no multiple of 8"),
    ],
)
def test_what_it_leaves_to_the_generic_kernel(problem: Problem, why: str) -> None:
    first = forward(problem, H200).launches[0]
    assert first.key.kernel == split.SPLIT
    assert first.why.startswith(f"not the Hopper kernel over splits, because {why}; few queries")


def test_few_rows_and_other_gpus() -> None:
    few = forward(wide(Hq=32), H200).launches[0]  # 32 rows
    assert few.key.kernel == split.SPLIT
    assert few.why.startswith("few queries")
    assert forward(wide(Hq=34), H200).launches[0].key.kernel == HOPPER
    assert forward(wide(), A100).launches[0].key.kernel == split.SPLIT


@pytest.mark.parametrize("dim", HEAD_DIM_BUCKETS)
@pytest.mark.parametrize("value", HEAD_DIM_BUCKETS)
def test_a_tile_divides_a_piece_and_fits(dim: int, value: int) -> None:
    problem = wide(D=dim, Dv=value)
    assert split.split_keys_of(problem, DEFAULT) % tile_of(problem).block_k == 0
    assert tile_of(problem) == tile_of(replace(problem, B=1, Nk=1 << 20, Nq=1))
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
