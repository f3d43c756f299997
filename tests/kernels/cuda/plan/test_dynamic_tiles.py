"""The dynamic scheduler of the forward pass; no GPU."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import H200, forward
from tests.kernels.cuda.plan.schedules import CAUSAL, ON_GPU, launch_of, schedule, shaped

# Six blocks a head.
SMALL = shaped("float16", 128, B=5, Hq=24, Hkv=12, Nq=700, Nk=700, window=CAUSAL)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("B", [1, 2, 5])
def test_the_last_heads_have_a_work_tile_for_each_worker(dim: int, B: int) -> None:
    problem = replace(SMALL, B=B, D=dim, Dv=dim)
    launch, found = launch_of(problem), schedule(problem)
    last = problem.B * problem.Hq - found.single_heads
    assert found.head_groups == 1
    if found.dynamic_tiles:
        most = last * 6  # all there are, or not a head too many
        assert found.single_heads == 0 or most - 6 < launch.workers <= most


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
    assert starts["tile_counter"] == zeros >= starts["next_tiles"] + 4 * 5 * 24 * 6
