"""Numbers that functions capture: a new value is a new parameter of the same expression."""

import functools
import gc
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileattn.expressions import functions
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.functions import expression_of, mask_expression, score_expression
from tileattn.expressions.nodes import ordered
from tileattn.expressions.parameters import Expression

PLACES = dict(zip("bhij", np.ogrid[:2, :3, :7, :9], strict=True))
S = np.random.default_rng(0).normal(size=(2, 3, 7, 9)).astype(np.float32)


def read(function: Any, name: str = "score_mod") -> Expression:
    return expression_of(function, (), name)


def values_of(function: Expression) -> Any:
    with np.errstate(all="ignore"):
        inputs = {"s": S, **PLACES}
        return evaluate([function.node], inputs, (), S.dtype, function.constants)[0]


def assert_as_with_constants(function: Any) -> None:
    """Compare the expression with the one whose numbers are constants, bit by bit."""
    expected = values_of(Expression(score_expression(function, ())))
    np.testing.assert_array_equal(values_of(read(function)), expected)


# --- random functions ---------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-9, 9),
    st.floats(-4, 4),
    st.sampled_from([0.0, -0.0, math.inf, math.nan, 2**31, 2**62, -(2**40), True, False]),
    st.builds(np.float32, st.floats(-4, 4, width=32)),
    st.builds(np.int32, st.integers(-9, 9)),
)
ARITHMETIC: list[Callable[..., Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, min, max, np.minimum, np.add, math.fmod),
    *(lambda x, y: x if x > y else y, lambda x, y: round(x) + y, lambda x, y: abs(x) - -y),
    *(lambda x, y: math.sqrt(abs(x)) + y, lambda x, y: sum(range(int(abs(x)) % 5)) + y),
    *(lambda x, y: x if isinstance(y, int) else y, lambda x, y: float(x) * y),
    lambda x, y: np.where(x < y, x, y),
]
USES: list[Callable[..., Any]] = [
    lambda s, i, x: s * x,
    lambda s, i, x: s / x - i,
    lambda s, i, x: np.where(i < x, s, x),
    lambda s, i, x: s + i % x if isinstance(x, int) else s % x,
    lambda s, i, x: s + (i // x if isinstance(x, int) and x else x),
    lambda s, i, x: np.logaddexp(s, x),
    lambda s, i, x: np.maximum(s, x) + x,
    lambda s, i, x: s**2 * x + (i << 2) - x,
]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_functions_with_numbers_that_change(data: Any) -> None:
    combine = data.draw(st.lists(st.sampled_from(ARITHMETIC), min_size=1, max_size=3))
    use = data.draw(st.lists(st.sampled_from(USES), min_size=1, max_size=2))

    def made(x: Any, y: Any) -> Any:
        def function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            z = x
            for one in combine:
                z = one(z, y)
            for one in use:
                s = one(s, i - j, z)
            return s

        return function

    for _ in range(3):
        function = made(data.draw(NUMBERS), data.draw(NUMBERS))
        with np.errstate(all="ignore"):
            try:
                expected = score_expression(function, ())
            except Exception as error:  # such as a division by zero
                with pytest.raises(type(error)):
                    read(function)
            else:
                np.testing.assert_array_equal(
                    values_of(read(function)), values_of(Expression(expected))
                )


# --- what becomes a parameter -------------------------------------------------------------------

SCALE = 0.5


def with_global(s: Any, *_: Any) -> Any:
    return s * SCALE


def scaled(by: Any) -> Any:
    return lambda s, *_: s * by


def by_default(by: Any) -> Any:
    def function(s: Any, *_: Any, by: Any = by) -> Any:
        return s * by

    return function


def by_another(by: Any) -> Any:
    inner = scaled(by)
    return lambda s, *_: inner(s) + 1.0


MAKERS: dict[str, Callable[[Any], Any]] = {
    "closure": scaled,
    "default": by_default,
    "another function": by_another,
    "partial": lambda by: functools.partial(lambda by, s, *_: s * by, by),
    "keyword": lambda by: functools.partial(lambda s, *_, by: s * by, by=by),
    "tuple": lambda by: scaled_by_first((by, 7)),
    "computed": lambda by: lambda s, *_: s * (2 * by + 1) / math.sqrt(by) - np.tanh(by),
    "branch": lambda by: lambda s, *_: s * by if by > 0 else s,
    "function": lambda by: lambda s, *_: np.where(s < math.floor(by), s, by),
}


def scaled_by_first(numbers: Any) -> Any:
    return lambda s, *_: s * numbers[0]


@pytest.mark.parametrize("number", [float, int, np.float32, np.int64, np.float16])
@pytest.mark.parametrize("name", MAKERS)
def test_a_new_number_is_not_traced(name: str, number: Any, monkeypatch: Any) -> None:
    made = MAKERS[name]
    first = read(made(number(3)))
    monkeypatch.setattr(functions, "trace", None)
    for value in (4, 5, 97):
        function = read(made(number(value)))
        assert function.node is first.node
        assert function.constants != first.constants
    monkeypatch.undo()
    for value in (3, 4, 97):
        assert_as_with_constants(made(number(value)))


def test_numbers_that_change_after_a_trace_are_seen(monkeypatch: Any) -> None:
    before = read(with_global)
    monkeypatch.setitem(with_global.__globals__, "SCALE", 0.25)
    assert read(with_global) == Expression(before.node, read(scaled(0.25)).constants)
    by = 2.0

    def function(s: Any, *_: Any) -> Any:
        return s * by

    before = read(function)
    by = 3.0
    assert read(function) == Expression(before.node, read(scaled(3.0)).constants)
    by = 3  # of another type
    assert read(function).node != before.node
    assert_as_with_constants(function)


def test_variables_that_functions_share() -> None:
    """Two functions that read one variable, or a variable each."""

    def made(x: Any, y: Any) -> Any:
        one, other = scaled(x), scaled(y)
        return lambda s, *_: one(s) - other(s) * 3.0

    def twice(x: Any) -> Any:
        one = other = scaled(x)
        return lambda s, *_: one(s) - other(s) * 3.0

    for function in (twice(2.0), made(2.0, 5.0), twice(4.0), made(2.0, 2.0), made(7.0, 1.5)):
        assert_as_with_constants(function)
    assert len(read(twice(9.0)).constants) == 1
    assert len(read(made(9.0, 9.0)).constants) == 2


def test_a_function_that_calls_itself() -> None:
    def made(by: Any) -> Any:
        def power(s: Any, n: int) -> Any:
            return s if n == 0 else power(s, n - 1) * by

        return lambda s, *_: power(s, 3)

    for by in (2.0, 0.3):
        assert_as_with_constants(made(by))


def test_functions_that_are_nested_deeply() -> None:
    def made(by: Any) -> Any:
        function = scaled(by)
        for _ in range(7):
            function = around(function)
        return function

    def around(inner: Any) -> Any:
        return lambda s, *_: inner(s) + 1.0

    for by in (2.0, 0.3):
        assert_as_with_constants(made(by))


def test_integers_that_divide_are_compiled_in_once() -> None:
    def chunks(width: int) -> Any:
        return lambda s, b, h, i, j: s + i // width

    nodes = [read(chunks(width)).node for width in (64, 64, 7, -3, 64, 1000)]
    assert nodes[0] == nodes[1] == nodes[4] != nodes[2] == nodes[3] == nodes[5]
    assert not any(x.op == "parameter" for x in ordered([nodes[0]]))
    for width in (64, 7, -3, 0):
        assert_as_with_constants(chunks(width))


def test_far_integers_are_constants() -> None:
    function = read(scaled(2**30 - 1))
    assert read(scaled(-(2**30))).node == function.node
    for value in (2**30, -(2**30) - 1, 2**63 - 1):
        assert read(scaled(value)).constants == ()
        assert_as_with_constants(scaled(value))
    with pytest.raises(TypeError, match=f"integers of 64 bits; got {2**63}"):
        read(scaled(2**63))


def test_booleans_choose_an_expression() -> None:
    def made(flag: bool) -> Any:
        return lambda s, *_: np.where(flag, s, 2.0) if flag else s * flag

    assert read(made(True)).node != read(made(False)).node
    for flag in (True, False):
        assert_as_with_constants(made(flag))


def test_errors_name_the_numbers_of_the_call() -> None:
    def made(by: Any) -> Any:
        return lambda s, *_: s * (1 / by)

    read(made(2.0))
    with pytest.raises(ZeroDivisionError):
        read(made(0.0))


# --- functions of unknown state -----------------------------------------------------------------


class Layer:
    """An object whose attributes a function reads."""

    def __init__(self, width: int, scale: float) -> None:
        self.width, self.scale = width, scale

    def mask(self, _b: Any, _h: Any, i: Any, j: Any) -> Any:
        return (i - j < self.width) & (j >= 2)


def test_attributes_become_parameters_too() -> None:
    """The function is traced again, but kernels are compiled once. Literals are constants."""
    first, other = (read(Layer(width, 0.5).mask, "mask_mod") for width in (5, 7))
    assert first.node == other.node
    assert (first.constants, other.constants) == ((5,), (7,))
    layer = Layer(3, 0.5)
    table = np.arange(9.0)
    for scale in (0.3, 7):
        layer.scale = scale
        function = read(lambda s, b, h, i, j: s * layer.scale + 3.0 * h)
        assert function.constants == read(scaled(float(scale))).constants
    found = [
        expression_of(lambda s, b, h, i, j, x: x[h] * s * layer.scale, (table,), "score_mod").node
        for layer.scale in (0.3, 0.7)
    ]
    assert found[0] == found[1]


# --- caches -------------------------------------------------------------------------------------


def test_ten_thousand_numbers_leave_nothing() -> None:
    def windowed(width: int, scale: float) -> Any:
        return lambda s, b, h, i, j: np.where(i - j < width, s * scale, s) + (scale > 3)

    def counted(width: int) -> Any:
        return lambda s, b, h, i, j: sum(s * n for n in range(width % 700))

    read(windowed(1, 1.0))
    before = sizes()
    for n in range(10_000):
        read(windowed(n, 0.5 + n))
        if n % 10 == 0:
            read(counted(n % 97))
    gc.collect()
    after = sizes()
    assert after - before <= functions._MOST


def sizes() -> int:
    caches = functions._TRACES, functions._EXACT
    return sum(map(len, caches)) + sum(map(len, functions._TRACES.values()))


def test_masks_with_captured_windows() -> None:
    def made(low: int, high: int) -> Any:
        return lambda b, h, i, j: (i - j < high) & (i - j >= low)

    first = read(made(0, 3), "mask_mod")
    inputs = dict(zip("ij", np.ogrid[:40, :50], strict=True))
    for low, high in ((0, 3), (-2, 5), (7, 7), (-50, 50)):
        function = read(made(low, high), "mask_mod")
        assert function.node == first.node
        dtype = np.dtype(np.float64)
        (found,) = evaluate([function.node], inputs, (), dtype, function.constants)
        (expected,) = evaluate([mask_expression(made(low, high), ())], inputs, (), dtype)
        np.testing.assert_array_equal(found, expected)


# --- Python that needs the value ----------------------------------------------------------------

PYTHON: dict[str, Callable[[Any], Any]] = {
    "numpy type": lambda c: lambda s, *_: s * np.float32(c),
    "array": lambda c: lambda s, *_: s * np.array(c) + np.asarray(c)[()] + np.full((), c),
    "isclose": lambda c: lambda s, *_: s * math.isclose(c, 3),
    "reduction": lambda c: lambda s, *_: s * np.sum((c, c)),
    "round": lambda c: lambda s, *_: s * round(c, 1) + round(c),
    "length": lambda c: lambda s, *_: s * len("x" * int(c)),
    "divmod": lambda c: lambda s, *_: s * divmod(c, 2)[0] + divmod(7, c)[1],
    "member": lambda c: lambda s, *_: s * (c in (3, 4)),
    "chain": lambda c: lambda s, *_: s * (1 < c < 4),
    "sorted": lambda c: lambda s, *_: s * sorted((3, c, 1))[1],
    "zip": lambda c: lambda s, *_: sum(a * s for a, b in zip((c, 1), (2, c), strict=True) if a < b),
    "where": lambda c: lambda s, *_: np.where(np.isfinite(c), s, c),
    "clip": lambda c: lambda s, *_: np.clip(s, -c, c) * np.clip(c, 0, 3.5),
    "attribute": lambda c: lambda s, *_: s * c.real,
    "bits": lambda c: lambda s, b, h, i, j: s * ((i & c) + (c ^ j) + (c >> 1) + (i << c)),
    "power": lambda c: lambda s, *_: s**c + c**2 + 2**c + 2.0**s * c + c**s,
    "isin": lambda c: lambda s, b, h, i, j: np.where(np.isin(i, [1, c]), s, 0),
    "operator": lambda c: lambda s, *_: operator.add(s, c) * operator.neg(c),
    "extrema": lambda c: lambda s, *_: np.minimum(s, max(c, 2)) + min(1, c),
    "mathematics": lambda c: lambda s, *_: s * math.log2(c) + math.pi * c + math.hypot(c, 3),
    "not": lambda c: lambda s, *_: s if not c else -s,
    "alone": lambda c: lambda s, *_: c,
    "any": lambda c: lambda s, *_: s * any((c > 3, c < 1)) + sum(map(float, (c, 2))),
}


@pytest.mark.parametrize("name", PYTHON)
def test_python_that_needs_the_value(name: str) -> None:
    for number in (3, 4, 3.0, 2.5, np.float32(3.3), np.int64(4), -1, 0.0):
        function = PYTHON[name](number)
        with np.errstate(all="ignore"):
            try:
                expected = score_expression(function, ())
            except Exception as error:  # whatever Python raises
                with pytest.raises(type(error)):
                    read(function)
            else:
                found = values_of(read(function))
                np.testing.assert_array_equal(found, values_of(Expression(expected)))
