"""Kernels that classify and list tiles, run on the CPU and compared with NumPy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.expressions.random_functions import AUX, HQ, NK, NQ, B, as_function, drawn
from tests.gallery import calls
from tests.kernels.cuda.plan.planning import asked, backward, forward
from tests.kernels.cuda.src.masks_on_host import visible
from tests.kernels.cuda.src.on_host import launched
from tileattn.algorithm.function_mask import extrema
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL
from tileattn.call.lowering import from_origin
from tileattn.call.problem import Problem
from tileattn.expressions.build import FUNCTIONS
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.functions import mask_expression
from tileattn.expressions.intervals import ROUNDED
from tileattn.expressions.quadtree import kinds_by_intervals
from tileattn.kernels.cuda.plan.device import device_of_arch
from tileattn.kernels.cuda.plan.layout import CallLayout, array_layout, contiguous_inputs
from tileattn.kernels.cuda.plan.params import aux_name
from tileattn.kernels.cuda.plan.plan import LaunchPlan
from tileattn.kernels.cuda.plan.tile_lists import END, key_tile_lists, query_tile_lists

SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "Nq": 470, "Nk": 917}
DEVICES = [device_of_arch("sm_90a"), device_of_arch("sm_80")]


def by_head(b: Any, h: Any, i: Any, j: Any, first: Any, last: Any) -> Any:
    """Attend to keys between two limits: one of each head, and one of each batch entry and head."""
    return (j >= first[h] + i) & (j < last[b, h])


LIMITS = (
    np.array([-400, -90, 0, 250], np.int16),
    np.array([[917, 3, 400, 0], [1 << 40, 500, 600, 700]]),
)


def reading(Nq: int, Nk: int) -> dict[str, dict[str, Any]]:
    """Return masks that read arrays."""
    own = {n: x for n, x in calls(2, 4, Nq, Nk).items() if "mask_mod" in x and "aux" in x}
    return own | {"by_head": {"mask_mod": by_head, "aux": LIMITS}}


READING = reading(470, 917)


def problem_of(options: dict[str, Any], **sizes: Any) -> tuple[Problem, CallLayout]:
    node = mask_expression(options["mask_mod"], options["aux"])
    sizes = {"D": 64, "Dv": 64} | SIZES | sizes
    P = replace(asked("float16", enabled_options={"mask_mod"}, **sizes), mask_mod=node)
    arrays = {aux_name(n): array_layout(x, x.ctypes.data) for n, x in enumerate(options["aux"])}
    return P, contiguous_inputs(P).with_arrays(**arrays)


def kinds_of(P: Problem, tile: tuple[int, int], aux: Any) -> Any:
    assert P.mask_mod is not None
    known = extrema(P.mask_mod, aux)
    return kinds_by_intervals(P.mask_mod, (P.B, P.Hq, P.Nq, P.Nk), tile, known)


def as_numbers(part: Any, dtype: Any, shape: Any) -> Any:
    return part[: np.dtype(dtype).itemsize * int(np.prod(shape))].view(dtype).reshape(shape)


def tile_of(plan: LaunchPlan) -> tuple[int, int]:
    return plan.fields["kinds_tile_q"], plan.fields["kinds_tile_k"]


def expected_lists(plan: LaunchPlan, kinds: Any) -> Any:
    """List tiles on the host by their kinds."""
    assert plan.tile_lists is not None
    if not plan.tile_lists.backward:
        return key_tile_lists(kinds)
    heads = max(1, kinds.shape[1] // plan.problem.group)
    grouped = kinds.reshape(kinds.shape[0], heads, -1, *kinds.shape[2:])
    least, most = grouped.min(axis=2), grouped.max(axis=2)
    one = np.where(most == EMPTY, EMPTY, np.where(least == FULL, FULL, 1))
    lists = query_tile_lists(one)
    lists[..., 1::2][lists[..., ::2] >= END - lists.shape[-1]] = 0  # unused entries
    return lists


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(READING))
def test_kinds_and_lists_of_the_gallery(name: str, group: int, device: Any, tmp_path: Path) -> None:
    aux = READING[name]["aux"]
    P, layout = problem_of(READING[name], Hkv=4 // group)
    for plan in (forward(P, device, layout), backward(P, device, layout)):
        made = launched(tmp_path, plan, aux)
        kinds = kinds_of(P, tile_of(plan), aux)
        np.testing.assert_array_equal(as_numbers(made["tile_kinds"], np.int8, kinds.shape), kinds)
        lists = plan.tile_lists
        assert (lists is not None) == (device.arch == "sm_90a")
        if lists is None:
            assert tile_of(plan) == (128, 128)
            continue
        expected = expected_lists(plan, kinds)
        assert lists.shape(None) == expected.shape
        found = as_numbers(made["tile_list"], np.int32, expected.shape)
        np.testing.assert_array_equal(found, expected)


def bits_and_shifts(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Use the functions whose bounds are powers of two."""
    return ((i ^ (j << 1)) < 300 + 128 * h) | ((i | j) >> 2 < 31 + b)


def of_floats(_b: Any, h: Any, i: Any, j: Any) -> Any:
    """Round in every operation."""
    return (i - j) * 0.1 + h * 0.3 < np.sqrt(i / 7.0) + 1.7


OWN = {n: x["mask_mod"] for n, x in calls(2, 4, 470, 917).items() if [*x] == ["mask_mod"]}
OWN |= {"bits_and_shifts": bits_and_shifts, "of_floats": of_floats}


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", sorted(OWN))
def test_the_device_lists_what_the_host_lists(
    name: str, group: int, device: Any, tmp_path: Path
) -> None:
    """A plan without tables computes the same tiles as a plan with tables, in the same order."""
    P, layout = problem_of({"mask_mod": OWN[name], "aux": ()}, Hkv=4 // group)
    for plan_pass in (forward, backward):
        tables, plan = (plan_pass(P, device, layout, tables=tables) for tables in (True, False))
        assert (tables.is_provisional, plan.is_provisional) == (False, True)
        assert {"tile_kinds", "tile_list"}.isdisjoint(plan.constants)
        made = launched(tmp_path, plan, ())
        kinds = tables.constants["tile_kinds"].array()
        np.testing.assert_array_equal(as_numbers(made["tile_kinds"], np.int8, kinds.shape), kinds)
        if "tile_list" not in tables.constants:
            continue
        lists = tables.constants["tile_list"].array().copy()
        found = as_numbers(made["tile_list"], np.int32, lists.shape)
        if plan_pass is backward:
            lists[..., 1::2][lists[..., ::2] >= END - lists.shape[-1]] = 0  # unused entries
        np.testing.assert_array_equal(found, lists)


@pytest.mark.parametrize("name", sorted(READING))
def test_pairs_of_the_gallery(name: str, tmp_path: Path) -> None:
    """The function decides pair by pair; queries and keys past an end count as the last."""
    options = reading(29, 43)[name]
    P, layout = problem_of(options, Nq=29, Nk=43)
    P = replace(P, window=(11, None))
    assert P.mask_mod is not None
    rows, columns = P.Nq + 3, P.Nk + 2
    by_function, seen = visible(
        tmp_path, forward(P, DEVICES[1], layout), options["aux"], rows, columns
    )
    b, h, i, j = np.ogrid[: P.B, : P.Hq, :rows, :columns]
    with np.errstate(all="ignore"):
        inside = {"b": b, "h": h, "i": np.minimum(i, P.Nq - 1), "j": np.minimum(j, P.Nk - 1)}
        (pairs,) = evaluate([P.mask_mod], inside, options["aux"], np.dtype(float))
    pairs = np.broadcast_to(pairs, by_function.shape)
    assert {*pairs[..., : P.Nq, : P.Nk].ravel().tolist()} == {False, True}
    np.testing.assert_array_equal(by_function, pairs)
    in_window = (i + P.Nk - P.Nq - j <= 11) & (j < P.Nk)
    np.testing.assert_array_equal(seen, pairs & in_window)


BOUNDARIES = (*ROUNDED, "power")


@pytest.mark.parametrize("name", BOUNDARIES)
def test_tiles_at_a_boundary_are_partial(name: str, tmp_path: Path) -> None:
    """The last bit decides a comparison with the value itself, and libraries round it apart."""
    x = np.array([0.3, 0.7, 1.5, 4.0])
    exponent = (1.3,) if name == "power" else ()
    limit = FUNCTIONS[name](x, *exponent)

    def function(x: Any) -> Any:
        return x.named(name, x, *exponent)

    options: dict[str, Any] = {
        "mask_mod": lambda _b, h, i, _j, x, y: (function(x[h]) <= y[h]) ^ (i < 128),
        "aux": (x, limit),
    }
    P, layout = problem_of(options, Nq=256, Nk=128)
    plan = forward(P, DEVICES[1], layout)
    kinds = kinds_of(P, tile_of(plan), options["aux"])
    found = as_numbers(launched(tmp_path, plan, options["aux"])["tile_kinds"], np.int8, kinds.shape)
    for of in (kinds, found):
        np.testing.assert_array_equal(of, np.full(kinds.shape, PARTIAL))


def banded(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Attend to some keys before a query, fewer in later heads."""
    return (i >= j) & (i - j < 400 - 60 * h + b)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_kinds_from_an_origin(device: Any, near: bool, tmp_path: Path) -> None:
    """Each sequence has its own; bounds of such a mask are exact."""
    origin = np.array([(0, 1, 500, 0), (3, 0, 37, 128)], np.int32 if near else np.int64)
    node = from_origin(mask_expression(banded, ()), ("origin",))
    P = replace(asked("float16", enabled_options={"mask_mod"}, D=64, Dv=64, **SIZES), mask_mod=node)
    arrays = {aux_name(0): array_layout(origin, origin.ctypes.data)}
    layout = contiguous_inputs(P).with_arrays(**arrays)
    layout = layout._replace(near_origin=0 if near else None)
    starts = origin.astype(np.int64).T[:, :, None, None, None]
    places = np.ogrid[: P.B, : P.Hq, : P.Nq, : P.Nk]
    pairs = banded(*(x + y for x, y in zip(places, starts, strict=True)))
    for plan in (forward(P, device, layout), backward(P, device, layout)):
        made = launched(tmp_path, plan, (origin,))
        q, k = tile_of(plan)
        rows, columns = np.arange(0, P.Nq, q), np.arange(0, P.Nk, k)
        seen = np.add.reduceat(np.add.reduceat(pairs.astype(int), rows, axis=2), columns, axis=3)
        sizes = np.diff([*rows, P.Nq])[:, None] * np.diff([*columns, P.Nk])
        kinds = np.where(seen == 0, EMPTY, np.where(seen == sizes, FULL, PARTIAL))
        assert {*kinds.ravel().tolist()} == {EMPTY, PARTIAL, FULL}
        found = as_numbers(made["tile_kinds"], np.int8, kinds.shape)
        np.testing.assert_array_equal(found, kinds)


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_functions_are_bounded(tmp_path: Path, data: Any) -> None:
    """Empty and full tiles are so pair by pair, and the kernel finds the same kinds as NumPy."""
    mask = as_function(drawn(data.draw, "b", data.draw(st.integers(1, 6)), False), False)
    node = mask_expression(mask, AUX)
    options = {"mask_mod": mask, "aux": AUX}
    P, layout = problem_of(options, B=B, Hq=HQ, Hkv=HQ, Nq=NQ, Nk=NK)
    plan = forward(P, DEVICES[1], layout, tables=False)
    plan = replace(plan, fields=plan.fields | {"kinds_tile_q": 1, "kinds_tile_k": 1})
    made = launched(tmp_path, plan, AUX)
    kinds = kinds_of(P, (128, 128), AUX)
    found = as_numbers(made["tile_kinds"], np.int8, kinds.shape)
    np.testing.assert_array_equal(found, kinds)
    places = dict(zip("bhij", np.ogrid[:B, :HQ, :NQ, :NK], strict=True))
    with np.errstate(all="ignore"):
        (pairs,) = evaluate([node], places, AUX, np.dtype(float))
    for b, h in np.ndindex(*found.shape[:2]):
        seen = np.broadcast_to(pairs, (B, HQ, NQ, NK))[b, h]
        kind = found[b, h, 0, 0]
        assert kind != FULL or seen.all()
        assert kind != EMPTY or not seen.any()
