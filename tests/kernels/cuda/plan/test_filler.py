"""Numbers that are filled into a plan of a kind: as if each call had been planned in full."""

from dataclasses import replace
from functools import partial
from itertools import chain
from random import Random
from struct import Struct
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked
from tests.kernels.cuda.plan.test_kind_plan import DIMS, WINDOWS, cases
from tileattn.call.options import OPTIONS
from tileattn.call.problem import Problem
from tileattn.call.straight_line import Paths, pinned
from tileattn.expressions.functions import mask_expression
from tileattn.kernels.cuda.families.size_class import size_class
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.filler import Filled, Filler, Place, can_fill
from tileattn.kernels.cuda.plan.kind_plan import kind_key
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout, contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.params import PACKED, template
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plan_backward, plan_forward

COMBINED = (
    *(frozenset[str](), frozenset({"kv_lengths"}), frozenset({"softcap", "dropout_p"})),
    *(frozenset({"cu_seqlens_q"}), frozenset({"mask_mod"}), frozenset({"score_mod"})),
    *(frozenset({"mask_mod", "score_mod"}), frozenset({"mask_mod", "cu_seqlens_q"})),
    *(frozenset({"aux", "mask_mod", "score_mod"}), frozenset({"sinks", "alibi_slopes"})),
    *(frozenset({"bias"}), frozenset({"mask"})),
)


ENOUGH = 12  # filled calls of one GPU and one kind of rows; options with many kinds have fewer


READING = mask_expression(lambda b, _h, i, j, x: x[b, i] <= j, (np.zeros((1, 1), np.int32),))


def wider(x: ArrayLayout) -> ArrayLayout:
    """Let an array be a view of one with more heads and rows."""
    _, _, i, j = x.strides
    h = i * (x.shape[2] + 3)
    return x._replace(strides=(h * (x.shape[1] + 1), h, i, j))


def varied(rng: Random, layout: CallLayout, B: int, options: frozenset[str]) -> CallLayout:
    """Draw strides, and lengths and offsets on the host or on the device."""
    arrays = dict(layout.arrays)
    for name in "qkv":
        if rng.random() < 0.5:
            arrays[name] = wider(arrays[name])
    if "aux" in options:
        sizes = B, rng.randrange(1, 9000)
        arrays["aux[0]"] = contiguous(sizes, "int32")._replace(strides=(4, 4 * B))
    _, H, Nq, _ = arrays["q"].shape
    length = {"b": B, "h": H, "i": Nq, "j": arrays["k"].shape[2]}
    for name in sorted(options & {"sinks", "alibi_slopes", "bias", "mask"}):
        shape = tuple(length[axis] for axis in OPTIONS[name].axes)
        if OPTIONS[name].broadcasts:
            shape = tuple(rng.choice((1, n)) for n in shape)
        arrays[name] = contiguous(shape, "bool" if name == "mask" else "float32")
        if len(shape) == 4:
            arrays[name] = wider(arrays[name])
    layout = layout._replace(arrays=tuple(arrays.items()))
    if "kv_lengths" not in options:
        return layout
    if rng.random() < 0.3:
        layout = layout.with_arrays(kv_lengths=contiguous((B,), "int32"))
        return layout._replace(kv_lengths=None, q_offset=None)
    Nk = arrays["k"].shape[2]
    lengths = tuple(rng.randrange(Nk + 1) for _ in range(B))
    return layout._replace(kv_lengths=lengths, q_offset=tuple(n - 5 for n in lengths))


def places_of(layout: CallLayout) -> list[Place | None]:
    """Describe lengths and offsets as the host knows them."""
    given = (layout.kv_lengths, layout.q_offset)
    return [None if x is None else Place(x[0], len(x) if len({*x}) > 1 else 0) for x in given]


def facts(plan: LaunchPlan) -> dict[str, Any]:
    """Return what a filler finds; the cells of captured numbers are left out."""
    block = template(plan.fields, plan.aux, (0,) * len(plan.cells))
    maps = chain.from_iterable(plan.tensor_maps.values())
    return {
        "cells": block,
        "grids": [x.grid for x in plan.launches],
        "workspace": plan.workspace,
        "maps": [n for x in maps for n in (*x.sizes, *x.strides)],
    }


def packed(found: Filled) -> dict[str, Any]:
    """Describe what a filler found as `facts` does."""
    more = len(found.cells) - PACKED.size // 8
    block = Struct(f"{PACKED.format}{more}q").pack(*found.cells)
    return {**found._asdict(), "cells": block, "grids": [*found.grids]}


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["forward", "backward", "deterministic"])
@pytest.mark.parametrize("bounded", WINDOWS, ids=str)
@pytest.mark.parametrize("options", COMBINED, ids=lambda x: "+".join(sorted(x)) or "plain")
def test_a_filled_plan_is_the_plan_of_the_call(
    options: frozenset[str], bounded: tuple[bool, bool], passes: str
) -> None:
    rng = Random(f"{sorted(options)} {bounded} {passes}")
    known: dict[Any, Filler] = {}
    filled = 0
    direction = "forward" if passes == "forward" else "backward"
    many = options & {"bias", "kv_lengths", "mask"}  # calls of more kinds
    for device, dims, dtype in (
        *((H200, dims, "bfloat16") for dims in (*DIMS, (256, 256))),
        *((device, (64, 64), "float32") for device in (A100, H200)),
        *((A100, dims, "float32") for dims in DIMS if many),
    ):
        enough = filled + ENOUGH
        for base, plain in cases(dtype, options - {"aux"}, bounded, dims):
            if filled == enough:
                break
            problem = replace(base, mask_mod=READING) if "aux" in options else base
            drawn = varied(rng, plain, problem.B, options)
            layout = drawn.with_contiguous_results(problem, direction)
            if direction == "forward":
                plan = plan_forward(problem, layout, device, tables=False)
            else:
                deterministic = passes == "deterministic"
                plan = plan_backward(
                    problem, layout, device, deterministic=deterministic, tables=False
                )
            names = tuple(name for name, _ in layout.arrays)
            key = device, dtype, names, kind_key(problem, layout, device)
            if key not in known:
                if can_fill(plan, {*names}):
                    known[key] = Filler(plan, names)
                continue
            found = known[key].fill(problem, places_of(layout), [x for _, x in layout.arrays])
            if found is not None:
                filled += 1
                assert packed(found) == facts(plan)
    assert filled > 20


KINDS = (
    *(("bfloat16", 64, H200), ("bfloat16", 128, H200)),
    *(("float32", 64, A100), ("float32", 96, H200)),
)
# Each pair of a pass, a window and a kind of rows.
PAIRS = [
    (("forward", "backward", "deterministic")[(n + m) % 3], window, *rows)
    for n, window in enumerate([(None, None), (None, 0), (100, 0)])
    for m, rows in enumerate(KINDS)
]
QUICK = {0, 3, 5, 10}  # each pass, window and kind of rows
SOME = [pytest.param(*x, marks=[pytest.mark.slow] * (n not in QUICK)) for n, x in enumerate(PAIRS)]


@pytest.mark.parametrize(("passes", "window", "dtype", "dim", "device"), SOME, ids=str)
def test_straight_line_code_fills_as_the_filler(
    passes: str, window: Any, dtype: str, dim: int, device: Device
) -> None:
    """The code that was compiled for one problem takes another one on, or declines it."""
    rng = Random(f"{dtype} {dim} {window} {passes}")
    base = asked(dtype, D=dim, Dv=dim, window=window)
    direction = "forward" if passes == "forward" else "backward"
    known: dict[Any, Filler] = {}
    paths = Paths()
    taken = 0

    def problem_of(B: Any, heads: Any, N: Any) -> Problem:
        return replace(base, B=B, Hq=heads, Hkv=heads, Nq=N, Nk=N)

    def sizes_of(problem: Problem) -> tuple[Any, ...]:
        return tuple(map(pinned, size_class(problem, device.tuning, device.sm_count)))

    def filled(key: Any, B: Any, heads: Any, N: Any) -> tuple[Any, ...] | None:
        problem = problem_of(B, heads, N)
        if sizes_of(problem) != key:
            return None
        rows, of_rows = contiguous((B, heads, N, dim), dtype), contiguous((B, heads, N), "float32")
        arrays = [of_rows if name == "lse" else rows for name in names]
        found = known[key].fill(problem, [Place(N), Place(N - N)], arrays)
        if found is None:
            return None
        starts, *ends = found.workspace
        return *found.cells, *found.grids, *found.maps, *starts.values(), *ends

    for _ in range(120):
        N, heads = rng.choice((rng.randrange(1, 64), rng.randrange(1, 9000))), rng.choice((1, 12))
        sizes = {"B": rng.choice((1, 8)), "heads": heads, "N": rng.choice((N, 64 * N))}
        problem = problem_of(**sizes)
        layout = contiguous_inputs(problem).with_contiguous_results(problem, direction)
        names, key = [name for name, _ in layout.arrays], sizes_of(problem)
        if key not in known:
            if direction == "forward":
                plan = plan_forward(problem, layout, device, tables=False)
            else:
                plan = plan_backward(
                    problem, layout, device, deterministic=passes != direction, tables=False
                )
            if not can_fill(plan, {*names}):
                continue
            known[key] = Filler(plan, names)
        expected = filled(key, **sizes)
        found = paths.find(*sizes.values())
        if found is not None:
            taken += 1
        elif paths.add(partial(filled, key), sizes, key):
            found = paths.find(*sizes.values())
        if found is not None:
            assert found[:-1] == expected
            assert paths.ends[found[-1]] == key
    assert taken > 50 or (passes == "deterministic" and window == (None, 0))
