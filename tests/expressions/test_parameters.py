"""Parameters of expressions: constants whose values are not part of the expression."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expressions.random_functions import AUX, HQ, NK, NQ, B, as_function, drawn
from tileattn.expressions.derivative import derivatives
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.extrema import RangeExtrema
from tileattn.expressions.functions import mask_expression, score_expression
from tileattn.expressions.intervals import bounds
from tileattn.expressions.nodes import Kind, Node, ordered
from tileattn.expressions.parameters import (
    Expression,
    cell_of,
    hoisted,
    joined,
    lifted,
    number_of,
)

EXTREMA = [RangeExtrema(x) for x in AUX]


def drawn_expression(data: Any, scores: bool) -> tuple[Node, Expression]:
    """Draw an expression, and the same with parameters in place of its constants."""
    made = drawn(data.draw, "f" if scores else "b", data.draw(st.integers(1, 3)), scores)
    trace = score_expression if scores else mask_expression
    node = trace(as_function(made, scores), AUX)
    return node, lifted(node)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_parameters_are_computed_as_constants(dtype: Any, data: Any) -> None:
    node, function = drawn_expression(data, scores=True)
    s = np.random.default_rng(0).normal(size=(B, HQ, NQ, NK)).astype(dtype)
    inputs = {"s": s, **dict(zip("bhij", np.ogrid[:B, :HQ, :NQ, :NK], strict=True))}
    with np.errstate(all="ignore"):
        expected = evaluate([node, *derivatives(node).values()], inputs, AUX, np.dtype(dtype))
        outputs = [function.node, *derivatives(function.node).values()]
        found = evaluate(outputs, inputs, AUX, np.dtype(dtype), function.constants)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        whole = np.broadcast_shapes(one.shape, other.shape)
        np.testing.assert_array_equal(np.broadcast_to(one, whole), np.broadcast_to(other, whole))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bounds_of_parameters_are_those_of_constants(data: Any) -> None:
    node, function = drawn_expression(data, scores=False)
    first = [data.draw(st.integers(0, n - 1)) for n in (B, HQ, NQ, NK)]
    ranges = {
        name: (float(low), float(data.draw(st.integers(low, n - 1))))
        for name, low, n in zip("bhij", first, (B, HQ, NQ, NK), strict=True)
    }
    dtype = np.dtype(np.float64)
    expected = bounds(node, ranges, EXTREMA, dtype)
    assert bounds(function.node, ranges, EXTREMA, dtype, function.constants) == expected
    low, high = bounds(function.node, ranges, EXTREMA, dtype)
    assert low <= expected[0]
    assert high >= expected[1]


@pytest.mark.parametrize("x", [0.0, -0.0, np.inf, -np.inf, np.nan, 0.1, 5e-324, 0, -1, 2**30])
def test_cells_tell_numbers_apart(x: float) -> None:
    kind = Kind.FLOAT if isinstance(x, float) else Kind.INTEGER
    again = number_of(kind, cell_of(x))
    assert type(again) is type(x)
    np.testing.assert_array_equal([again, np.signbit(again)], [x, np.signbit(x)])
    assert Expression(Node("input", kind, (), "s"), (cell_of(x),)) == Expression(
        Node("input", kind, (), "s"), (cell_of(again),)
    )


def test_negative_zero_is_another_number() -> None:
    assert cell_of(0.0) != cell_of(-0.0)


def test_expressions_are_values() -> None:
    node = score_expression(lambda s, b, h, i, j: np.where(i - j < 5, s * 0.3, -2.5), ())
    function = lifted(node)
    assert len(function.constants) == 3
    assert Expression.from_text(function.to_text()) == function
    assert pickle.loads(pickle.dumps(function)) == function
    assert lifted(
        score_expression(lambda s, b, h, i, j: np.where(i - j < 7, s * 0.1, 4.5), ())
    ) == (Expression(function.node, tuple(map(cell_of, (7, 0.1, 4.5)))))


def test_what_parameters_alone_decide_is_hoisted_once() -> None:
    """Half of the logarithm of a sum is computed in float64, and rounded once."""
    node = score_expression(lambda s, b, h, i, j: np.logaddexp(s, 0.3), ())
    function = lifted(node)
    inputs = {"s": np.linspace(-2, 2, 9, dtype=np.float32)}
    dtype = np.dtype(np.float32)
    (expected,), (found,) = (
        evaluate([x], inputs, (), dtype, constants)
        for x, constants in ((node, ()), (function.node, function.constants))
    )
    np.testing.assert_array_equal(found, expected)
    assert not any(x.op == "input" for x in ordered(hoisted((function.node,))))


def test_masks_are_joined_with_their_own_numbers() -> None:
    near, far = (
        lifted(mask_expression(function, ()))
        for function in (lambda b, h, i, j: i - j < 4, lambda b, h, i, j: i - j > -3)
    )
    both = joined("bitwise_and", near, far)
    assert both.constants == (4, -3)
    inputs = dict(zip("ij", np.ogrid[:9, :9], strict=True))
    (found,) = evaluate([both.node], inputs, (), np.dtype(np.float64), both.constants)
    distance = inputs["i"] - inputs["j"]
    np.testing.assert_array_equal(found, (distance < 4) & (distance > -3))
