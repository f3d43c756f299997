"""Calls of one kind and one size class launch the same kernels."""

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked
from tileattn.call.problem import Problem
from tileattn.expressions.build import apply
from tileattn.expressions.functions import mask_expression, score_expression
from tileattn.expressions.nodes import Kind
from tileattn.expressions.parameters import cell_of, parameter
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.kind_plan import KindPlan, kind_key
from tileattn.kernels.cuda.plan.layout import CallLayout, contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import LaunchPlan, launch_plan, plan_backward, plan_forward

LENGTHS = (0, 1, 7, 60, 64, 65, 200, 512, 513, 1000, 2048, 3072, 4100, 8200, 40000)
WINDOWS = {
    (False, False): ((None, None),),
    (False, True): ((None, 0), (None, 3)),
    (True, True): ((5, 0), (900, 0), (3000, 1000)),
}
FUNCTIONS = {
    "mask_mod": mask_expression(lambda _b, _h, i, j: i - j < 9, ()),
    "score_mod": apply(
        "multiply",
        score_expression(lambda s, _b, h, _i, _j: s * h, ()),
        parameter(0, Kind.FLOAT),
    ),
}


def cases(dtype: str, options: frozenset[str], bounded: Any, dims: tuple[int, int]) -> Any:
    """Draw calls of one kind, with all numbers different."""
    rng = Random(f"{dtype} {sorted(options)} {bounded} {dims}")
    functions = {name: FUNCTIONS[name] for name in options & FUNCTIONS.keys()}
    base = asked(dtype, options, D=dims[0], Dv=dims[1], **functions)
    for Nq, Nk in rng.sample([*product(LENGTHS, LENGTHS)], 48):
        group, heads = 4, rng.choice((1, 2, 32))
        problem = replace(
            base,
            B=1 if base.is_packed else rng.choice((1, 3, 16)),
            Hq=group * heads,
            Hkv=heads,
            Nq=Nq,
            Nk=Nk,
            window=rng.choice(WINDOWS[bounded]),
            scale=rng.uniform(0.1, 2.0),
            seed=rng.randrange(1000),
            dropout_p=rng.uniform(0.1, 0.9) if base.has_dropout else 0.0,
            softcap=rng.uniform(1.0, 9.0) if base.has_softcap else None,
            sequences=rng.randrange(1, 9) if base.is_packed else None,
            constants=(cell_of(rng.random()),) if base.score_mod is not None else (),
        )
        layout = contiguous_inputs(problem)
        if problem.is_packed:
            ends = contiguous((problem.entries + 1,), "int32")
            layout = layout.with_arrays(cu_seqlens_q=ends, cu_seqlens_k=ends)
            layout = layout._replace(kv_lengths=None, q_offset=None)
        if "bias" in options:
            layout = layout.with_arrays(bias=contiguous((1, problem.Hq, 1, Nk), "float32"))
        yield problem, layout


def planned(
    problem: Problem, layout: CallLayout, device: Device, direction: str
) -> tuple[LaunchPlan, CallLayout]:
    layout = layout.with_contiguous_results(problem, direction)
    plan = plan_forward if direction == "forward" else plan_backward
    return plan(problem, layout, device), layout


DIMS = (64, 64), (96, 80)
OPTIONS = (
    *(frozenset[str](), frozenset({"kv_lengths"}), frozenset({"bias"}), frozenset({"mask_mod"})),
    *(frozenset({"score_mod"}), frozenset({"softcap", "dropout_p"}), frozenset({"cu_seqlens_q"})),
)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "+".join(sorted(x)) or "plain")
def test_numbers_beyond_the_size_class_do_not_decide_about_kernels(
    options: frozenset[str], direction: str
) -> None:
    known: dict[Any, KindPlan] = {}
    reused = 0
    for device, dtype, bounded, dims in (
        *product((H200,), ("bfloat16",), WINDOWS, DIMS),
        *((A100, dtype, (False, True), (64, 64)) for dtype in ("bfloat16", "float32")),
        (A100, "float32", (False, False), (64, 64)),
    ):
        for problem, layout in cases(dtype, options, bounded, dims):
            plan, arrays = planned(problem, layout, device, direction)
            kind = plan.kind
            key = kind_key(problem, arrays, device)
            earlier = known.setdefault((device, kind.kind, key), kind)
            reused += earlier is not kind
            assert kind == earlier
            assert launch_plan(earlier, problem, arrays) == plan
            assert kind.fields.items() <= plan.fields.items()
    assert reused > 20
