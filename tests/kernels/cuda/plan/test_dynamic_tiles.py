"""The dynamic scheduler of the forward pass; no GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import H200, forward
from tests.kernels.cuda.plan.schedules import CAUSAL, ON_GPU, launch_of, schedule, shaped
from tileattn.call.problem import Problem

SMALL = shaped("float16", 128, B=5, Hq=24, Hkv=12, Nq=700, Nk=700, window=CAUSAL)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("B", [1, 2, 5])
def test_the_last_heads_have_a_work_tile_for_each_worker(dim: int, B: int) -> None:
    problem = replace(SMALL, B=B, D=dim, Dv=dim)
    launch, found = launch_of(problem), schedule(problem)
    last = problem.B * problem.Hq - found.single_heads
    assert found.head_groups == 1
    if found.dynamic_tiles:
        blocks = -(-problem.Nq // launch.key.block_q)
        most = last * blocks  # all there are, or not a head too many
        assert found.single_heads == 0 or most - blocks < launch.workers <= most


def test_lengths_that_differ_are_assigned() -> None:
    """If the host knows the lengths: on the GPU they are assumed to be equal."""
    equal, different = (np.array([600] * 4 + [n]) for n in (600, 500))
    assert schedule(SMALL, equal).dynamic_tiles
    assert schedule(SMALL, ON_GPU).dynamic_tiles
    assert not schedule(SMALL, different).dynamic_tiles
    assert schedule(SMALL, different).assignment is not None
    assert not schedule(SMALL, equal, different).dynamic_tiles


@pytest.mark.parametrize("Nk", [2048, 2049])
def test_the_workspace_holds_claims(Nk: int) -> None:
    """Of each work tile the next one, and a counter that begins at zero."""
    plan = forward(replace(SMALL, Nk=Nk), H200)
    starts, zeros = plan.workspace.starts, plan.workspace.zeros
    if Nk > 2048:
        assert {"next_tiles", "tile_counter"}.isdisjoint(starts)
        return
    assert plan.workspace.nbytes - starts["tile_counter"] == 4
    tiles = 5 * 24 * -(-SMALL.Nq // plan.launches[0].key.block_q)
    assert starts["tile_counter"] == zeros >= starts["next_tiles"] + 4 * tiles


@pytest.mark.parametrize(
    "lengths", [None, np.array([5000, 2000, 100, 900, 5])], ids=["", "lengths"]
)
@pytest.mark.parametrize("window", [(None, None), CAUSAL, (300, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_schedule_without_tables(dim: int, window: Any, lengths: Any) -> None:
    """Tiles are claimed exactly where a table is made otherwise."""
    problem = replace(SMALL, D=dim, Dv=dim, Nq=5000, Nk=5000, window=window)
    found = schedule(problem, lengths, tables=False)
    assert found.assignment is None
    assert found.is_provisional == (schedule(problem, lengths).assignment is not None)
    assert found.dynamic_tiles == (tiles_of(problem) if found.is_provisional else 0)


@pytest.mark.parametrize("window", [(None, None), CAUSAL, (300, 0)], ids=str)
def test_tiles_of_lengths_on_the_device_are_claimed(window: Any) -> None:
    """A table of full lengths would not be better, however often the call repeats."""
    problem = replace(SMALL, Nq=5000, Nk=5000, window=window)
    found = schedule(problem, ON_GPU, tables=False)
    assert found.dynamic_tiles == tiles_of(problem)
    assert not found.is_provisional


def test_many_tiles_are_claimed() -> None:
    """More than are worth a table: round robin would even out only in the mean."""
    problem = replace(SMALL, B=400)
    assert schedule(replace(problem, Nk=5000)).assignment is None
    found = schedule(replace(problem, Nk=5000), tables=False)
    assert found.dynamic_tiles == tiles_of(problem) > 64 * 132
    assert not found.is_provisional


def test_tiles_in_lockstep_are_not_claimed() -> None:
    problem = replace(SMALL, B=1, Hq=2, Hkv=2, Nq=1 << 17, Nk=1 << 17)
    found = schedule(problem, tables=False)
    assert found.lockstep_steps == schedule(problem).lockstep_steps > 0
    assert found.dynamic_tiles == 0


def tiles_of(problem: Problem) -> int:
    return problem.B * problem.Hq * -(-problem.Nq // launch_of(problem).key.block_q)
