"""Numbers that are filled into a plan of a kind: as if each call had been planned in full."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import A100, H200
from tests.kernels.cuda.plan.test_kind_plan import DIMS, WINDOWS, cases
from tileattn.expressions.functions import mask_expression
from tileattn.kernels.cuda.plan.filler import Filler, can_fill
from tileattn.kernels.cuda.plan.kind_plan import kind_key
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout, contiguous
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
            found = known[key][0].fill(problem, (layout.kv_lengths, layout.q_offset), arrays)
            if found is not None:
                filled += 1
                assert found._asdict() == facts(plan)
    assert filled > 20
