"""Numbers that functions capture are cells of the parameter block, not parts of kernels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import A100, B200, H200, asked, backward, forward
from tileattn import BlockMask
from tileattn.call.problem import Problem
from tileattn.expressions.functions import expression_of, mask_expression
from tileattn.expressions.parameters import Expression, cell_of
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.plan import LaunchPlan
from tileattn.kernels.cuda.plan.tile_kinds import evaluating

SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "Nq": 270, "Nk": 517, "D": 64, "Dv": 64}


def annealed(temperature: float) -> Any:
    return lambda s, *_: s / temperature + (s / temperature) ** 2


def windowed(width: int, start: int = -3) -> Any:
    return lambda _b, _h, i, j: (i - j < width) & (i - j >= start)


def problem_of(score: Expression | None, mask: Expression | None) -> Problem:
    names = {n for n, x in (("score_mod", score), ("mask_mod", mask)) if x is not None}
    (own,) = [x for x in (score, mask) if x is not None]
    changed: dict[str, Any] = {**SIZES, **dict.fromkeys(names, own.node)}
    return replace(asked(enabled_options=names), constants=own.constants, **changed)


def plans(P: Problem, device: Device) -> list[LaunchPlan]:
    return [
        make(P, device, tables=tables) for make in (forward, backward) for tables in (True, False)
    ]


def keys(found: list[LaunchPlan]) -> set[Any]:
    return {launch.key for plan in found for launch in plan.launches}


@pytest.mark.parametrize("device", [A100, H200, B200], ids=lambda x: x.arch)
def test_a_new_number_needs_no_new_kernel(device: Device) -> None:
    known: set[Any] = set()
    for n in range(5):
        score = expression_of(annealed(1.5 + n), (), "score_mod")
        mask = expression_of(windowed(40 * n, -n), (), "mask_mod")
        found = [plans(problem_of(*x), device) for x in ((score, None), (None, mask))]
        made = keys([plan for each in found for plan in each])
        known = known or made
        assert made <= known
        for plan in found[0]:
            assert cell_of(1.5 + n) in plan.cells
        for plan in found[1]:
            assert set(plan.cells) == {40 * n, -n}


@pytest.mark.parametrize("start", [-3, -600])
@pytest.mark.parametrize("width", [0, 1, 100, 400])
def test_tiles_are_those_of_constants(width: int, start: int) -> None:
    function = windowed(width, start)
    literal = Expression(mask_expression(function, ()))
    for make in (forward, backward):
        one, other = (
            make(problem_of(None, x), H200)
            for x in (literal, expression_of(function, (), "mask_mod"))
        )
        assert other.cells
        assert one.constants == other.constants
        assert [x.grid for x in one.launches] == [x.grid for x in other.launches]


def test_block_masks_bring_their_numbers() -> None:
    """The numbers of a block mask follow those of the functions beside it."""
    score = expression_of(annealed(1.5), (), "score_mod")
    shape = SIZES["B"], SIZES["Hq"], SIZES["Nq"], SIZES["Nk"]
    known: set[Any] = set()
    for width in (40, 80, 300):
        mask = BlockMask.from_predicate(windowed(width), shape)
        assert mask.expression is not None
        plain = problem_of(score, None)
        options = plain.enabled_options | {"block_mask"}
        P = evaluating(replace(plain, enabled_options=options), mask.expression)
        assert P.constants == (*score.constants, width, -3)
        made = keys(plans(P, H200))
        known = known or made
        assert made == known
    both = BlockMask.from_predicate(windowed(100), shape) & ~BlockMask.from_predicate(
        windowed(20), shape
    )
    indices = np.ogrid[:1, :1, : shape[2], : shape[3]]
    i, j = indices[2:]
    dense = both.to_dense(shape)
    expected = windowed(100)(0, 0, i, j) & ~windowed(20)(0, 0, i, j)
    np.testing.assert_array_equal(dense, np.broadcast_to(expected, shape))
    assert both.expression is not None
    assert len(both.expression.constants) == 4
