"""The caller's own functions in emitted code, against NumPy's evaluation of the expressions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

from llvmlite import ir

from tests.expressions.random_functions import AUX, HQ, NK, NQ, B, as_function, drawn
from tests.gallery import calls
from tests.kernels.llvm.emitted import call, on_targets
from tileattn.algorithm.function_mask import BLOCK, FunctionMask
from tileattn.backends.llvm import arrays as llvm_arrays
from tileattn.backends.llvm.arrays import as_inputs, aux_table
from tileattn.call.parse import parse
from tileattn.expressions.build import FUNCTIONS
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.functions import mask_expression, score_expression
from tileattn.expressions.intervals import ROUNDED as MONOTONE
from tileattn.expressions.nodes import Kind, Node, ordered
from tileattn.expressions.parameters import Expression, lifted
from tileattn.kernels.llvm.attention.expressions import TileFunctions
from tileattn.kernels.llvm.compile import host
from tileattn.kernels.llvm.instructions.code import I1, I8, I64, Code
from tileattn.kernels.llvm.params import EMPTY, FULL
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.user_functions import Functions

ROUNDED = {*MONOTONE, "sin", "cos", "power"}
"""Operations that another library rounds otherwise."""


def table_of(aux: Any, function: Expression) -> Any:
    """Write down the arrays and the parameters as a call does."""
    q = np.zeros((1, 1, 1, 1))
    option = "mask_mod" if function.node.kind == Kind.BOOLEAN else "score_mod"
    own: dict[str, Any] = {option: function.node, "constants": function.constants}
    return aux_table(replace(parse(q, q, q, {})[0], **own), aux)


def emitted(
    target: Target,
    node: Node,
    inputs: dict[str, Any],
    aux: Any,
    dtype: str,
    constants: tuple[int, ...] = (),
) -> Any:
    """Run the code of an expression on one vector."""
    lanes = target.vector_bytes // np.dtype(dtype).itemsize
    mask = node.kind == 0
    facts = tuple((x.dtype.name, x.ndim) for x in aux)
    functions = Functions(None if mask else node, node if mask else None, facts)

    def body(c: Code, s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, to: Any) -> None:
        kind = ir.VectorType(I64, c.lanes)
        places = {"b": b, "h": h, "i": i, "j": j}
        found = {name: c.load(place, kind) for name, place in places.items()}
        found["j"] = c.load(j, I64)  # the same for all lanes
        parameters = SimpleNamespace(aux=table)
        tile = TileFunctions(c, parameters, functions, lambda _: [found])
        if mask:
            (x,) = tile.visible(None)
            assert x.type.element == I1
            c.store(c.b.zext(x, ir.VectorType(I8, c.lanes)), to)
        else:
            c.store(tile.scores(None, [c.load(s)], grad=False)[0][0], to)

    given = {n: np.broadcast_to(x, lanes).astype(np.int64) for n, x in inputs.items() if n != "s"}
    s = np.broadcast_to(inputs.get("s", 0.0), lanes).astype(dtype)
    out = np.empty(lanes, np.bool_ if mask else dtype)
    table = table_of(aux, Expression(node, constants))
    call(target, dtype, body, s, *(given[n] for n in "bhij"), table, out)
    return out


def drawn_inputs(draw: Any, lanes: int) -> dict[str, Any]:
    """Draw indices of a call, the same key for all lanes."""
    sizes = {"b": B, "h": HQ, "i": NQ}
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found: dict[str, Any] = {name: rng.integers(0, n, lanes) for name, n in sizes.items()}
    return found | {"j": rng.integers(0, NK), "s": 3 * rng.normal(size=lanes)}


@pytest.mark.parametrize("scores", [True, False], ids=["score", "mask"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_functions_are_computed_as_by_numpy(scores: bool, data: Any) -> None:
    made = drawn(data.draw, "f" if scores else "b", data.draw(st.integers(1, 3)), scores)
    trace = score_expression if scores else mask_expression
    node = trace(as_function(made, scores), AUX)
    assume(not ROUNDED & {x.op for x in ordered([node])})
    lanes = host().vector_bytes // 8
    inputs = drawn_inputs(data.draw, lanes)
    if not scores:
        del inputs["s"]
    with np.errstate(all="ignore"):
        (expected,) = evaluate([node], inputs, AUX, np.dtype(np.float64))
    found = emitted(host(), node, inputs, AUX, "float64")
    np.testing.assert_array_equal(found, np.broadcast_to(expected, lanes))


@pytest.mark.parametrize("scores", [True, False], ids=["score", "mask"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_parameters_are_computed_as_constants(scores: bool, data: Any) -> None:
    made = drawn(data.draw, "f" if scores else "b", data.draw(st.integers(1, 3)), scores)
    node = (score_expression if scores else mask_expression)(as_function(made, scores), AUX)
    function = lifted(node)
    inputs = drawn_inputs(data.draw, host().vector_bytes // 8)
    expected = emitted(host(), node, inputs, AUX, "float64")
    found = emitted(host(), function.node, inputs, AUX, "float64", function.constants)
    np.testing.assert_array_equal(found, expected)


UNARY: dict[str, Any] = {
    "exp": np.exp,
    "log": np.log,
    "log2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "power": lambda s: abs(s) ** 1.3,
    "expm1": np.expm1,
    "log1p": np.log1p,
    "arctan": np.arctan,
    "erf": lambda s: s.named("erf", s) if hasattr(s, "named") else FUNCTIONS["erf"](s),
    "sigmoid": lambda s: s.named("sigmoid", s) if hasattr(s, "named") else FUNCTIONS["sigmoid"](s),
    "logaddexp": lambda s: np.logaddexp(s, 0.5),
    "remainder": lambda s: s % 0.7,
    "remainder_of_negative": lambda s: np.remainder(s, -0.7),
    "remainder_by": lambda s: np.remainder(7.3, s),
    "ceil": np.ceil,
    "rint": np.rint,
}


@on_targets
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY)
def test_functions_that_are_rounded(name: str, dtype: str, target: Target) -> None:
    node = score_expression(lambda s, b, h, i, j: UNARY[name](s), ())
    lanes = target.vector_bytes // np.dtype(dtype).itemsize
    tiny = float(np.finfo(dtype).smallest_subnormal) * 8
    edges = [0.0, np.inf, -np.inf, np.nan, tiny, 1.0, -1.5, 80.0]
    for part in np.array_split(np.array([*edges, 0.3, 7.5, 1e-20, -40.0]), 12 // lanes or 1):
        s = np.resize(part, lanes).astype(dtype)
        with np.errstate(all="ignore"):
            expected = UNARY[name](s)
        inputs = {"b": 0, "h": 0, "i": 0, "j": 0, "s": s}
        found = emitted(target, node, inputs, (), dtype)
        # No error_bound: these are single functions. Each library rounds within a few ulp, and a
        # remainder or a power amplifies the rounding of its operands.
        np.testing.assert_allclose(found, expected, rtol=50 * float(np.finfo(dtype).eps))


def test_integers_have_the_semantics_of_numpy() -> None:
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    numbers = np.array([0, 1, -1, 7, -7, 64, low, high], np.int64)
    x, y = (z.ravel() for z in np.meshgrid(numbers, numbers))
    operations: list[Any] = [
        np.add, np.subtract, np.multiply, np.floor_divide, np.remainder, np.left_shift,
        np.right_shift, np.minimum, np.maximum, lambda x, _: abs(x), lambda x, _: np.sign(x),
        lambda x, _: -x, np.bitwise_xor,
    ]  # fmt: skip
    lanes = host().vector_bytes // 8
    for operation in operations:

        def halves(
            s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any, f: Any = operation
        ) -> Any:
            found = f(x[i >> 1], y[i >> 1])
            return np.where(i % 2 == 0, found >> 32, found & 0xFFFFFFFF).astype(float)

        node = score_expression(halves, (x, y))
        with np.errstate(all="ignore"):
            results = operation(x, y)
        for first in range(0, 2 * len(x), lanes):
            i = np.arange(first, first + lanes)
            found = emitted(host(), node, {"b": 0, "h": 0, "i": i, "j": 0}, (x, y), "float64")
            wanted = np.stack([results >> 32, results & 0xFFFFFFFF], 1).ravel()[i]
            np.testing.assert_array_equal(found, wanted)


MASKS = sorted(name for name, given in calls(2, 3, 300, 400).items() if "mask_mod" in given)


@pytest.mark.parametrize("name", MASKS)
def test_blocks_of_a_mask_hold_what_their_kinds_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm_arrays, "_MIN_WORK", 0)
    sizes = 2, 3, 300, 400
    options = calls(*sizes)[name]
    q, k = np.zeros((2, 3, 300, 1)), np.zeros((2, 3, 400, 1))
    problem, x = parse(q, k, k, options)
    kinds = as_inputs(problem, x)["block_kinds"]
    assert problem.mask_mod is not None
    pairs = np.broadcast_to(
        FunctionMask(problem.mask_mod, x.aux, constants=problem.constants).visible(
            *np.ogrid[:2, :3, :300, :400]
        ),
        sizes,
    )
    kinds = np.broadcast_to(kinds, (2, 3, *kinds.shape[2:]))
    for (b, h, m, n), kind in np.ndenumerate(kinds):
        block = pairs[b, h, m * BLOCK : (m + 1) * BLOCK, n * BLOCK : (n + 1) * BLOCK]
        assert kind != EMPTY or not block.any()
        assert kind != FULL or block.all()


def test_documents_leave_most_blocks_out() -> None:
    number = np.repeat(np.arange(16), 256)
    q = np.zeros((1, 1, 4096, 1))
    options = {"mask_mod": lambda b, h, i, j, of: of[i] == of[j], "aux": (number,)}
    kinds = as_inputs(*parse(q, q, q, options))["block_kinds"]
    assert (kinds == FULL).sum() == 16 * 4
    assert (kinds == EMPTY).sum() == 32 * 32 - 16 * 4
