"""What a function may be and do, what it is told where it may not, and when it is traced again."""

import functools
import gc
import math
import re
import sys
import weakref
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tileattn.expressions.build import apply
from tileattn.expressions.functions import (
    _outside,
    check_indices,
    expression_of,
    mask_expression,
    score_expression,
)
from tileattn.expressions.nodes import Kind, Node, ordered
from tileattn.expressions.parameters import Expression, parameter
from tileattn.expressions.state import state_of

TABLE = np.zeros(8)
FLOATS = (np.zeros(8), np.zeros((3, 4)))
INSIDE = "pass arrays as aux=(array, ...) and index them inside the function"
IF = "use numpy.where(condition, x, y) in place of if"
INTEGER = "uses a traced value as a plain integer"
NUMBER = "use numpy's functions in place of math's"


def refused(function: Any, message: str, aux: Any = (), name: str = "score_mod") -> None:
    expression = score_expression if name == "score_mod" else mask_expression
    with pytest.raises(TypeError, match=f"^{re.escape(name + ' ' + message)}"):
        expression(function, aux)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, b, h, i, j: s if i > j else -s, f"asks whether a traced value is true; {IF}"),
        (lambda s, b, h, i, j: i > j and s, "asks whether a traced value is true"),
        (lambda s, b, h, i, j: s * (not s), "asks whether a traced value is true"),
        (lambda s, b, h, i, j: np.where(0 < i < j, s, 0), "asks whether a traced value is true"),
        (lambda s, b, h, i, j: max(s, 0), "asks whether a traced value is true"),
        (lambda s, b, h, i, j: math.exp(s), f"asks for the number of a traced value; {NUMBER}"),
        (lambda s, b, h, i, j: float(s), "asks for the number of a traced value"),
        (lambda s, b, h, i, j: int(i), "asks for the number of a traced value"),
        (lambda s, b, h, i, j: round(s), "asks for the number of a traced value"),
        (lambda s, b, h, i, j: s + TABLE, "must compute with elements of an array"),
        (lambda s, b, h, i, j: TABLE * s, "must compute with elements of an array"),
        (
            lambda s, b, h, i, j: s + TABLE[h],
            "indexes `TABLE`, an array of dtype float64 that is no",
        ),
        (
            lambda s, b, h, i, j: s + [1.0, 2.0][h],
            f"{INTEGER}, to index a list or to count; {INSIDE}",
        ),
        (lambda s, b, h, i, j: s + sum(range(i)), INTEGER),
        (
            lambda s, b, h, i, j: s + np.asarray(i),
            f"turns a traced value into an array; {INSIDE}; ",
        ),
        (lambda s, b, h, i, j: np.sinh(s), "calls sinh; functions must be among absolute, add,"),
        (lambda s, b, h, i, j: np.add.reduce(s), "calls add.reduce; functions must be among"),
        (lambda s, b, h, i, j: np.sum(s), "calls sum; functions must be among"),
        (lambda s, b, h, i, j: np.add(s, 1, dtype=float), "calls add with dtype; leave"),
        (lambda s, b, h, i, j: np.where(i > j), "calls where with other arguments: missing"),
        (lambda s, b, h, i, j: s.clip(0, 1, 2), "calls clip with other arguments: too many"),
        (lambda s, b, h, i, j: np.round(s, 2), "rounds to 2 decimals; it must be 0"),
        (lambda s, b, h, i, j: np.isin(i, j), "calls isin; its second argument must be a list"),
        (
            lambda s, b, h, i, j: s * 1j,
            "must compute with booleans, integers and floats; got complex",
        ),
        (lambda s, b, h, i, j: s + "1", "must compute with booleans, integers and floats; got str"),
        (lambda s, b, h, i, j: s + 2**70, "must compute with integers of 64 bits; got 11805"),
        (lambda s, b, h, i, j: s[0], "indexes a number with 0"),
        (lambda s, b, h, i, j: sum(s), "asks for the elements of a traced value, which is one"),
        (
            lambda s, b, h, i, j: s // 2,
            "calls numpy.floor_divide of floats; its inputs must be integers",
        ),
        (lambda s, b, h, i, j: s & 1, "calls numpy.bitwise_and of floats; its inputs must be"),
        (lambda s, b, h, i, j: s + i**j, "calls numpy.power of integers with other exponents"),
        (lambda s, b, h, i, j: s - -(i > j), "calls numpy.negative of booleans; use ~ or ^"),
        (
            lambda s, b, h, i, j: s.astype(complex),
            "must convert to bool, int or float; got <class 'complex'>",
        ),
        (
            lambda s, b, h, i, j: None,
            "must return one value computed from its parameters; got NoneType",
        ),
        (
            lambda s, b, h, i, j: TABLE,
            "must return one value computed from its parameters; got ndarray",
        ),
        (
            lambda s, b, h, i, j: (s, s),
            "must return one value computed from its parameters; got tuple",
        ),
        (lambda s, b, h, i, j: s > 0, "must return the new score; got booleans (mask_mod="),
        (lambda s, b, h, i: s, "has the parameters (s, b, h, i); it is called with (s, b, h, i, j"),
    ],
)
def test_what_a_score_mod_may_not_do(function: Any, message: str) -> None:
    refused(function, message)


@pytest.mark.parametrize("value", [3, 0.5, "causal", Kind.FLOAT, [], object()])
def test_what_is_no_function_is_named(value: Any) -> None:
    message = "^score_mod must be a function; got "
    with pytest.raises(TypeError, match=message):
        score_expression(value, ())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, b, h, i, j: s, "has the parameters (s, b, h, i, j); it is called with"),
        (
            lambda s, b, h, i, j, t, u: s + t,
            "computes with aux[0], an array of 1 axes of which 0",
        ),
        (
            lambda s, b, h, i, j, t, u: s + u[h],
            "computes with aux[1], an array of 2 axes of",
        ),
        (lambda s, b, h, i, j, t, u: t * 2, "computes with aux[0], an array of 1 axes"),
        (lambda s, b, h, i, j, t, u: np.exp(t), "computes with aux[0], an array of 1 axes"),
        (lambda s, b, h, i, j, t, u: s + TABLE * t, "computes with aux[0], an array of 1 axes"),
        (lambda s, b, h, i, j, t, u: s + (u[i] * u[j]).sum(), "computes with aux[1], an array of"),
        (lambda s, b, h, i, j, t, u: s + u[i] @ u[j], "computes with aux[1], an array of 2 axes"),
        (
            lambda s, b, h, i, j, t, u: t,
            "must return one value computed from its parameters; got an array of aux",
        ),
        (lambda s, b, h, i, j, t, u: t[s], "must index aux[0] with integers; got a float"),
        (lambda s, b, h, i, j, t, u: t[i > j], "must index aux[0] with integers; got a boolean"),
        (
            lambda s, b, h, i, j, t, u: t[1:],
            "must index aux[0] with integers; got slice(1, None, None)",
        ),
        (lambda s, b, h, i, j, t, u: u[i, None], "must index aux[1] with integers; got None"),
        (lambda s, b, h, i, j, t, u: t[i, j], "indexes aux[0] with 2 indices; it has 1 axes"),
    ],
)
def test_what_is_not_done_with_aux(function: Any, message: str) -> None:
    refused(function, message, FLOATS)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda b, h, i, j: i - j,
            "must return booleans, True where the pair is visible; got integers",
        ),
        (
            lambda b, h, i, j: i * 0.5,
            "must return booleans, True where the pair is visible; got floats",
        ),
        (
            lambda b, h, i, j: 1,
            "must return booleans, True where the pair is visible; got integers",
        ),
        (lambda b, h, i, j: i >= j and h > 0, f"asks whether a traced value is true; {IF}"),
        (lambda s, b, h, i, j: i >= j, "has the parameters (s, b, h, i, j); it is called with (b"),
    ],
)
def test_what_a_mask_mod_may_not_do(function: Any, message: str) -> None:
    refused(function, message, name="mask_mod")


def test_an_error_of_the_function_itself_is_left_alone() -> None:
    with pytest.raises(ZeroDivisionError):
        score_expression(lambda s, *_: s + 1 / 0, ())


def test_numbers_of_every_kind_are_constants() -> None:
    width, cap = np.int32(7), ml_dtypes.bfloat16(1.5)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return np.where(i - j < width, s * cap, np.float32(-1.0)) + True

    constants = {x.value for x in ordered([score_expression(score_mod, ())]) if x.op == "constant"}
    assert constants == {7, 1.5, -1.0, 1.0}


def test_equal_subexpressions_are_one_node_and_equal_functions_one_expression() -> None:
    def score_mod(s: Any, _b: Any, h: Any, i: Any, j: Any) -> Any:
        return np.exp(s * (i - j)) + np.exp(s * (i - j)) * (h + 1)

    node = score_expression(score_mod, ())
    names = [x.op for x in ordered([node])]
    assert names.count("exp") == names.count("subtract") == 1
    other = score_expression(lambda s, _b, h, i, j: (e := np.exp(s * (i - j))) + e * (h + 1), ())
    assert other == node
    assert hash(other) == hash(node)
    assert other is not node
    assert score_expression(lambda s, *_: s + 0.0, ()) != score_expression(
        lambda s, *_: s + -0.0, ()
    )
    assert score_expression(lambda s, *_: s + math.nan, ()) == score_expression(
        lambda s, *_: s + np.float64("nan"), ()
    )


def test_kinds_of_arrays() -> None:
    def score_mod(s: Any, _b: Any, h: Any, *aux: Any) -> Any:
        *_, floats, integers, booleans = aux
        return s + np.where(booleans[h], floats[h], integers[h])

    aux = (np.zeros(3, np.float16), np.zeros(3, np.uint8), np.zeros(3, bool))
    reads = [x for x in ordered([score_expression(score_mod, aux)]) if x.op == "aux"]
    assert {x.value: x.kind for x in reads} == {
        0: Kind.FLOAT,
        1: Kind.INTEGER,
        2: Kind.BOOLEAN,
    }


# --- when a function is traced again ------------------------------------------------------------

SLOPE = 2.0


def with_global(s: Any, *_: Any) -> Any:
    return s * SLOPE


def key_of(function: Any) -> Any:
    state = state_of(function)
    assert state is not None
    return state.key


def test_a_function_is_traced_once() -> None:
    first, again = (expression_of(with_global, (), "score_mod") for _ in range(2))
    assert first.node is again.node


def test_what_an_object_holds_may_change_unseen() -> None:
    factors = [2.0]

    def score_mod(s: Any, *_: Any) -> Any:
        return s * factors[0]

    before = score_expression(score_mod, ())
    factors[0] = 3.0
    assert score_expression(score_mod, ()) != before


def test_what_a_function_reads_makes_it_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(by: Any) -> Any:
        return lambda s, *_: s * by

    assert key_of(scaled(2)) == key_of(scaled(2))
    states = [key_of(scaled(x)) for x in (2, 2.0, True, np.float32(2), -0.0, 0.0, (2,), None)]
    assert len({*states}) == len(states)
    before = score_expression(with_global, ())
    monkeypatch.setitem(with_global.__globals__, "SLOPE", 3.0)
    assert score_expression(with_global, ()) != before

    def with_default(s: Any, *_: Any, by: Any = 2.0) -> Any:
        return s * by

    before = score_expression(with_default, ())
    with_default.__kwdefaults__ = {"by": 4.0}
    assert score_expression(with_default, ()) != before

    inner = scaled(2.0)

    def outer(s: Any, *_: Any) -> Any:
        return inner(s)

    before = score_expression(outer, ())
    inner = scaled(5.0)
    assert score_expression(outer, ()) != before


def test_states_of_other_callables() -> None:
    assert state_of(functools.partial(with_global, 1)) is not None
    assert state_of(functools.partial(with_global, [1])) is None
    assert state_of([].append) is None

    class Object:
        def score_mod(self, s: Any, *_: Any) -> Any:
            return s * 2

    assert state_of(Object().score_mod) is None
    assert score_expression(Object().score_mod, ()).op == "multiply"


def test_neither_code_nor_modules_are_kept_alive() -> None:
    def made() -> list[Any]:
        numbers = ModuleType("numbers")
        scope: dict[str, Any] = {"numbers": numbers}
        exec("def outer():\n def inner(s, *_): return s * 2\n return inner", scope)
        exec("def with_module(s, *_): return s * numbers.factor", scope)
        exec("def imports(s, *_):\n import own_numbers\n return s * own_numbers.factor", scope)
        numbers.factor = 3.0  # type: ignore[attr-defined] # the module is empty
        sys.modules["own_numbers"] = numbers
        functions = [scope["outer"](), scope["with_module"], scope["imports"]]
        try:
            for function in functions:
                score_expression(function, ())
        finally:
            del sys.modules["own_numbers"]
        codes = [x.__code__ for x in functions]
        return [*map(weakref.ref, (numbers, *functions, *codes))]

    found = made()
    gc.collect()
    assert [x() for x in found] == [None] * len(found)


def test_equal_code_is_traced_once() -> None:
    text = "lambda s, b, h, i, j: s * 0.5 - abs(i - j)"
    one, other = eval(text), eval(text)
    assert one.__code__ is not other.__code__
    assert key_of(one) == key_of(other)
    assert expression_of(one, (), "score_mod").node is expression_of(other, (), "score_mod").node


def test_an_array_around_a_function_is_not_kept_alive() -> None:
    def around(array: Any) -> Any:
        return lambda s, *_: s * 0 if array is None else s

    array = np.zeros(9)
    gone = weakref.ref(array)
    score_expression(around(array), ())
    del array
    assert gone() is None


def test_indices_are_bounded_once_for_many_lengths() -> None:
    """Each of 500 lengths is checked, by bounds that are found once for a power of two."""
    mask = expression_of(lambda b, h, i, j, x: x[i - j] > 0, (TABLE,), "mask_mod")
    _outside.cache_clear()
    for n in range(512, 1012):
        check_indices("mask_mod", mask, ((n,),), (1, 1, n, n))
    assert _outside.cache_info().misses == 1


@pytest.mark.parametrize(("place", "misses"), [("value", 1), ("index", 9)])
def test_indices_are_bounded_again_for_the_numbers_that_they_read(place: str, misses: int) -> None:
    i, j = (Node("input", Kind.INTEGER, (), name) for name in "ij")
    index, number = apply("subtract", i, j), parameter(0, Kind.INTEGER)
    if place == "index":
        index = apply("add", index, number)
    node = apply("less", number, Node("aux", Kind.INTEGER, (index,), 0))
    _outside.cache_clear()
    for n in range(9):
        check_indices("mask_mod", Expression(node, (n,)), ((32,),), (1, 1, 8, 8))
    assert _outside.cache_info().misses == misses


@pytest.mark.parametrize(("n", "inside"), [(599, False), (600, False), (601, True), (1000, True)])
def test_indices_are_checked_by_the_sizes_of_the_call(n: int, inside: bool) -> None:
    mask = expression_of(lambda b, h, i, j, x: x[i + 600] > 0, (TABLE,), "mask_mod")
    if inside:
        check_indices("mask_mod", mask, ((n,),), (1, 1, 1000, 1000))
    else:
        with pytest.raises(ValueError, match=f"of shape \\({n},\\), with 600 to 1599; indices"):
            check_indices("mask_mod", mask, ((n,),), (1, 1, 1000, 1000))
