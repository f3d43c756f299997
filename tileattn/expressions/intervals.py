"""The interval visitor: bound expressions over many ranges of indices at once.

An interval is a pair of arrays, the smallest and the largest value; both are NaN if unknown.
Booleans are 0 and 1, integers are float64 up to 2**53; larger or non-finite values are unknown.
Floats have the dtype of the evaluation: correctly rounded arithmetic is monotone, so bounds hold
for the rounded values.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.expressions.build import FUNCTIONS
from tileattn.expressions.extrema import RangeExtrema
from tileattn.expressions.nodes import INDICES, Kind, Node, elements, ordered
from tileattn.expressions.parameters import NEAR, hoisted

Array = NDArray[Any]
Interval = tuple[Any, Any]

_ENDS = (2.0**31, 2.0**31, 2.0**30, 2.0**30)
INDEX_RANGES = {name: (0.0, end - 1) for name, end in zip(INDICES, _ENDS, strict=True)}
"""First and last index of any call; differences of two indices fit 32 bits."""

ROUNDED = ("exp", "expm1", "log", "log1p", "log2", "tanh", "arctan", "erf", "sigmoid")
"""Monotone functions that libraries round in different ways; ``sin``, ``cos`` and ``power`` too."""

_EXACT = float(1 << 53)  # up to which float64 holds every integer
_BITS = 52


def bounds(
    output: Node,
    inputs: Mapping[str, Interval],
    aux: Sequence[RangeExtrema | None],
    dtype: np.dtype[Any],
    constants: Sequence[int] | None = None,
) -> Interval:
    """Bound an expression.

    ``inputs`` has first and last value of each index; a missing one is unknown. ``aux`` has None
    for an unknown array. ``constants`` are the cells of the parameters; None for unknown ones.
    """
    return all_bounds([output], inputs, aux, dtype, constants)[output]


def all_bounds(
    outputs: Sequence[Node],
    inputs: Mapping[str, Interval],
    aux: Sequence[RangeExtrema | None],
    dtype: np.dtype[Any],
    constants: Sequence[int] | None = None,
) -> dict[Node, Interval]:
    """Bound some expressions and all that they are made of, down to known hoisted ones."""
    found: dict[Node, Interval] = {}
    known: dict[Node, bool | int | float] = {}
    if constants:
        of = hoisted(tuple(outputs))
        known = dict(zip(of, of.numbers(constants), strict=True))
    with np.errstate(all="ignore"):
        for node in ordered(outputs, known):
            of_dtype = dtype if node.kind == Kind.FLOAT else np.dtype(np.float64)
            if node in known:
                ends = (of_dtype.type(known[node]),) * 2
            else:
                given = [found[x] for x in node.inputs]
                ends = _bounds(node, given, inputs, aux, of_dtype)
            found[node] = _known(node, *ends)
    return found


def _bounds(
    node: Node,
    given: list[Interval],
    inputs: Mapping[str, Interval],
    aux: Sequence[RangeExtrema | None],
    dtype: np.dtype[Any],
) -> Interval:
    if node.op == "input":
        low, high = inputs.get(str(node.value), (np.nan, np.nan))
        return np.asarray(low, dtype), np.asarray(high, dtype)
    if node.op == "constant":
        return (dtype.type(node.value),) * 2
    if node.op == "parameter":
        far = np.nan if node.kind == Kind.FLOAT else float(NEAR)
        return dtype.type(-far), dtype.type(far - 1)
    if node.op == "aux":
        extrema = aux[int(node.value or 0)]
        return (dtype.type(np.nan),) * 2 if extrema is None else _element(extrema, given, dtype)
    if node.op == "cast":
        low, high = (x.astype(dtype) for x in given[0])
        return (np.trunc(low), np.trunc(high)) if node.kind == Kind.INTEGER else (low, high)
    if node.kind == Kind.BOOLEAN and node.op in _OF_BOOLEANS:
        return _OF_BOOLEANS[node.op](*given)
    if node.kind == Kind.FLOAT and node.op in _OF_FLOATS:
        return _OF_FLOATS[node.op](*given)
    if node.op in _RULES:
        return _RULES[node.op](*given)
    return _at_corners(FUNCTIONS[node.op], *given)


def _known(node: Node, low: Any, high: Any) -> Interval:
    """Set the bounds of unknown values to NaN; an unknown boolean is 0 to 1."""
    if node.kind == Kind.BOOLEAN:
        return np.where(np.isnan(low), 0.0, low), np.where(np.isnan(high), 1.0, high)
    largest = _EXACT if node.kind == Kind.INTEGER else np.inf
    known = (np.abs(low) < largest) & (np.abs(high) < largest)
    nan = low.dtype.type(np.nan)
    return np.where(known, low, nan), np.where(known, high, nan)


@lru_cache(maxsize=1024)
def may_be_negative(index: Node, dtype: np.dtype[Any]) -> bool:
    """Return True if an index into an array may be negative in some call."""
    count = 1 + max((int(x.value or 0) for x in elements(index)), default=-1)
    return not bounds(index, INDEX_RANGES, [None] * count, dtype)[0] >= 0


def index_range(interval: Interval, n: int) -> tuple[Array, Array]:
    """Return the first and last element of an axis that an interval of indices reaches.

    Negative indices count from the end. An interval across 0 may reach every element.
    """
    low, high = interval
    moved = np.where(high < 0, n, 0)
    known = (high < 0) | (low >= 0)
    first = np.clip(np.where(known, low + moved, 0), 0, n - 1)
    last = np.clip(np.where(known, high + moved, n - 1), 0, n - 1)
    return first.astype(np.int64), last.astype(np.int64)


def _element(extrema: RangeExtrema, given: list[Interval], dtype: np.dtype[Any]) -> Interval:
    ends = [index_range(x, n) for x, n in zip(given, extrema.shape, strict=True)]
    if not extrema.is_small and any(np.any(a != b) for a, b in ends):
        return (dtype.type(np.nan),) * 2
    low, high = extrema.bounds([a for a, _ in ends], [b for _, b in ends])
    return low.astype(dtype), high.astype(dtype)


# --- one rule for each operation ----------------------------------------------------------------


def _at_corners(function: Callable[..., Any], *given: Interval) -> Interval:
    """Bound a function that is monotone in each of its inputs: the extremes are at the ends."""
    if len(given) == 1:
        values = [function(x) for x in given[0]]
    else:
        values = [function(x, y) for x in given[0] for y in given[1]]
    low, high = values[0], values[0]
    for x in values[1:]:
        low, high = np.minimum(low, x), np.maximum(high, x)
    return low, high


def _nearly(function: Callable[..., Any]) -> Callable[..., Interval]:
    """Bound a function of the C library, which is monotone but for a few units in the last place.

    Where the function has no value at an end, it is unknown.
    """

    def rule(*given: Interval) -> Interval:
        low, high = _at_corners(function, *given)
        slack = 8 * np.finfo(low.dtype).eps * np.maximum(np.abs(low), np.abs(high))
        return low - slack, high + slack

    return rule


def _unit(x: Interval) -> Interval:
    """Bound a sine or cosine of a finite number."""
    return x[0] * 0 - 1, x[1] * 0 + 1


def _divide(x: Interval, y: Interval) -> Interval:
    low, high = _at_corners(np.divide, x, y)
    return _unless((y[0] <= 0) & (y[1] >= 0), low, high)


def _floor_divide(x: Interval, y: Interval) -> Interval:
    low, high = _at_corners(np.floor_divide, x, y)
    return _unless((y[0] <= 0) & (y[1] >= 0), low, high)


def _remainder(x: Interval, y: Interval, step: float = 1) -> Interval:
    """Bound a remainder; between multiples of the divisor it grows with the dividend.

    Integers stay one below the divisor. A small negative float may round to the divisor.
    """
    first, last = np.remainder(x[0], y[0]), np.remainder(x[1], y[0])
    grows = (y[0] == y[1]) & (x[1] - x[0] < y[0]) & (first <= last)
    low, high = np.where(grows, first, first * 0), np.where(grows, last, y[1] - step)
    return _unless(~(y[0] > 0) | np.isnan(x[0]), low, high)


def _absolute(x: Interval) -> Interval:
    low, high = x
    inside = (low <= 0) & (high >= 0)
    size = np.abs(low), np.abs(high)
    return np.where(inside, low.dtype.type(0), np.minimum(*size)), np.maximum(*size)


def _power(x: Interval, y: Interval) -> Interval:
    low, high = _nearly(np.power)(x, y)
    return _unless(~(x[0] > 0), low, high)


def _where(condition: Interval, x: Interval, y: Interval) -> Interval:
    chosen, never = condition[0] == 1, condition[1] == 0
    low = np.where(chosen, x[0], np.where(never, y[0], np.minimum(x[0], y[0])))
    high = np.where(chosen, x[1], np.where(never, y[1], np.maximum(x[1], y[1])))
    return low, high


def _unless(unknown: Any, low: Any, high: Any) -> Interval:
    nan = low.dtype.type(np.nan)
    return np.where(unknown, nan, low), np.where(unknown, nan, high)


def _logic(is_true: Any, is_false: Any) -> Interval:
    return np.where(is_true, 1.0, 0.0), np.where(is_false, 0.0, 1.0)


def _equal(x: Interval, y: Interval) -> Interval:
    one_value = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    return _logic(one_value, (x[1] < y[0]) | (y[1] < x[0]))


def _inverted(x: Interval) -> Interval:
    return 1 - x[1], 1 - x[0]


def _shift(function: Callable[[Any, Any], Any]) -> Callable[[Interval, Interval], Interval]:
    """Bound a shift by a number of bits that is known to lie in 0 to 52."""

    def rule(x: Interval, y: Interval) -> Interval:
        low, high = _at_corners(lambda a, b: function(a, np.exp2(b)), x, y)
        return _unless(~((y[0] >= 0) & (y[1] <= _BITS)), low, high)

    return rule


def _bitwise(function: np.ufunc) -> Callable[[Interval, Interval], Interval]:
    """Bound an operation on the bits of integers that are known not to be negative."""

    def rule(x: Interval, y: Interval) -> Interval:
        exact = (x[0] == x[1]) & (y[0] == y[1])
        ends = [np.where(exact, end[0], 0.0).astype(np.int64) for end in (x, y)]
        value = function(*ends).astype(np.float64)
        larger, smaller = np.maximum(x[1], y[1]), np.minimum(x[1], y[1])
        bits = np.ldexp(1.0, np.frexp(np.maximum(larger, 0))[1]) - 1
        high = smaller if function is np.bitwise_and else bits
        low, high = np.where(exact, value, 0.0), np.where(exact, value, high)
        return _unless(~exact & ~((x[0] >= 0) & (y[0] >= 0)), low, high)

    return rule


def _xor(x: Interval, y: Interval) -> Interval:
    known = (x[0] == x[1]) & (y[0] == y[1])
    return _logic(known & (x[0] != y[0]), known & (x[0] == y[0]))


_OF_BOOLEANS: dict[str, Callable[..., Interval]] = {
    "bitwise_and": lambda x, y: _at_corners(np.minimum, x, y),
    "bitwise_or": lambda x, y: _at_corners(np.maximum, x, y),
    "bitwise_xor": _xor,
    "invert": _inverted,
}
_OF_FLOATS: dict[str, Callable[..., Interval]] = {
    "remainder": lambda x, y: _remainder(x, y, step=0),
}
_RULES: dict[str, Callable[..., Interval]] = {
    "less": lambda x, y: _logic(x[1] < y[0], x[0] >= y[1]),
    "less_equal": lambda x, y: _logic(x[1] <= y[0], x[0] > y[1]),
    "equal": _equal,
    "not_equal": lambda x, y: _inverted(_equal(x, y)),
    "divide": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "absolute": _absolute,
    "power": _power,
    "sin": _unit,
    "cos": _unit,
    **{name: _nearly(FUNCTIONS[name]) for name in ROUNDED},
    "where": _where,
    "bitwise_and": _bitwise(np.bitwise_and),
    "bitwise_or": _bitwise(np.bitwise_or),
    "bitwise_xor": _bitwise(np.bitwise_xor),
    "invert": lambda x: (-x[1] - 1, -x[0] - 1),
    "left_shift": _shift(np.multiply),
    "right_shift": _shift(np.floor_divide),
}
