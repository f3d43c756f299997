"""The Hopper kernels: which calls they support, with which tiles and grids, and what follows."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import (
    H200,
    ON_HOPPER,
    asked,
    backward,
    forward,
    hopper_launches,
    kernels,
)
from tileattn.call.problem import problem_of
from tileattn.dtypes import NAMED
from tileattn.kernels.cuda.families import hopper
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.context import (
    FAILED,
    LARGE_SCORES,
    NON_FINITE,
)
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.hopper import (
    HOPPER,
    HOPPER_BACKWARD,
    HOPPER_BACKWARDS,
    HOPPER_DQ_CONVERT,
    HOPPER_WIDE,
    HOPPER_WIDE_DQ,
)
from tileattn.kernels.cuda.families.shared_memory import (
    hopper_backward_bytes,
)
from tileattn.kernels.cuda.plan.layout import ArrayLayout, contiguous_inputs
from tileattn.kernels.cuda.plan.tensor_map import can_map, tensor_map
from tileattn.kernels.cuda.tuning import TileSize

SUPPORTED = replace(problem_of("float16", 64), Nq=65)  # more than split the keys
ROWS, MAXIMA = "backward_preprocess", "backward_large_scores"
REPAIRS = ["backward_dkdv", "backward_dq"]
GENERIC = [ROWS, MAXIMA, "backward_dkdv", "backward_dq_convert", "backward_dq"]
CAUSAL = (None, 0)


# --- the rule -----------------------------------------------------------------------------------

EMPTY = "an array is empty"
LONG = "an array has nearly 2**31 rows or more"
MANY = (1 << 31) - (1 << 16)
BIAS: dict[str, Any] = {"enabled_options": frozenset({"bias"})}
STAGED = {"bias": "float32", "bias_alignment_bytes": 16, "bias_shape": (1, 1, 1, 1)}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("the GPU is not of compute capability 9.0", {}, {"arch": "sm_90"}),
    ("dtype is neither float16 nor bfloat16", {"dtype": NAMED["float32"]}, {}),
    ("a head dimension is above 256", {"D": 264}, {}),
    ("a head dimension is above 256", {"Dv": 264}, {}),
    *((EMPTY, {name: 0}, {}) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv")),
    (LONG, {"B": 1 << 10, "Hq": 1 << 10, "Nq": 1 << 11}, {}),
    (LONG, {"Nk": MANY}, {}),
    (LONG, {"B": 2, "Nq": MANY // 2}, {}),
    ("the head dimension of v is no multiple of 8", {"Dv": 60}, {}),
    ("a row is not aligned to 16 bytes", {}, {"alignment_bytes": 8}),
    ("an array has an axis that is broadcast, reversed or of", {}, {"tensor_maps": False}),
    ("no tile has room for the bias", {"D": 192, "Dv": 192, **BIAS}, STAGED),
    ("bias is in use, and a head dimension is above 128", {"D": 256, **BIAS}, STAGED),
    ("the head dimension of q and k is no multiple of 8", {"D": 60}, {}),
]
BACKWARD_ALONE = [reason for reason, *_ in REFUSED[-2:]]


@pytest.mark.parametrize(("reason", "changed", "where"), REFUSED, ids=str)
def test_what_they_do_not_support_and_why(
    reason: str, changed: dict[str, Any], where: dict[str, Any]
) -> None:
    problem, context = replace(SUPPORTED, **changed), ON_HOPPER._replace(**where)
    both = {"deterministic": False, "sinks": False}
    forwards = forward_launches(problem, context)
    for kind, launches in (
        ("forward", forwards),
        ("backward", backward_launches(problem, context, **both)),
    ):
        why = hopper.why_not(problem, context, kind)
        if kind == "forward" and reason in BACKWARD_ALONE:
            assert why is None
            assert [launch.key.kernel for launch in forwards] == [HOPPER]
            continue
        assert why is not None
        assert why.startswith(reason)
        parts = [part for x in launches for part in x.why.split("; ")]
        told = [part for part in parts if part.startswith("not the Hopper kernel,")]
        assert told == [f"not the Hopper kernel, because {why}"] or (reason == EMPTY and not told)
        used = {launch.key.kernel for launch in launches}
        assert used.isdisjoint({HOPPER, *HOPPER_BACKWARDS})


def test_every_clause_of_the_rule_is_tried() -> None:
    tried = tuple(reason for reason, *_ in REFUSED)
    assert [why for why, _ in hopper._UNSUPPORTED_BACKWARD if not why.startswith(tried)] == []
    assert set(hopper._UNSUPPORTED) < set(hopper._UNSUPPORTED_BACKWARD)
    forward_alone = set(hopper._UNSUPPORTED_FORWARD) - set(hopper._UNSUPPORTED)
    assert [why for why, _ in forward_alone] == ["pages are no multiple of 8 keys"]  # test_pages.py
    assert hopper.why_not(replace(SUPPORTED, Nk=MANY - 1), ON_HOPPER, "backward") is None


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_arrays_that_no_map_describes(name: str) -> None:
    """An axis is broadcast or reversed, a stride too long, or rows not aligned."""
    problem = asked(D=64, Dv=64)
    layout = contiguous_inputs(problem).with_contiguous_results(problem, "backward")
    x = layout.get(name)
    assert x is not None
    changes = [
        replace(x, strides=tuple(s * step if n == axis else s for n, s in enumerate(x.strides)))
        for axis, step in product(range(3), (0, -1, 1 << 40))
    ]
    plans = (backward,) if name == "dout" else (forward, backward)
    for changed in (x, *changes, replace(x, alignment=8)):
        assert can_map(changed) == (changed not in changes)
        given: dict[str, Any] = {name: changed}
        for plan in (plan(problem, H200, **given) for plan in plans):
            mapped = any("sm90" in kernel for kernel in kernels(plan))
            assert mapped == bool(plan.tensor_maps) == (changed == x)


def test_results_whose_rows_are_not_aligned() -> None:
    problem = asked(D=64, Dv=64)
    out = contiguous_inputs(problem).with_contiguous_results(problem, "forward").get("out")
    assert out is not None
    assert kernels(forward(problem, H200, out=replace(out, strides=(0, -64, 1 << 41, 2)))) == [
        HOPPER
    ]  # nobody makes a map of it
    assert kernels(forward(problem, H200, out=replace(out, alignment=8))) == ["forward"]


# --- the launches -------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "blocks"), [(100, 6), (129, 12), (24 * 128, 132)])
def test_what_the_forward_pass_launches(queries: int, blocks: int) -> None:
    (launch,) = forward_launches(replace(SUPPORTED, D=128, Hq=6, Nq=queries), ON_HOPPER)
    key = launch.key
    assert (launch.grid, launch.shared_bytes, key.tile) == (blocks, key.smem_bytes, (128, 128))
    assert launch.tensor_maps == (("q", 64), ("k", 128), ("v", 128))


@pytest.mark.parametrize(("keys", "blocks"), [(100, 6), (129, 12), (24 * 128, 132)])
def test_what_the_backward_pass_launches(keys: int, blocks: int) -> None:
    problem = replace(SUPPORTED, B=2, Hq=6, Hkv=3, Nq=300, Nk=keys, D=72, Dv=40)
    launches = hopper_launches(problem)
    _, own, finish, maxima, safe, finish_safe, *repairs = launches
    twice = [HOPPER_BACKWARD, HOPPER_DQ_CONVERT]
    assert [x.key.kernel for x in launches] == [ROWS, *twice, MAXIMA, *twice, *REPAIRS]
    assert (maxima.key.head_flags, maxima.grid) == (LARGE_SCORES, 2 * 6 * 3)
    assert (own.key.add_dq, own.key.head_flags, own.grid) == (True, 0, blocks)
    # Where something is not finite the same kernel, but for stages, does it.
    key = replace(own.key, head_flags=NON_FINITE, stages=1, smem_bytes=safe.shared_bytes)
    assert safe == own._replace(key=key, shared_bytes=safe.shared_bytes, why=safe.why)
    assert safe.shared_bytes == hopper_backward_bytes(TileSize(64, 128, 8), 80, 48, repairs=True)
    assert own.shared_bytes == own.key.smem_bytes
    assert own.shared_bytes == hopper_backward_bytes(TileSize(64, 128, 8, 1, 2), 80, 48)
    assert own.tensor_maps == (("q", 64), ("k", 128), ("v", 128), ("dout", 64))
    assert (finish.grid, finish.key.threads, finish.key.tile) == (2 * 6 * 5, 128, own.key.tile)
    assert (finish.key.head_dim, finish.key.value_dim) == (80, 48)
    assert finish_safe.key == replace(finish.key, head_flags=NON_FINITE)
    assert finish_safe.grid == 2 * 6 * 5
    for launch in (finish, finish_safe, *repairs):
        assert (launch.key.producer_warps, launch.tensor_maps) == (0, ())
        assert not launch.key.add_dq
    assert {launch.key.head_flags for launch in repairs} == {LARGE_SCORES | FAILED}
    # The generic kernels compute the other heads again, as many at a time as the GPU runs.
    context = ON_HOPPER._replace(tensor_maps=False)
    same, *generic = backward_launches(problem, context, deterministic=True, sinks=False)[1:]
    assert same == maxima
    for launch, like in zip(repairs, generic, strict=True):
        assert launch.why.startswith("for heads with large scores or with something not finite")
        few = min(like.grid, 132 * like.key.min_blocks_per_sm)
        key = replace(like.key, head_flags=LARGE_SCORES | FAILED)
        assert launch == like._replace(key=key, grid=few, why=launch.why)
    # A fixed order of the sums is the same kernel in another order.
    fixed = hopper_launches(problem, deterministic=True)
    assert [launch for launch in fixed if launch.in_order] == [fixed[1], fixed[4]]
    assert tuple(launch._replace(in_order=False) for launch in fixed) == launches


def test_what_the_backward_pass_launches_for_wide_heads() -> None:
    """Nothing is added to dq, so its order is fixed; generic kernels compute all flagged heads."""
    problem = replace(SUPPORTED, B=2, Hq=6, Hkv=3, Nq=300, Nk=100, D=200, Dv=40)
    launches = hopper_launches(problem)
    _, own, dq, _, *repairs = launches
    names = [ROWS, HOPPER_WIDE, HOPPER_WIDE_DQ, MAXIMA, *REPAIRS]
    assert [launch.key.kernel for launch in launches] == names
    assert (own.grid, dq.grid) == (2 * 3 * 2, 2 * 6 * 3)
    assert own.tensor_maps == (("q", 64), ("k", 64), ("v", 64), ("dout", 64))
    assert dq.tensor_maps == own.tensor_maps
    assert (dq.key.tile, dq.key.head_dim, dq.key.value_dim) == ((128, 64), 256, 128)
    assert not any(launch.key.add_dq for launch in launches)
    assert {launch.key.head_flags for launch in repairs} == {NON_FINITE | LARGE_SCORES | FAILED}
    assert hopper_launches(problem, deterministic=True) == launches


@pytest.mark.parametrize(("D", "block_k"), [(64, 128), (128, 128), (192, 128), (256, 64)])
@pytest.mark.parametrize(
    ("changed", "beside"),
    [
        ({"Nq": 1}, True),
        ({"Nq": 100_000}, True),
        ({"heads": 263}, False),  # less than eight waves of four key blocks each
        ({"sequences": 2}, False),
    ],
    ids=str,
)
def test_delta_is_computed_beside_the_backward_kernel(
    D: int, block_k: int, changed: dict[str, Any], beside: bool
) -> None:
    """On a quarter of 132 SMs where work tiles are many, else on all."""
    there = {"Nq": 1024, "heads": 264} | changed
    heads = there.pop("heads")
    problem = replace(problem_of("bfloat16", D), Hq=heads, Hkv=heads, Nk=4 * block_k, Dv=128)
    rows, *_ = hopper_launches(replace(problem, **there))
    assert rows.key.kernel == ROWS
    assert ((rows.grid, rows.key.threads) == (33, 1024)) is beside


def test_short_query_blocks_of_narrow_heads_are_finished_alike() -> None:
    """As long as those of the backward kernel: without a score modifier they have 128 queries."""
    for enabled_options, queries in (((), 128), (("alibi_slopes",), 64)):
        launches = hopper_launches(replace(problem_of("float16", 64, enabled_options), Nq=300))
        finish = next(x for x in launches if x.key.kernel == HOPPER_DQ_CONVERT)
        assert (finish.key.block_q, finish.grid) == (queries, -(-300 // queries))


def test_what_repairs_elsewhere() -> None:
    """Sums in memory lack the special heads; dq in a fixed order comes from one kernel for all."""
    for arch in ("sm_80", "sm_90", "sm_100"):
        context = ON_HOPPER._replace(arch=arch)
        for fixed, flags in ((False, {"backward_dq": 3}), (True, {})):
            launches = backward_launches(SUPPORTED, context, deterministic=fixed, sinks=False)
            found = [x.key.kernel for x in launches]
            assert found == [x for x in GENERIC if not (fixed and "convert" in x)]
            flagged = {x.key.kernel: x.key.head_flags for x in launches if x.key.head_flags}
            assert flagged == {"backward_large_scores": LARGE_SCORES, **flags}


# --- tensor maps --------------------------------------------------------------------------------


def test_maps_say_where_the_arrays_lie() -> None:
    """From the innermost axis on: k has its heads beside the columns, v is half of wider rows."""
    B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 300, 530, 72, 40
    problem = asked(B=B, Hq=HQ, Hkv=HKV, Nq=NQ, Nk=NK, D=D, Dv=DV, window=CAUSAL)
    steps = (2 * NK * HKV * D, 2 * D, 2 * HKV * D, 2)
    k = ArrayLayout((B, HKV, NK, D), steps, "float16")
    steps = (4 * HKV * NK * DV, 4 * NK * DV, 4 * DV, 2)
    v = ArrayLayout((B, HKV, NK, DV), steps, "float16")
    maps = {
        "q": ((D, NQ, HQ, B), (2 * D, 2 * NQ * D, 2 * HQ * NQ * D), 64),
        "k": ((D, NK, HKV, B), (2 * HKV * D, 2 * D, 2 * NK * HKV * D), 128),
        "v": ((DV, NK, HKV, B), (4 * DV, 4 * NK * DV, 4 * HKV * NK * DV), 128),
        "dout": ((DV, NQ, HQ, B), (2 * DV, 2 * NQ * DV, 2 * HQ * NQ * DV), 64),
    }
    for plan, names in ((forward, "q k v"), (backward, "q k v dout")):
        (made,) = plan(problem, H200, k=k, v=v).tensor_maps.values()
        assert [one.name for one in made] == names.split()
        for one in made:
            sizes, strides, rows = maps[one.name]
            assert (one.sizes, one.strides, one.box) == (sizes, strides, (64, rows, 1, 1))
            assert one.dtype == "float16"


@pytest.mark.parametrize("strides", [(0, 6, -2, 2), (1 << 50, 1 << 50, 1 << 50, 2)])
def test_an_axis_of_length_one_has_a_stride_that_the_driver_takes(strides: Any) -> None:
    x = ArrayLayout((1, 1, 1, 20), strides, "float16")
    assert can_map(x)
    assert tensor_map("q", x, 64).strides == (48, 48, 48)


def test_the_longest_stride() -> None:
    x = ArrayLayout((2, 3, 5, 8), ((1 << 40) - 16, 96, 16, 2), "float16")
    assert can_map(x)
    assert not can_map(replace(x, strides=(1 << 40, 96, 16, 2)))
