"""score_mod and mask_mod in CUDA: run on the CPU and compared with NumPy, and compiled for GPUs."""

import ctypes
import ctypes.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.expressions.random_functions import AUX, HQ, NK, NQ, B, as_function, drawn
from tests.gallery import calls
from tests.kernels.cuda.src.on_host import quick, run
from tests.kernels.cuda.src.test_compile import COMPLAINT
from tileattn.call.lowering import from_origin
from tileattn.call.parse import parse
from tileattn.expressions.build import FUNCTIONS
from tileattn.expressions.derivative import derivatives
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.functions import mask_expression, score_expression
from tileattn.expressions.nodes import Kind, Node, constant
from tileattn.expressions.parameters import lifted, renumbered
from tileattn.expressions.trace import _input_count
from tileattn.kernels.cuda.families.cuda_text import NEAR, functions_text
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES, Compiled, compiled
from tileattn.kernels.cuda.plan.device import device_of_arch
from tileattn.kernels.cuda.plan.layout import CallLayout, array_layout
from tileattn.kernels.cuda.plan.params import aux_name, slots, template
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plans_of

SCORE = Node("input", Kind.FLOAT, (), "s")
PLACES = np.ogrid[:B, :HQ, :NQ, :NK]
SHAPE = (B, HQ, NQ, NK)
FLOAT64 = np.dtype(np.float64)
GALLERY = calls(B, 4, NQ, NK)

_LIBM = {"power": "pow", "arctan": "atan"} | {
    name: name for name in ("exp", "expm1", "log", "log1p", "log2", "tanh", "sin", "cos", "erf")
}


@contextmanager
def functions_of_the_c_library() -> Iterator[None]:
    """Let the evaluator call functions of the C library, so that results are bitwise identical."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))

    def chosen(name: str, count: int) -> Any:
        of_type = {}
        for dtype, number, suffix in (
            (np.float32, ctypes.c_float, "f"),
            (float, ctypes.c_double, ""),
        ):
            function = getattr(libm, name + suffix)
            function.restype, function.argtypes = number, [number] * count
            of_type[np.dtype(dtype)] = np.vectorize(function, otypes=[dtype])
        return lambda *given: of_type[np.result_type(*given)](*given)

    with pytest.MonkeyPatch.context() as patch:
        for op, name in _LIBM.items():
            patch.setitem(FUNCTIONS, op, chosen(name, 2 if op == "power" else 1))
        exp = FUNCTIONS["exp"]
        patch.setitem(FUNCTIONS, "sigmoid", lambda x: 1 / (1 + exp(-x)))
        yield


def compare(folder: Path, score: Any, mask: Any, aux: Any, dtype: Any, s: Any) -> None:
    """Compare scores, derivatives and visibility with the evaluator, bit by bit."""
    score_mod = None if score is None else score_expression(score, aux)
    mask_mod = None if mask is None else mask_expression(mask, aux)
    found = run(folder, score_mod, mask_mod, aux, s.astype(dtype), PLACES)
    new = SCORE if score_mod is None else score_mod
    grad = derivatives(new).get(SCORE, constant(0.0))
    inputs = {"s": s.astype(dtype), **dict(zip("bhij", PLACES, strict=True))}
    with functions_of_the_c_library(), np.errstate(all="ignore"):
        expected = evaluate([new, grad], inputs, aux, np.dtype(dtype))
        seen = evaluate([mask_mod or constant(True)], inputs, aux, FLOAT64)
    for one, whole in zip(found, (*expected, *seen), strict=True):
        np.testing.assert_array_equal(one, np.broadcast_to(whole, SHAPE))


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(np.float32, id="float32"),
        pytest.param(np.float64, id="float64", marks=pytest.mark.slow),
    ],
)
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_functions_are_those_of_the_evaluator(tmp_path: Path, dtype: Any, data: Any) -> None:
    score = as_function(drawn(data.draw, "f", data.draw(st.integers(1, 6))))
    mask = as_function(drawn(data.draw, "b", data.draw(st.integers(1, 6)), False), False)
    s = np.random.default_rng(data.draw(st.integers(0, 9))).normal(size=SHAPE)
    compare(tmp_path, score, mask, AUX, dtype, s)


@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_parameters_are_computed_as_constants(tmp_path: Path, data: Any) -> None:
    score = as_function(drawn(data.draw, "f", data.draw(st.integers(1, 6))))
    mask = as_function(drawn(data.draw, "b", data.draw(st.integers(1, 6)), False), False)
    nodes = score_expression(score, AUX), mask_expression(mask, AUX)
    own, visible = map(lifted, nodes)
    constants = own.constants + visible.constants
    functions = own.node, renumbered(visible.node, len(own.constants))
    s = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    expected = run(tmp_path, *nodes, AUX, s, PLACES)
    found = run(tmp_path, *functions, AUX, s, PLACES, constants=constants)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_functions_count_from_an_origin(tmp_path: Path, data: Any) -> None:
    """Near origins use 32 bits, others 64. The evaluator gets the moved indices."""
    score = as_function(drawn(data.draw, "f", data.draw(st.integers(1, 6))))
    mask = as_function(drawn(data.draw, "b", data.draw(st.integers(1, 6)), False), False)
    near = data.draw(st.booleans())
    most = NEAR - 1 if near else 2**31 - 1
    place = st.sampled_from([0, 1, 5, most])
    rows = data.draw(st.lists(st.tuples(*[place] * 4), min_size=B, max_size=B))
    origin = np.array(rows, np.int32 if near else np.int64)
    nodes = score_expression(score, AUX), mask_expression(mask, AUX)
    new, visible = (from_origin(node, (*map(str, range(len(AUX))), "origin")) for node in nodes)
    s = np.random.default_rng(0).normal(size=SHAPE)
    number = len(AUX) if near else None
    found = run(tmp_path, new, visible, (*AUX, origin), s, PLACES, number)
    starts = origin.astype(np.int64).T[:, :, None, None, None]
    inputs = {"s": s} | {n: x + y for n, x, y in zip("bhij", PLACES, starts, strict=True)}
    grad = derivatives(nodes[0]).get(SCORE, constant(0.0))
    with functions_of_the_c_library(), np.errstate(all="ignore"):
        expected = evaluate([nodes[0], grad, nodes[1]], inputs, AUX, FLOAT64)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, np.broadcast_to(other, SHAPE))


@pytest.mark.parametrize("name", sorted(GALLERY))
def test_the_gallery_on_the_cpu(name: str, tmp_path: Path) -> None:
    options = GALLERY[name]
    s = np.random.default_rng(0).normal(size=SHAPE)
    functions = options.get("score_mod"), options.get("mask_mod")
    compare(tmp_path, *functions, options.get("aux", ()), np.float32, s)


# --- rare values --------------------------------------------------------------------------------

LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
INTEGERS = np.array([LEAST, -64, -7, -1, 0, 1, 3, 64, MOST])
NAN, INF = np.nan, np.inf
FLOATS = np.array([NAN, -INF, -9.3e18, -2.5, -0.0, 0.0, 0.3, 2.5, 9.3e18, 1e30, INF])
OF_INTEGERS: list[Any] = [
    *(np.add, np.subtract, np.multiply, np.floor_divide, np.remainder, np.minimum, np.maximum),
    *(np.left_shift, np.right_shift, np.bitwise_and, np.bitwise_or, np.bitwise_xor),
    *(lambda x, _, f=f: f(x) for f in (np.negative, np.absolute, np.sign, np.invert)),
]
OF_FLOATS: list[Any] = [
    *(np.add, np.subtract, np.multiply, np.divide, np.minimum, np.maximum, np.power),
    *(np.remainder, np.logaddexp),
    *(np.less, np.less_equal, np.equal, np.not_equal),
    *(lambda x, _, f=f: f(x) for f in (np.negative, np.absolute, np.sign, np.floor, np.isnan)),
    *(lambda x, _, f=f: f(x) for f in (np.ceil, np.rint, np.expm1, np.log1p, np.arctan)),
    *(lambda x, _, name=name: x.named(name, x) for name in ("erf", "sigmoid")),
    lambda x, _: x.astype(int),
]


def by_head(h: Any, values: list[Any]) -> Any:
    """Select one value for each head, so that several functions are compiled at once."""
    chosen = values[0]
    for n, value in enumerate(values[1:], 1):
        chosen = np.where(h == n, value, chosen)
    return chosen


@pytest.mark.parametrize("first", range(0, len(OF_INTEGERS), HQ))
def test_integers_that_overflow_and_divisors_of_zero(first: int, tmp_path: Path) -> None:
    def halves(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any) -> Any:
        value = by_head(h, [f(x[i], y[j]) for f in OF_INTEGERS[first : first + HQ]])
        return np.where(b == 0, value >> 32, value & 0xFFFFFFFF)

    compare(tmp_path, halves, None, (INTEGERS, INTEGERS), np.float64, np.zeros(SHAPE))


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("first", range(0, len(OF_FLOATS), HQ))
def test_floats_that_are_not_finite(first: int, dtype: Any, tmp_path: Path) -> None:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any) -> Any:
        some = OF_FLOATS[first : first + HQ]
        return by_head(h, [1.0 * f(x[i + 2 * b], x[j]) for f in some])

    compare(tmp_path, score, None, (FLOATS.astype(dtype),), dtype, np.zeros(SHAPE))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_elements_of_any_type_and_strides(dtype: str, tmp_path: Path) -> None:
    whole = np.random.default_rng(0).integers(0, 256, (3 * NK, 2 * NQ)).astype(dtype)
    x = whole[::-3, 1::2].T

    def score(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any) -> Any:
        return s + x[i - 1, j + 1] + y

    compare(tmp_path, score, None, (x, np.array(3, dtype)), np.float32, np.ones(SHAPE))


# --- kernels ------------------------------------------------------------------------------------


def planned(name: str, arch: str, dtype: Any, D: int, Nq: int, Nk: int) -> tuple[LaunchPlan, ...]:
    """Plan calls of a function of the gallery."""
    options = calls(2, 4, Nq, Nk, dtype)[name]
    q, k, v = (np.ones(x, dtype) for x in ((2, 4, Nq, D), (2, 2, Nk, D), (2, 2, Nk, D)))
    problem, x = parse(q, k, v, options)
    arrays = {"q": q, "k": k, "v": v, **{f"aux[{n}]": each for n, each in enumerate(x.aux)}}
    layouts = tuple((name, array_layout(each, 0)) for name, each in arrays.items())
    layout = CallLayout(layouts, (Nk,) * 2, (Nk - Nq,) * 2)
    return plans_of(problem, layout, device_of_arch(arch))


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("name", sorted(GALLERY))
def test_the_gallery_compiles(name: str, compiled_quickly: Callable[..., Compiled]) -> None:
    arch = ("sm_80", "sm_90a")[sorted(GALLERY).index(name) % 2]
    for launch in planned(name, arch, np.float16, 64, 67, 93)[0].launches:
        made = compiled_quickly(launch.key, arch)
        assert made.registers is not None
        assert COMPLAINT.search(made.log) is None, made.log


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("name", "dtype", "D"),
    [
        pytest.param("relative_bias", np.float32, 32, marks=pytest.mark.slow),
        pytest.param("soft_cap", np.float64, 512, marks=pytest.mark.slow),
        ("tree", np.float16, 40),
    ],
)
def test_every_kernel_with_functions_compiles(
    name: str, dtype: Any, D: int, compiled_quickly: Callable[..., Compiled]
) -> None:
    plans = planned(name, "sm_90a", dtype, D, 67, 93)
    keys = {launch.key for plan in plans for launch in plan.launches if launch.key.functions}
    found = {key.kernel.removeprefix("backward_").removeprefix("naive_") for key in keys}
    own = {"forward_sm90", "sm90"} if dtype == np.float16 else {"forward"}
    arrays = {"tree": {"classify_tiles"}, "relative_bias": {"daux", "daux_sum"}}.get(name, set())
    assert found == arrays | own | {"large_scores", "dkdv", "dq"}
    for key in keys:
        made = compiled_quickly(key, "sm_90a")
        assert COMPLAINT.search(made.log) is None, made.log


_OWN = """\
#include "params.cuh"
extern "C" __global__ void own(const __grid_constant__ Params p, Accum* s) {
    s[1] = ScoreFunction(p, blockIdx.y, blockIdx.x).score(s[0], threadIdx.x, threadIdx.y, s[2]);
    s[3] = MaskFunction(p, blockIdx.y, blockIdx.x).visible(threadIdx.x, threadIdx.y);
}
"""


def every_operation(s: Any, b: Any, h: Any, i: Any, j: Any, n: Any, m: Any, x: Any) -> Any:
    total = s
    for op in FUNCTIONS:
        for taken in ((n, m), (s, x), (n < m, s < x)):
            given = (n < m, *taken) if op == "where" else taken[: _input_count(op)]
            try:
                y = s.named(op, *given)
            except TypeError:  # not of these kinds
                continue
            total = total + y * 1.5
    return total + total.astype(int)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_every_operation_compiles(dtype: str, tmp_path: Path) -> None:
    aux = np.ones((), np.int32), np.ones((), np.int64), np.ones((), np.float16)
    score = score_expression(every_operation, aux)
    mask = mask_expression(
        lambda b, h, i, j, *arrays: every_operation(1.0 * j, b, h, i, j, *arrays) > 0, aux
    )
    accum = np.dtype("float64" if dtype == "float64" else "float32")
    text = functions_text(score, mask, tuple((x.dtype.name, 0) for x in aux), accum)
    assert [op for op in FUNCTIONS if text.count(f"numpy::{op}(") < 2] == []
    (tmp_path / "own.cu").write_text(_OWN, encoding="utf-8")
    key = KernelKey("own", dtype, functions=text)
    log = compiled(key, "sm_80", (SOURCES, tmp_path)).log
    assert COMPLAINT.search(log) is None, log


@pytest.mark.usefixtures("nvrtc")
def test_arrays_lie_behind_the_other_parameters(tmp_path: Path) -> None:
    (plan, *_) = planned("tree", "sm_90a", np.float32, 64, 67, 93)
    places = slots(plan.aux, len(plan.cells))
    lines = [
        '#include "params.cuh"',
        f"static_assert(sizeof(Params) == {len(template({}, plan.aux, plan.cells))});",
    ]
    for n, name in enumerate(("x0", "x1")):
        lines.append(
            f"static_assert(__builtin_offsetof(Params, {name}) == {8 * places[aux_name(n)]});"
        )
    (tmp_path / "layout.cu").write_text("\n".join(lines), encoding="utf-8")
    key = KernelKey("layout", "float32", functions=plan.launches[0].key.functions)
    assert compiled(key, "sm_80", (SOURCES, tmp_path)).image


def test_no_length_is_part_of_a_kernel() -> None:
    for name in GALLERY:
        plans = (
            planned(name, "sm_90a", np.float32, 64, *lengths) for lengths in ((67, 93), (105, 79))
        )
        keys = [[launch.key for plan in some for launch in plan.launches] for some in plans]
        assert keys[0] == keys[1]


def test_without_pairs_no_function_is_computed() -> None:
    """Arrays may be empty then, and a value that depends only on the head would read an element."""
    for lengths in ((0, 9), (9, 0)):
        plans = planned("temperature", "sm_90a", np.float32, 64, *lengths)
        assert not any(launch.key.functions for plan in plans for launch in plan.launches)


def test_quick_functions_of_16_bit_calls(tmp_path: Path) -> None:
    """Small numbers keep their digits, and quotients of integers can be rounded down."""
    rng = np.random.default_rng(0)
    integers = rng.integers(-9999, 9999, (2, 4000)) | 1
    wide = np.ldexp(rng.normal(size=(2, 4000)), rng.integers(-60, 60, (2, 4000)))
    special = [(1, 0), (0, 0), (np.inf, 2), (3, np.inf), (np.nan, 1), (1e-40, 2e-39), (3e38, 2e38)]
    pairs: list[Any] = [(integers[0] % 999 * integers[1], integers[1]), wide, np.transpose(special)]
    x, y = np.concatenate(pairs, axis=1).astype(np.float32)
    quotients, tanhs = quick(tmp_path, x, y)
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) / y, np.tanh(x.astype(np.float64))
        for found, right in zip((quotients, tanhs), expected, strict=True):
            rounded = right.astype(np.float32)
            np.testing.assert_array_equal(np.isnan(found), np.isnan(rounded))
            finite = np.isfinite(rounded)
            np.testing.assert_array_equal(found[~finite], rounded[~finite])
            near = np.abs(found - rounded)[finite] <= 4 * np.spacing(np.abs(rounded[finite]))
            assert near.all()
        whole = np.isfinite(expected[0]) & (np.floor(expected[0]) == expected[0])
        whole &= np.abs(expected[0]) < 2**24
    assert whole.sum() > 10
    np.testing.assert_array_equal(quotients[whole], expected[0][whole])


def test_which_kernels_run_them() -> None:
    for name in ("alibi", "tree"):
        for dtype, kernel in ((np.float16, "forward_sm90"), (np.float32, "forward")):
            forward, *_ = planned(name, "sm_90a", dtype, 64, 67, 93)
            launch = forward.launches[-1]
            assert launch.key.kernel == kernel
            assert launch.key.functions
