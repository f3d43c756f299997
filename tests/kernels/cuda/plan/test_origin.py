"""Plans of calls that start in a larger one: what kernels count from, and what that costs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import A100, H200, kernels
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tileattn.expressions.nodes import elements
from tileattn.kernels.cuda.families.cuda_text import NEAR
from tileattn.kernels.cuda.plan.aux_gradient import MOST_OF_TILE, daux_name, elements_of_tile
from tileattn.kernels.cuda.plan.host_arrays import host_arrays
from tileattn.kernels.cuda.plan.layout import CallLayout, Constant, array_layout
from tileattn.kernels.cuda.plan.params import aux_name
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plans_of

B, HQ, NQ, NK = 2, 4, 300, 410
PLAIN = {"dropout_p": 0.25, "seed": 7}
ORIGIN = (1, 2, 16, 96)


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, i - j + 700]


def stripes(b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return (i - j) % 7 != 0


OWN = {"score_mod": relative, "mask_mod": stripes, "aux": (np.ones((8, 1500), np.float32),)}


def call_of(options: dict[str, Any], dtype: Any = np.float16) -> tuple[Problem, CallLayout]:
    """Describe a call whose arrays but the origin are on the device."""
    q, k = (np.ones((B, HQ, n, 64), dtype) for n in (NQ, NK))
    problem, x = parse(q, k, k, options)
    aux = [(aux_name(n), a) for n, a in enumerate(options.get("aux", ()))]
    arrays = [("q", q), ("k", k), ("v", k), *aux]
    layouts = tuple((name, array_layout(a, 0)) for name, a in arrays)
    there = x._replace(aux=(*(object() for _ in aux), *x.aux[len(aux) :]))
    more = host_arrays(there)
    return problem, CallLayout(layouts, (NK,) * B, (NK - NQ,) * B, **more)


def plans(options: dict[str, Any], device: Any = H200) -> tuple[LaunchPlan, ...]:
    return plans_of(*call_of(options), device)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda x: x.arch)
def test_dropout_reads_the_origin_in_kernels_of_their_own(device: Any) -> None:
    for plain, moved in zip(
        plans(PLAIN, device), plans(PLAIN | {"origin": ORIGIN}, device), strict=True
    ):
        assert "origin" not in plain.constants
        array = moved.constants["origin"].array()
        assert array.dtype == np.int64
        assert array.tolist() == [[*ORIGIN]] * B
        for one, other in zip(plain.launches, moved.launches, strict=True):
            assert not one.key.origin
            assert one._replace(key=other.key) == other
            assert other.key == replace(one.key, origin=one.key.dropout)


def test_each_sequence_has_its_own() -> None:
    origin = np.arange(4 * B).reshape(B, 4)
    (plan, *_) = plans(PLAIN | {"origin": origin})
    np.testing.assert_array_equal(plan.constants["origin"].array(), origin)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
def test_where_nothing_is_counted_it_is_left_out(options: dict[str, Any]) -> None:
    for plain, moved in zip(plans(options), plans(options | {"origin": ORIGIN}), strict=True):
        assert plain.launches == moved.launches
        assert (plain.fields, plain.constants) == (moved.fields, moved.constants)


def test_functions_count_from_a_near_origin_in_32_bits() -> None:
    near, other, far = (
        plans(OWN | {"origin": (3, 2**31 - 1, *place)})
        for place in ((5, 96), (NEAR - 1, NEAR - 1), (5, NEAR))
    )
    for plan in (*near, *other):
        assert plan.constants["aux[1]"].dtype == "int32"
        assert "origin" not in plan.constants  # which is for dropout
    for plan in far:
        assert plan.constants["aux[1]"].dtype == "int64"
    # Values are no part of a kernel.
    assert [x.launches for x in near] == [x.launches for x in other]
    text, wide = (some[0].launches[-1].key.functions for some in (near, far))
    assert "i64" not in _of_pair(text)
    assert "i64" in _of_pair(wide)


def _of_pair(text: str) -> str:
    """Give what a text computes for each pair."""
    return text.partition("Accum score(")[2].partition("}")[0]


def test_tiles_of_a_moved_mask_are_classified_on_the_device() -> None:
    (plan, *_) = plans({"mask_mod": lambda b, h, i, j: i >= j, "origin": (0, 0, 128, 0)})
    assert kernels(plan) == ["classify_tiles", "list_key_tiles", "forward_sm90"]


def test_gradients_of_arrays_know_where_tiles_are() -> None:
    """A tile reaches as many elements as from 0, and queries and keys go by their distance."""
    options = {"score_mod": relative, "aux": OWN["aux"], "origin": ORIGIN}
    plain, moved = (call_of({**options, "origin": x}) for x in (None, ORIGIN))
    for _, plan, *_ in (plans_of(*plain, H200), plans_of(*moved, H200)):
        assert {"backward_daux_sm90", "backward_daux_sum"} <= set(kernels(plan))
        assert daux_name(0) in plan.aux
        (text,) = {x.key.functions for x in plan.launches if x.key.kernel == "backward_daux_sm90"}
        assert "OF_DISTANCE = true" in text
    problem, layout = moved
    assert problem.score_mod is not None
    (node,) = (x for x in elements(problem.score_mod) if x.value == 0)
    sizes = B, HQ, NQ, NK
    given = node, (8, 1500), sizes, problem.accum_dtype, 2
    assert layout.origin == Constant.of(np.full((B, 4), ORIGIN))
    assert elements_of_tile(*given, layout.origin) == 127
    assert elements_of_tile(*given) == 8 * 1500 > MOST_OF_TILE
