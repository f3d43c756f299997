"""Gradients of arrays that score_mod reads, summed as on a GPU but run on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.expressions.random_functions import AUX, HQ, NK, NQ, B, as_function, drawn
from tests.gallery import calls
from tests.kernels.cuda.plan.planning import H200
from tests.kernels.cuda.src.on_host import element_sums
from tests.kernels.cuda.src.test_functions import functions_of_the_c_library
from tileattn.algorithm.scores import aux_number, learned_elements
from tileattn.call.parse import parse
from tileattn.call.problem import Operands, Problem
from tileattn.expressions.evaluate import evaluate
from tileattn.kernels.cuda.plan.aux_gradient import (
    MOST_OF_TILE,
    daux_name,
    elements_of_tile,
    sums_name,
    why_not_learned,
)
from tileattn.kernels.cuda.plan.layout import CallLayout, array_layout, contiguous
from tileattn.kernels.cuda.plan.params import aux_name
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plan_backward

Sizes = tuple[int, int, int, int]

DAUX = "backward_daux", "backward_daux_sm90"

GALLERY = {
    name: x for name, x in calls(2, 4, 270, 150, np.float32).items() if {"score_mod", "aux"} <= {*x}
}


def parsed(options: Any, dtype: Any, sizes: Sizes) -> tuple[Problem, Operands]:
    b, h, rows, keys = sizes
    q, k = np.ones((b, h, rows, 16), dtype), np.ones((b, h, keys, 16), dtype)
    return parse(q, k, k, options)


def planned(options: Any, dtype: Any, sizes: Sizes) -> LaunchPlan:
    (problem, x), (b, _, rows, keys) = parsed(options, dtype, sizes), sizes
    arrays = {"q": x.q, "k": x.k, "v": x.v} | {aux_name(n): a for n, a in enumerate(x.aux)}
    layouts = tuple((name, array_layout(a, 0)) for name, a in arrays.items())
    layout = CallLayout(layouts, (keys,) * b, (keys - rows,) * b)
    layout = layout.with_contiguous_results(problem, "backward").with_arrays(
        **{
            daux_name(n): contiguous(a.shape, a.dtype.name)
            for n, a in enumerate(x.aux)
            if a.dtype.kind not in "biu"
        }
    )
    return plan_backward(problem, layout, H200)


def hold(folder: Path, plan: LaunchPlan, aux: Any, seed: int, window: int) -> None:
    """Compare the sums of each kernel with sums over the pairs that read an element."""
    P = plan.problem
    assert P.score_mod is not None
    sizes = P.B, P.Hq, P.Nq, P.Nk
    keys = [launch.key for launch in plan.launches if launch.key.kernel in DAUX]
    places = dict(
        zip("bhij", np.ogrid[: sizes[0], : sizes[1], : sizes[2], : sizes[3]], strict=True)
    )
    learned = learned_elements(P.score_mod)
    assert len(keys) == len(learned)
    for key, node in zip(keys, learned, strict=True):
        n = aux_number(node)
        ds = np.random.default_rng(seed).integers(-9, 9, sizes).astype(P.accum_dtype)
        found = element_sums(folder, plan, key, aux, ds, window)
        with functions_of_the_c_library(), np.errstate(all="ignore"):
            index = evaluate(node.inputs, places, aux, P.accum_dtype, P.constants)
        ends = zip(index, aux[n].shape, strict=True)
        near = [np.broadcast_to(np.clip(x, -end, end - 1), sizes) for x, end in ends]
        expected = np.zeros(aux[n].shape)
        np.add.at(expected, tuple(near), ds)
        np.testing.assert_array_equal(found.pop(sums_name(n)).sum(axis=0), expected)
        assert not any(x.any() for x in found.values())


@pytest.mark.parametrize(
    ("dtype", "window"), [(np.float16, 128), (np.float64, 7)], ids=["float16", "float64"]
)
@pytest.mark.parametrize("name", sorted(GALLERY))
def test_the_gallery(name: str, dtype: Any, window: int, tmp_path: Path) -> None:
    options = GALLERY[name]
    plan = planned(options, dtype, (2, 4, 270, 150))
    hold(tmp_path, plan, options["aux"], 0, window)


@pytest.mark.parametrize("origin", [(0, 0, 64, 200), [(1, 0, 5, 9), (0, 2, 300, 0)]], ids=str)
@pytest.mark.parametrize("name", ["relative_bias", "temperature", "transformer_xl"])
def test_elements_of_moved_indices(name: str, origin: Any, tmp_path: Path) -> None:
    sizes = 2, 4, 270, 150
    options = GALLERY[name] | {"origin": origin}
    _, x = parsed(options, np.float16, sizes)
    hold(tmp_path, planned(options, np.float16, sizes), x.aux, 0, 128)


def test_ranges_hold_what_float32_rounds(tmp_path: Path) -> None:
    """In float32, 10 * 0.7 rounds to 7, although the exact product is below 7."""

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any) -> Any:
        return s + x[(10.0 * y[i // 64]).astype(int)]

    y = np.array([0.7, 1.4, 0.9, 1.1, 1.3], np.float32)
    assert (np.floor(np.float32(10) * y) != np.floor(10 * y.astype(float))).any()
    options = {"score_mod": score_mod, "aux": (np.arange(20, dtype=np.float32), y)}
    plan = planned(options, np.float32, (2, 4, 270, 150))
    hold(tmp_path, plan, options["aux"], 0, 9)


@pytest.mark.parametrize("window", [5, 99])
def test_negative_indices_count_from_the_end(window: int, tmp_path: Path) -> None:
    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any) -> Any:
        return s + x[h - 5, i - j] * y[-1 - b, j - 150]

    rng = np.random.default_rng(0)
    aux = rng.normal(size=(5, 420)), rng.normal(size=(2, 150))
    options = {"score_mod": score_mod, "aux": aux}
    hold(tmp_path, planned(options, np.float32, (2, 4, 270, 150)), aux, 0, window)


@pytest.mark.slow
@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_functions(tmp_path: Path, data: Any) -> None:
    score = as_function(drawn(data.draw, "f", data.draw(st.integers(1, 6))))
    dtype = data.draw(st.sampled_from([np.float16, np.float32, np.float64]))
    sizes = B, HQ, NQ, NK
    try:
        problem, x = parsed({"score_mod": score, "aux": AUX}, dtype, sizes)
    except ValueError:
        return  # an index is out of range for all pairs
    if why_not_learned(problem, tuple(a.shape for a in x.aux)) is not None:
        return  # an index depends on the score
    plan = planned({"score_mod": score, "aux": AUX}, dtype, sizes)
    hold(tmp_path, plan, AUX, data.draw(st.integers(0, 9)), data.draw(st.sampled_from([1, 5, 99])))


def test_indices_of_floats_stay_in_their_box(tmp_path: Path) -> None:
    """In float32 the bounds allow for the rounding of each operation."""
    table = np.ones((2, 300), np.float32)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        far = np.log(abs(i - j) * 0.37 + 1.01) * 40.0 + np.sqrt(i * 1.0) * (3.1 + np.tanh(j * 0.1))
        return s + t[h, np.floor(far).astype(int)]

    for dtype in (np.float16, np.float64):
        plan = planned({"score_mod": score, "aux": (table,)}, dtype, (1, 2, 170, 230))
        hold(tmp_path, plan, (table,), 3, 64)


def test_copies_of_the_sums() -> None:
    """CTAs that share elements have a copy each: as many as run at once and as memory allows."""

    def by_head(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return s * t[h]

    def by_pair(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return s + t[i, j]

    def by_all(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return s + t[b, h, i, j]

    sizes = (2, 4, 4096, 4096)
    expected: list[tuple[Any, Any, int, int]] = [
        (by_head, (4,), 4, 33),
        (by_pair, (4096, 4096), 32, 2),
        (by_all, (2, 4, 4096, 4096), 8 * 32, 1),
    ]
    for score, shape, keys, copies in expected:
        table = np.broadcast_to(np.float32(1), shape)
        plan = planned({"score_mod": score, "aux": (table,)}, np.float16, sizes)
        (launch,) = (x for x in plan.launches if x.key.kernel in DAUX)
        assert plan.aux[sums_name(0)].shape == (copies, *shape)
        assert launch.grid == keys * copies
        assert plan.workspace.starts[sums_name(0)] >= plan.workspace.zeros


def test_what_cannot_be_summed_is_refused() -> None:
    def gathers(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any, at: Any) -> Any:
        return s + t[at[i], at[j]]

    at = np.arange(200)
    # 33 x 100 elements are few, although the powers of two above their sizes are many.
    for n, m, far in ((60, 60, False), (33, 100, False), (70, 70, True)):
        table = np.ones((n, m), np.float32)
        sizes = 1, 1, 200, 200
        problem, x = parsed({"score_mod": gathers, "aux": (table, at)}, np.float16, sizes)
        why = why_not_learned(problem, tuple(a.shape for a in x.aux))
        assert (why is not None) == far
        assert problem.score_mod is not None
        (node,) = learned_elements(problem.score_mod)
        reached = elements_of_tile(node, table.shape, sizes, problem.accum_dtype, 2)
        assert reached == n * m
        assert (reached > MOST_OF_TILE) == far
    assert why is not None
    assert why.startswith("the gradient of aux[0]: 64 x 64 pairs may reach 4,900 of its elements")

    def by_score(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return s + t[np.floor(s).astype(int)]

    problem, x = parsed({"score_mod": by_score, "aux": (np.ones(9),)}, np.float16, sizes)
    why = why_not_learned(problem, ((9,),))
    assert why == "the gradient of aux[0] at an index that depends on the score"
