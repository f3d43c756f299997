"""The tiles of a mask_mod that kernels skip, or do not look into: where they are found."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.gallery import calls
from tests.kernels.cuda.plan.planning import A100, H200, asked, backward, forward
from tileattn import BlockMask
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL
from tileattn.call.problem import Problem
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.functions import mask_expression
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.params import aux_name
from tileattn.kernels.cuda.plan.tile_kinds import TileKinds, tile_kinds_of, without_values

SIZES = {"B": 2, "Hq": 4, "Nq": 270, "Nk": 517}
TILE = 128
MASKS = {name: x for name, x in calls(**SIZES).items() if "mask_mod" in x}


def problem_of(options: dict[str, Any], **changed: Any) -> Problem:
    node = mask_expression(options["mask_mod"], options.get("aux", ()))
    return replace(asked(enabled_options={"mask_mod"}), mask_mod=node, **SIZES | changed)


def blind(P: Problem) -> Any:
    """Give the kinds of tiles that the host finds whatever arrays hold."""
    assert P.mask_mod is not None
    P = replace(P, mask_mod=without_values(P.mask_mod))
    return tile_kinds_of(P, None, (TILE, TILE)).kinds(None)


@pytest.mark.parametrize("name", sorted(MASKS))
def test_what_is_decided_is_so(name: str) -> None:
    options = MASKS[name]
    P = problem_of(options)
    assert P.mask_mod is not None
    kinds = np.broadcast_to(blind(P), (2, 4, 3, 5))
    places = dict(zip("bhij", np.ogrid[:2, :4, :270, :517], strict=True))
    (pairs,) = evaluate([P.mask_mod], places, options.get("aux", ()), np.dtype(float))
    pairs = np.broadcast_to(pairs, (2, 4, 270, 517))
    for r, c in np.ndindex(3, 5):
        rows, columns = (slice(n * TILE, n * TILE + TILE) for n in (r, c))
        block, kind = pairs[:, :, rows, columns], kinds[:, :, r, c]
        some, every = np.asarray(block.any(axis=(2, 3))), np.asarray(block.all(axis=(2, 3)))
        assert not some[kind == EMPTY].any()
        assert every[kind == FULL].all()


def test_windows_are_decided_and_arrays_are_not_waited_for() -> None:
    window, prefix, documents = (
        blind(problem_of(MASKS[name])) for name in ("sliding_window", "prefix_lm", "documents")
    )
    assert {x.shape for x in (window, prefix, documents)} == {(1, 1, 3, 5)}
    assert window.tolist() == [[[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]]]
    assert prefix[0, 0, 2].tolist() == [FULL, FULL, PARTIAL, PARTIAL, PARTIAL]
    assert documents[0, 0, 0].tolist() == [PARTIAL, EMPTY, EMPTY, EMPTY, EMPTY]


def test_too_many_blocks_are_left_to_the_kernels() -> None:
    for changed in ({"Nq": 1 << 25, "Nk": 1 << 25}, {"Nk": 0}):
        for name in ("sliding_window", "documents"):
            kinds = tile_kinds_of(problem_of(MASKS[name], **changed), None, (TILE, TILE))
            assert kinds.decided == ""
            assert kinds.kinds(None).tolist() == [[[[1]]]]


def test_a_plan_brings_what_the_host_knows() -> None:
    P = problem_of(MASKS["sliding_window"])
    for plan in (forward(P), backward(P)):
        np.testing.assert_array_equal(plan.constants["tile_kinds"].array(), blind(P))
        assert "tile_kinds" not in plan.workspace.starts
    assert "tile_kinds" not in forward(asked()).constants


def test_a_plan_brings_nothing_that_the_host_does_not_know() -> None:
    """Kernels take all tiles for partial if they get no kinds."""
    P = problem_of(MASKS["sliding_window"], B=1)
    packed = replace(P, dtype=np.dtype("float16"), sequences=3)
    many = replace(P, Nq=1 << 25, Nk=1 << 25)
    for device, problem in product((H200, A100), (packed, many)):
        layout = contiguous_inputs(problem)._replace(kv_lengths=None, q_offset=None)
        for plan in (forward(problem, device, layout), backward(problem, device, layout)):
            assert plan.constants == {}
            assert "tile_kinds" not in plan.workspace.starts


@pytest.mark.parametrize(
    ("device", "own"),
    [
        (H200, [["list_key_tiles"], ["rank_key_tiles", "list_query_tiles"]]),
        (A100, [[], []]),
    ],
)
def test_a_plan_classifies_tiles_by_arrays(device: Device, own: list[list[str]]) -> None:
    P = replace(problem_of(MASKS["tree"]), dtype=np.dtype("float16"))
    aux = MASKS["tree"]["aux"]
    arrays = {aux_name(n): contiguous(x.shape, x.dtype.name) for n, x in enumerate(aux)}
    layout = contiguous_inputs(P).with_arrays(**arrays)
    passes = forward(P, device, layout), backward(P, device, layout)
    for plan, lists in zip(passes, own, strict=True):
        names = [launch.key.kernel for launch in plan.launches]
        assert names[: 1 + len(lists)] == ["classify_tiles", *lists]
        assert "tile_kinds" not in plan.constants
        assert "tile_kinds" in plan.workspace.starts
        assert [x.shape for x in plan.aux.values()] == [(2, 270, 270), (2,)]
        assert (plan.tile_lists is not None) == bool(lists)
    # The plan of a block mask besides leaves the arrays to the kernels.
    kinds = tile_kinds_of(P, BlockMask(np.ones((3, 5), bool), (TILE, TILE)), (TILE, TILE))
    assert (kinds.on_device, kinds.decided) == (False, "host")
    assert tile_kinds_of(P, None, (TILE, TILE)) == TileKinds(
        (TILE, TILE), (2, 4, 270, 517), P.mask_mod, "device"
    )


def test_many_work_tiles_are_scheduled_as_if_none_were_empty() -> None:
    aux = np.zeros((2, 5000), np.int32)
    node = mask_expression(lambda b, _h, i, j, x: x[b, i] == x[b, j], (aux,))
    sizes: dict[str, Any] = SIZES | {"Nq": 5000, "Nk": 5000}
    P = replace(asked("float16", enabled_options={"mask_mod"}), mask_mod=node, **sizes)
    layout = contiguous_inputs(P).with_arrays(**{aux_name(0): contiguous(aux.shape, "int32")})
    assert "assignment" not in forward(P, H200, layout).constants
    causal = replace(P, window=(None, 0))
    assert "assignment" in forward(causal, H200, layout).constants


@pytest.mark.parametrize("device", [A100, H200])
def test_a_block_mask_of_a_predicate_is_evaluated(device: Device) -> None:
    """Its blocks were classified pair by pair; intervals would leave them undecided."""
    problem = asked(enabled_options=("block_mask",), Nq=600, Nk=800, D=64, Dv=64)
    mask = BlockMask.from_predicate(
        lambda _b, _h, i, j: (i // 128 * 7 + j // 128 * 3) % 5 < 2, (1, 1, 600, 800), (128, 128)
    )
    layout = contiguous_inputs(problem)._replace(block_mask=mask)
    assert set(np.unique(mask.kinds)) == {0, 2}
    for plan in (forward(problem, device, layout), backward(problem, device, layout)):
        assert not plan.block_mask
        keys = [launch.key for launch in plan.launches if launch.key.functions]
        assert {(key.mask_mod, key.block_mask) for key in keys} == {(True, False)}
        kinds = plan.constants["tile_kinds"].array()
        assert device is H200 or np.array_equal(kinds, mask.kinds)
        if plan.tile_lists is not None and not plan.tile_lists.backward:
            assert plan.tile_lists.of.tile == (128, 128)
            listed = plan.constants["tile_list"].array()[0, 0, :, :-1]
            assert (listed < 100).sum() == (mask.kinds != 0).sum()
            assert not (listed[listed < 100] % 2).any()
