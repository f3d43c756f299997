"""Numbers that are filled into a plan of a kind: as if each call had been planned in full."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked
from tests.kernels.cuda.plan.test_kind_plan import DIMS, WINDOWS, cases
from tileattn.expressions.functions import mask_expression
from tileattn.kernels.cuda.plan.filler import Filler, Path, can_fill
from tileattn.kernels.cuda.plan.kind_plan import kind_key
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout, contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.params import template
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plan_backward, plan_forward

OPTIONS = (
    *(frozenset[str](), frozenset({"kv_lengths"}), frozenset({"softcap", "dropout_p"})),
    *(frozenset({"cu_seqlens_q"}), frozenset({"mask_mod"}), frozenset({"score_mod"})),
    *(frozenset({"mask_mod", "score_mod"}), frozenset({"mask_mod", "cu_seqlens_q"})),
    frozenset({"aux", "mask_mod", "score_mod"}),
)


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
    layout = layout._replace(arrays=tuple(arrays.items()))
    if "kv_lengths" not in options:
        return layout
    if rng.random() < 0.3:
        layout = layout.with_arrays(kv_lengths=contiguous((B,), "int32"))
        return layout._replace(kv_lengths=None, q_offset=None)
    Nk = arrays["k"].shape[2]
    lengths = tuple(rng.randrange(Nk + 1) for _ in range(B))
    return layout._replace(kv_lengths=lengths, q_offset=tuple(n - 5 for n in lengths))


def facts(plan: LaunchPlan) -> dict[str, Any]:
    return {
        "template": template(plan.fields, plan.aux, plan.cells),
        "grids": [x.grid for x in plan.launches],
        "workspace": plan.workspace,
        "carried": [(name, x.data) for name, x in plan.carried.items()],
    }


@pytest.mark.parametrize("passes", ["forward", "backward", "deterministic"])
@pytest.mark.parametrize("bounded", WINDOWS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "+".join(sorted(x)) or "plain")
def test_a_filled_plan_is_the_plan_of_the_call(
    options: frozenset[str], bounded: tuple[bool, bool], passes: str
) -> None:
    rng = Random(f"{sorted(options)} {bounded} {passes}")
    known: dict[Any, tuple[Filler, tuple[str, ...]]] = {}
    filled = 0
    direction = "forward" if passes == "forward" else "backward"
    for device, dims, dtype in (
        *((H200, dims, "bfloat16") for dims in (*DIMS, (256, 256))),
        (A100, (64, 64), "float32"),
    ):
        for base, plain in cases(dtype, options - {"aux"}, bounded, dims):
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
                if can_fill(plan, names):
                    known[key] = Filler(plan, names), names
                continue
            arrays = [SimpleNamespace(shape=x.shape, strides=x.strides) for _, x in layout.arrays]
            filler, places = known[key][0], (layout.kv_lengths, layout.q_offset)
            found = filler.fill(problem, places, arrays)
            if found is not None:
                filled += 1
                assert found._asdict() == facts(plan)
    assert filled > 20


@pytest.mark.parametrize("passes", ["forward", "backward", "deterministic"])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (100, 0)], ids=str)
@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 64), ("bfloat16", 128), ("float32", 64)])
def test_a_path_decides_as_the_plan_of_the_call(
    dtype: str, dim: int, window: Any, passes: str
) -> None:
    """A path that was compiled for one problem takes another one on, or declines it."""
    rng = Random(f"{dtype} {dim} {window} {passes}")
    device = H200 if dtype == "bfloat16" else A100
    paths: list[tuple[Any, Filler, Path]] = []
    base = asked(dtype, D=dim, Dv=dim, window=window)
    taken = 0
    for _ in range(120):
        N, heads = rng.choice((rng.randrange(1, 64), rng.randrange(1, 9000))), rng.choice((1, 12))
        N = rng.choice((N, 64 * N))
        problem = replace(base, B=rng.choice((1, 8)), Hq=heads, Hkv=heads, Nq=N, Nk=N)
        direction = "forward" if passes == "forward" else "backward"
        layout = contiguous_inputs(problem).with_contiguous_results(problem, direction)
        if direction == "forward":
            plan = plan_forward(problem, layout, device, tables=False)
        else:
            plan = plan_backward(
                problem, layout, device, deterministic=passes != direction, tables=False
            )
        names = [name for name, _ in layout.arrays]
        places = layout.kv_lengths, layout.q_offset
        arrays = [SimpleNamespace(shape=x.shape, strides=x.strides) for _, x in layout.arrays]
        for key, filler, path in paths:
            decided = path.decided(problem)
            if decided is not None:
                taken += 1
                assert key == kind_key(problem, layout, device)
                found = filler.fill(problem, places, arrays, decided)
                assert found is not None
                assert {**found._asdict(), "grids": [*found.grids]} == facts(plan)
                break
        else:
            if can_fill(plan, names):
                filler = Filler(plan, names)
                made = filler.path(problem, places)
                if made is not None:
                    assert made.decided(problem) is not None
                    paths.append((kind_key(problem, layout, device), filler, made))
    assert taken > 50 or (passes == "deterministic" and window == (None, 0))
