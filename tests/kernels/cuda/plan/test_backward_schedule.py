"""In what order Hopper's backward kernels take their work tiles; no GPU."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import H200, ON_HOPPER
from tests.kernels.cuda.plan.schedules import CAUSAL, shaped
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.context import KernelLaunch, main_of
from tileattn.kernels.cuda.families.grid import GridSizes
from tileattn.kernels.cuda.plan.layout import contiguous_inputs
from tileattn.kernels.cuda.plan.plan import with_grids
from tileattn.kernels.cuda.plan.scheduler import Schedule, schedule_of

WINDOWS = [(None, None), CAUSAL, (None, 7), (70, 0), (70, None), (1024, 0), (700, 666)]
OPTIONS: list[frozenset[str]] = [
    frozenset(),
    frozenset({"block_mask"}),
    frozenset({"alibi_slopes"}),
]


def scheduled(
    P: Problem, *, deterministic: bool, sm_count: int = 132
) -> tuple[KernelLaunch, Schedule]:
    context = ON_HOPPER._replace(sm_count=sm_count)
    launches = backward_launches(P, context, deterministic=deterministic, sinks=False)
    launches = with_grids(launches, GridSizes(P))
    main = main_of(launches)
    assert main is not None
    return main, schedule_of(P, contiguous_inputs(P), launches, H200)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_orders_of_every_kind_of_call(window: Any, dim: int, deterministic: bool) -> None:
    """Groups share out the heads, and a staggered index is one key block, with an inverse."""
    for options, group, Nk in product(OPTIONS, (1, 2, 8), (512, 1000, 4096, 16384, 1 << 17)):
        P = shaped("float16", dim, B=3, Hq=16 * group, Hkv=16, Nq=Nk, Nk=Nk, window=window)
        P = replace(P, enabled_options=options)
        launch, found = scheduled(P, deterministic=deterministic)
        assert 1 <= found.head_groups <= P.B * P.Hkv * found.head_splits * found.query_splits
        assert found.assignment is None
        assert found.in_order is (deterministic and launch.key.add_dq)
        if found.stagger:
            blocks = -(-P.Nk // launch.key.block_k)
            assert found.in_order
            assert math.gcd(found.stagger, blocks) == 1
            assert found.inverse_stagger * found.stagger % blocks == (blocks > 1)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_decides_about_bits_is_the_same_in_any_batch_and_on_any_gpu(
    window: Any, dim: int, deterministic: bool
) -> None:
    """Sums of dk, dv and dq follow from the order of query tiles, of heads and of keys."""
    for group, Nk in product((1, 4, 8), (1023, 1024, 4096, 24576)):
        orders = set()
        for B, sm_count in ((1, 132), (50, 132), (1, 7)):
            P = shaped("float16", dim, B=B, Hq=4 * group, Hkv=4, Nq=Nk, Nk=Nk, window=window)
            launch, found = scheduled(P, deterministic=deterministic, sm_count=sm_count)
            key = launch.key
            splits = found.head_splits, found.query_splits
            order = found.run_keys, found.last_keys_first
            orders.add((key.tile, key.head_major, *splits, *order))
        assert len(orders) == 1
