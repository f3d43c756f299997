"""Pairs of thread blocks that share a work tile: where they are, and what repairs their heads."""

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, backward, forward
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import FAILED, LARGE_SCORES, NON_FINITE
from tileattn.kernels.cuda.plan.device import Device, device_of_arch

LEFT = NON_FINITE | LARGE_SCORES | FAILED  # heads that pairs leave to others


def wide(**changed: int) -> Problem:
    return asked("float64", **{"D": 256, "Dv": 192} | changed)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
def test_wide_heads_where_there_are_clusters(arch: str) -> None:
    launch, *others = forward(wide(), device_of_arch(arch)).launches
    assert launch.key.pair
    assert not others
    assert launch.grid == 2 * 2 * 6  # two of each of B x Hq work tiles


@pytest.mark.parametrize("deterministic", [False, True])
def test_flagged_heads_of_the_backward_pass(*, deterministic: bool) -> None:
    launches = backward(wide(), H200, deterministic=deterministic).launches
    for kernel in ("backward_dkdv", "backward_dq"):
        pairs = [x.key.pair for x in launches if x.key.kernel == kernel]
        flags = [x.key.head_flags for x in launches if x.key.kernel == kernel]
        if kernel == "backward_dkdv" or deterministic:
            assert (pairs, flags) == ([True, False], [0, LEFT])
        else:  # the other kernel adds dq
            assert (pairs, flags) == ([False], [NON_FINITE | LARGE_SCORES])
    assert all(x.grid % 2 == 0 for x in launches if x.key.pair)


@pytest.mark.parametrize(
    ("problem", "device"),
    [
        (wide(), A100),
        (wide(), device_of_arch("sm_120")),
        (wide(D=128, Dv=128), H200),
        (asked("float32", D=256, Dv=256), H200),
    ],
    ids=["no clusters", "too little shared memory", "narrow heads", "float32"],
)
def test_calls_without_pairs(problem: Problem, device: Device) -> None:
    launches = forward(problem, device).launches + backward(problem, device).launches
    assert not any(x.key.pair for x in launches)
    assert not any(x.key.head_flags & FAILED for x in launches)
