"""Values and derivatives of random functions, against dual numbers; what is at kinks."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expressions.random_functions import AUX, HQ, NK, NQ, B, as_function, drawn
from tileattn.expressions.derivative import derivatives
from tileattn.expressions.evaluate import clamped, evaluate
from tileattn.expressions.functions import score_expression
from tileattn.oracle.dual import Clamped, Dual, tangents_of, value_of

PLACE = np.ogrid[:B, :HQ, :NQ, :NK]
SHAPE = (B, HQ, NQ, NK)
FLOAT64 = np.dtype(np.float64)


def traced(function: Callable[..., Any], s: Any, aux: Any = ()) -> tuple[Any, dict[Any, Any]]:
    """Evaluate a function and its derivatives, by s and summed at every element of an array.

    Values that are not finite have none.
    """
    node = score_expression(function, aux)
    by = derivatives(node)
    inputs = {"s": s, **dict(zip("bhij", PLACE, strict=True))}
    value, *found = evaluate([node, *by.values()], inputs, aux, FLOAT64)
    grads: dict[Any, Any] = {}
    for leaf, grad in zip(by, found, strict=True):
        of_pairs = np.where(np.isfinite(value), grad, 0) + np.zeros(SHAPE)
        if leaf.op == "input":
            grads["s"] = of_pairs
            continue
        array = aux[leaf.value]
        place = clamped(array, evaluate(leaf.inputs, inputs, aux, FLOAT64))
        total = grads.setdefault(leaf.value, np.zeros(array.shape))
        np.add.at(total, tuple(np.broadcast_to(x, SHAPE) for x in place), of_pairs)
    return np.broadcast_to(value, SHAPE), grads


def by_duals(function: Callable[..., Any], s: Any, aux: Any = ()) -> tuple[Any, dict[Any, Any]]:
    """Do the same with dual numbers."""
    reads: dict[Any, Any] = {}
    arrays = [
        Clamped(x.astype(np.int64) if x.dtype.kind == "i" else x, n, reads)
        for n, x in enumerate(aux)
    ]
    places = [Dual(x, {}) for x in PLACE]
    found = function(Dual(s, {("s",): np.ones(())}), *places, *arrays)
    grads: dict[Any, Any] = {}
    for direction, tangent in tangents_of(found).items():
        of_pairs = np.where(np.isfinite(value_of(found)), tangent, 0) + np.zeros(SHAPE)
        if direction == ("s",):
            grads["s"] = of_pairs
            continue
        total = grads.setdefault(direction[0], np.zeros(aux[direction[0]].shape))
        place = tuple(np.broadcast_to(x, SHAPE) for x in reads[direction])
        np.add.at(total, place, of_pairs)
    return np.broadcast_to(value_of(found), SHAPE), grads


@settings(max_examples=400)
@given(data=st.data())
def test_random_functions_are_those_of_dual_numbers(data: Any) -> None:
    function = as_function(drawn(data.draw, "f", data.draw(st.integers(1, 5))))
    s = np.random.default_rng(data.draw(st.integers(0, 9))).normal(size=SHAPE)
    wide = tuple(x.astype(np.longdouble) if x.dtype.kind == "f" else x for x in AUX)
    with np.errstate(all="ignore"):
        value, grads = traced(function, s, AUX)
        expected, of_expected = by_duals(function, s, AUX)
        exact, of_exact = by_duals(function, s.astype(np.longdouble), wide)
        slack = rounded_by(expected, exact)
    # `testing.error_bound` bounds attention, not functions. What rounding makes of this one is
    # measured in extended precision; the rest is for operations that differ, such as a power.
    np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12 + slack)
    for name, theirs in of_expected.items():
        ours = grads.get(name, np.zeros(theirs.shape))
        compared = np.isfinite(theirs)
        size = np.abs(theirs[compared]).max(initial=1)
        slack = rounded_by(theirs, of_exact[name])
        np.testing.assert_allclose(
            ours[compared],
            theirs[compared],
            rtol=1e-9,
            atol=1e-11 * size + slack,
            err_msg=str(name),
        )


def rounded_by(found: Any, exact: Any) -> float:
    """Give what rounding may make of it: a sine of a large number keeps few digits."""
    with np.errstate(all="ignore"):
        errors = np.abs(found - exact)
    return 8 * float(errors[np.isfinite(errors)].max(initial=0))


SMOOTH: list[Callable[..., Any]] = [
    lambda s, _b, h, _i, _j: np.arctan(s) * np.log1p(s * s) + np.expm1(s / (h + 1)),
    lambda s, _b, h, _i, j: np.logaddexp(s, 0.1 * j) + np.logaddexp(s * h, -s) + (s + 100) % 1000.0,
    lambda s, _b, _h, i, j: np.tanh(s) * np.exp(-(s**2)) + np.sqrt(2 + np.sin(s)) / (3 + i + j),
    lambda s, _b, h, _i, _j: np.log(2 + s * s) - np.log2(3 + np.cos(s)) + (2 + s * s) ** (h + 0.5),
    lambda s, _b, h, _i, _j: 2.0 ** (s / (h + 1)) + np.exp2(s) - np.where(h > 1, s**3, 1 / (4 + s)),
    lambda s, _b, _h, i, _j: abs(s - 100) + np.minimum(s, 50) + np.clip(s, -90.0, 90.0) * i + -s,
]


@pytest.mark.parametrize("function", SMOOTH)
def test_dual_numbers_are_central_differences(function: Callable[..., Any]) -> None:
    """In extended precision, of sixth order."""
    s = np.random.default_rng(1).normal(size=SHAPE).astype(np.longdouble)
    step = np.longdouble(2.0**-9)
    weights = {1: 0.75, 2: -0.15, 3: np.longdouble(1) / 60}
    difference = sum(
        w * (function(s + n * step, *PLACE) - function(s - n * step, *PLACE)) / step
        for n, w in weights.items()
    )
    with np.errstate(invalid="ignore"):  # log(x) of x**3, which nothing asks for
        _, grads = by_duals(function, s.astype(np.float64))
    # The difference is off by 2**-54 times a seventh derivative, here up to some hundreds.
    np.testing.assert_allclose(grads["s"], difference.astype(np.float64), rtol=2e-13, atol=2e-13)


KINKS: list[tuple[Callable[..., Any], float, float]] = [
    (abs, 0.0, 0.0),
    (lambda s: np.maximum(s, 0.0), 0.0, 0.5),
    (lambda s: np.minimum(s, 1), 1.0, 0.5),
    (lambda s: np.maximum(s, s), 3.0, 1.0),
    (lambda s: np.floor(s) * 3, 2.0, 0.0),
    (np.sign, 0.0, 0.0),
    (lambda s: np.ceil(s) * 3, 2.5, 0.0),
    (lambda s: np.round(s) * 3, 2.0, 0.0),
    (lambda s: s % 0.75, 0.5, 1.0),
    (lambda s: 7.5 % s, 2.0, -3.0),
    (lambda s: -7.5 % s, 2.0, 4.0),
    (lambda s: np.logaddexp(s, -np.inf), 0.0, 1.0),
    (lambda s: np.logaddexp(s, 1.0), 1.0, 0.5),
    (lambda s: s.sigmoid(), 0.0, 0.25),
    (lambda s: s.sigmoid(), -800.0, 0.0),
    (lambda s: s.erf(), 0.0, 2 / math.sqrt(math.pi)),
    (lambda s: np.where(s > 0, s * s, -s), 0.0, -1.0),
    (lambda s: s.astype(int) * 2.5, 1.0, 0.0),
    (lambda s: np.where(s > 0, np.log(s), 0.0), -1.0, 0.0),
    (lambda s: np.where(s > 0, np.sqrt(s), 2 * s), -1.0, 2.0),
    (lambda s: np.where(s == 0, 1.0, np.sin(s) / s), 0.0, 0.0),
    (lambda s: np.maximum(np.where(s > 0, np.log(s), -9.0), s), -1.0, 1.0),
    (lambda s: np.where(s > 0, np.exp(np.sqrt(s)), np.where(s < 0, 1 / s, s)), 0.0, 1.0),
    (lambda s: (s * 0 + 2.0) ** s, 0.0, float(np.log(2))),
    (lambda s: 0.0 ** (s + 1), 1.0, 0.0),
]


@pytest.mark.parametrize(("function", "at", "slope"), KINKS)
def test_subgradients(function: Callable[..., Any], at: float, slope: float) -> None:
    def score_mod(s: Any, *_: Any) -> Any:
        return function(s)

    s = np.full(SHAPE, at)
    with np.errstate(all="ignore"):
        for of in (traced, by_duals):
            grads = of(score_mod, s)[1]
            np.testing.assert_allclose(grads.get("s", np.zeros(SHAPE)), np.full(SHAPE, slope))


def test_a_derivative_grows_with_the_function_and_not_with_its_paths() -> None:
    """Forty conditions, one inside the other, have 2**40 paths."""

    def score_mod(s: Any, *_: Any) -> Any:
        for n in range(40):
            s = np.where(s > n, np.sin(s) * s, s + np.tanh(s))
        return s

    node = score_expression(score_mod, ())
    (by_s,) = derivatives(node).values()
    value, grad = evaluate([node, by_s], {"s": np.array([0.3, 2.0])}, (), FLOAT64)
    assert np.isfinite(value).all()
    assert np.isfinite(grad).all()
