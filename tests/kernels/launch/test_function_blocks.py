"""The blocks of a mask_mod that kernels skip, or do not look into: found without arrays."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gallery import calls
from tests.kernels.launch.planning import asked, backward, forward
from tileattn.algorithm.block_mask import EMPTY, FULL, PARTIAL
from tileattn.algorithm.function_mask import BLOCK
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.functions import mask_expression
from tileattn.kernels.launch.function_blocks import block_kinds
from tileattn.kernels.launch.layout import contiguous, contiguous_inputs
from tileattn.kernels.launch.params import aux_name
from tileattn.problem import Problem

SIZES = {"B": 2, "Hq": 4, "Nq": 270, "Nk": 517}
MASKS = {name: x for name, x in calls(**SIZES).items() if "mask_mod" in x}


def problem_of(options: dict[str, Any], **changed: Any) -> Problem:
    node = mask_expression(options["mask_mod"], options.get("aux", ()))
    return replace(asked(enabled_options={"mask_mod"}), mask_mod=node, **SIZES | changed)


@pytest.mark.parametrize("name", sorted(MASKS))
def test_what_is_decided_is_so(name: str) -> None:
    options = MASKS[name]
    P = problem_of(options)
    assert P.mask_mod is not None
    kinds = np.broadcast_to(block_kinds(P), (2, 4, 3, 5))
    places = dict(zip("bhij", np.ogrid[:2, :4, :270, :517], strict=True))
    (pairs,) = evaluate([P.mask_mod], places, options.get("aux", ()), np.dtype(float))
    pairs = np.broadcast_to(pairs, (2, 4, 270, 517))
    for r, c in np.ndindex(3, 5):
        rows, columns = (slice(n * BLOCK, n * BLOCK + BLOCK) for n in (r, c))
        block, kind = pairs[:, :, rows, columns], kinds[:, :, r, c]
        some, every = np.asarray(block.any(axis=(2, 3))), np.asarray(block.all(axis=(2, 3)))
        assert not some[kind == EMPTY].any()
        assert every[kind == FULL].all()


def test_windows_are_decided_and_arrays_are_not_looked_at() -> None:
    window, prefix, documents = (
        block_kinds(problem_of(MASKS[name]))
        for name in ("sliding_window", "prefix_lm", "documents")
    )
    assert {x.shape for x in (window, prefix, documents)} == {(1, 1, 3, 5)}
    assert window.tolist() == [[[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]]]
    assert prefix[0, 0, 2].tolist() == [FULL, FULL, PARTIAL, PARTIAL, PARTIAL]
    assert documents[0, 0, 0].tolist() == [PARTIAL, EMPTY, EMPTY, EMPTY, EMPTY]


def test_too_many_blocks_are_left_to_the_kernels() -> None:
    for changed in ({"Nq": 1 << 25, "Nk": 1 << 25}, {"Nk": 0}):
        assert block_kinds(problem_of(MASKS["sliding_window"], **changed)).tolist() == [[[[1]]]]


def test_a_plan_brings_them_behind_the_arrays() -> None:
    P = problem_of(MASKS["tree"])
    arrays = {
        aux_name(n): contiguous(x.shape, x.dtype.name) for n, x in enumerate(MASKS["tree"]["aux"])
    }
    layout = contiguous_inputs(P).with_arrays(**arrays)
    for plan in (forward(P, layout=layout), backward(P, layout=layout)):
        assert [x.shape for x in plan.aux] == [(2, 270, 270), (2,), (1, 1, 3, 5)]
        np.testing.assert_array_equal(plan.constants[aux_name(2)].array(), block_kinds(P))
    plain = forward(asked())
    assert plain.aux == ()
