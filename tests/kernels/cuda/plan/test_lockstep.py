"""Lockstep of the Hopper kernels' thread blocks: counters for every step; no GPU."""

from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import H200, asked, backward, forward
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.hopper import HOPPER_BACKWARDS
from tileattn.kernels.cuda.jit.compile import SOURCES
from tileattn.kernels.cuda.plan.assignment import work_tiles
from tileattn.kernels.cuda.plan.plan import LaunchPlan
from tileattn.kernels.cuda.plan.scheduler import LOCKSTEP_TILES, MAX_STEPS

CAUSAL = (None, 0)
FEW: dict[str, Any] = {"n": 1 << 20, "window": (None, 4000 - (1 << 19)), "D": 64, "Dv": 64}
"""Half of the queries attend to nothing: two groups of each thread block."""


def test_both_sides_have_steps_of_the_same_length() -> None:
    assert f"LOCKSTEP_TILES = {LOCKSTEP_TILES}," in (SOURCES / "lockstep.cuh").read_text(
        encoding="utf-8"
    )


def problem_of(*, n: int = 1 << 18, **changed: Any) -> Problem:
    sizes = {"B": 1, "Hq": 2, "Hkv": 1, "Nq": n, "Nk": n, "D": 128, "Dv": 128, "window": CAUSAL}
    return asked("bfloat16", **sizes | changed)


def planned(**changed: Any) -> LaunchPlan:
    return forward(problem_of(**changed), H200)


@pytest.mark.parametrize(
    "changed", [{}, {"n": 1 << 20}, {"B": 3}, {"D": 64, "Dv": 64}, FEW], ids=str
)
def test_there_is_a_counter_for_every_step(changed: dict[str, Any]) -> None:
    """By a table or without one: no worker takes more steps than there are counters."""
    plan = planned(**changed)
    P, (launch,) = plan.problem, plan.launches
    (q, k), workers = launch.key.tile, launch.workers
    blocks, heads = -(-P.Nq // q), P.B * P.Hq
    if "assignment" in plan.constants:
        order = plan.constants["assignment"].array()
    else:
        rows = -(-blocks * heads // workers)
        order = np.arange(rows * workers).reshape(rows, workers)
        order[1::2] = order[1::2, ::-1]
    block, _, _ = work_tiles(blocks, heads, plan.fields["head_groups"])
    tiles = np.append(-(-(blocks - block) * q // k), 0)[np.minimum(order, blocks * heads)]
    steps = plan.fields["lockstep_steps"]
    assert tiles.sum(0).max() // LOCKSTEP_TILES < steps
    assert plan.workspace.nbytes >= plan.workspace.starts["lockstep_counters"] + 4 * steps


@pytest.mark.parametrize("window", [CAUSAL, (None, None)])
@pytest.mark.parametrize(
    "changed", [{}, {"n": 1 << 20}, {"B": 3}, {"D": 192}, {"D": 256, "Dv": 256}], ids=str
)
def test_key_blocks_have_a_counter_for_every_step(changed: dict[str, Any], window: Any) -> None:
    """However work tiles are claimed, as long as all workers are equally fast."""
    plan = backward(problem_of(**{"window": window} | changed), H200)
    P, launch = plan.problem, next(x for x in plan.launches if x.key.kernel in HOPPER_BACKWARDS)
    q, k = launch.key.tile
    blocks = -(-P.Nk // k)
    tiles = P.Hq // P.Hkv * -(-P.Nq // q)
    mean = P.B * P.Hkv * blocks * tiles / launch.workers
    assert (mean + tiles) // LOCKSTEP_TILES < plan.fields["lockstep_steps"]
    starts = plan.workspace.starts
    assert plan.workspace.nbytes >= starts["lockstep_counters"] + 4 * plan.fields["lockstep_steps"]
    assert starts["lockstep_counters"] >= plan.workspace.zeros


@pytest.mark.parametrize("pass_of", [forward, backward])
def test_counters_do_not_grow_with_the_square_of_a_length(pass_of: Any) -> None:
    steps = [pass_of(problem_of(n=1 << n), H200).fields["lockstep_steps"] for n in (20, 24, 26)]
    assert steps[0] < steps[1] == steps[2] == MAX_STEPS


@pytest.mark.parametrize("pass_of", [forward, backward])
@pytest.mark.parametrize(
    "changed",
    [{}, {"n": 1 << 14}, {"window": (1024, 0)}, {"window": (None, None)}, {"Hq": 4}],
    ids=str,
)
def test_there_are_counters_exactly_where_there_are_steps(
    changed: dict[str, Any], pass_of: Any
) -> None:
    """Kernels that count steps have room to; the others take none."""
    plan = pass_of(problem_of(**changed), H200)
    assert ("lockstep_counters" in plan.workspace.starts) == (plan.fields["lockstep_steps"] > 0)


def test_key_blocks_that_add_in_a_fixed_order_keep_no_pace() -> None:
    """They wait for each other already, to add to dq in order."""
    plan = backward(problem_of(), H200, deterministic=True)
    assert plan.fields["lockstep_steps"] == 0
    assert "lockstep_counters" not in plan.workspace.starts
