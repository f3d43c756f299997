"""Plans of first calls, which have no tables, beside plans of repeated ones."""

from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200
from tests.kernels.cuda.plan.test_kind_plan import DIMS, OPTIONS, WINDOWS, cases
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.params import SECTIONS
from tileattn.kernels.cuda.plan.plan import (
    MAX_CARRIED,
    WORD,
    LaunchPlan,
    plan_backward,
    plan_forward,
)

TABLES = {"assignment", "tile_kinds", "tile_list"}

# Fields that say in which order tiles come, and where kernels find their lists.
ORDER = {name for name, _ in SECTIONS["schedule"]} | {"tile_kinds_at", "tile_list_at"}


def with_lengths(layout: CallLayout, B: int) -> CallLayout:
    """Let the lengths of batch entries differ, where the host knows them."""
    if layout.kv_lengths is None:
        return layout
    lengths = tuple(max(n - b, 0) for b, n in enumerate(layout.kv_lengths))
    return layout._replace(kv_lengths=lengths, q_offset=tuple(range(B)))


def both(*given: Any, direction: str, deterministic: bool) -> list[LaunchPlan]:
    """Plan a pass with tables, and without."""
    if direction == "forward":
        return [plan_forward(*given, tables=tables) for tables in (True, False)]
    plan = partial(plan_backward, *given, deterministic=deterministic)
    return [plan(tables=tables) for tables in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "deterministic"), [("forward", False), ("backward", False), ("backward", True)]
)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "+".join(sorted(x)) or "plain")
def test_the_first_plan_differs_only_in_the_order_of_tiles_and_in_its_arrays(
    options: frozenset[str], direction: str, deterministic: bool
) -> None:
    """Its workspace is enough for both; calls bring small arrays into it."""
    improved = 0
    for device, bounded, dims in (
        *product((H200,), WINDOWS, DIMS),
        (A100, (False, True), (64, 64)),
    ):
        for problem, layout in cases("bfloat16", options, bounded, dims):
            placed = with_lengths(layout, problem.B) if "kv_lengths" in options else layout
            given = problem, placed.with_contiguous_results(problem, direction), device
            late, first = both(*given, direction=direction, deterministic=deterministic)
            assert first.workspace.nbytes >= late.workspace.nbytes
            assert not late.is_provisional
            assert not late.carried
            assert TABLES.isdisjoint({*first.constants, *first.carried})
            arrays = {**first.constants, **first.carried}
            assert arrays.items() <= late.constants.items()
            assert late.constants.keys() <= {*arrays, *TABLES}
            for name, x in first.carried.items():
                assert len(x.data) <= MAX_CARRIED
                assert first.workspace.starts[name] % WORD == 0
            assert all(len(x.data) > MAX_CARRIED for x in first.constants.values())
            assert first.is_provisional or not first.carried
            keys = [[x.key for x in plan.launches] for plan in (late, first)]
            assert keys[1][len(keys[1]) - len(keys[0]) :] == keys[0]
            assert late.fields.keys() == first.fields.keys()
            differing = {name for name, x in late.fields.items() if first.fields[name] != x}
            assert differing <= ORDER
            improved += first.is_provisional
    assert improved > 5 or not options & {"kv_lengths", "mask_mod"}
