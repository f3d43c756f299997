"""Build nodes from nodes: promote kinds as NumPy does, and fold constants."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tileattn.expressions.nodes import Kind, Node, constant
from tileattn.expressions.special_functions import erf, sigmoid

INT64 = np.iinfo(np.int64)
_NAMES = """
add subtract multiply divide floor_divide remainder negative absolute sign minimum maximum power
exp expm1 log log1p log2 tanh sin cos arctan sqrt floor ceil rint
less less_equal equal not_equal where
bitwise_and bitwise_or bitwise_xor invert left_shift right_shift
"""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _NAMES.split()},
    **{"erf": erf, "sigmoid": sigmoid},
}
"""Operations on values, as NumPy has them, and two more; on booleans the bitwise ones are logical.

Besides them there are ``cast``, ``input``, ``constant``, ``parameter`` and ``aux``.
"""

# NumPy's arithmetic on booleans, as bitwise operations.
_OF_BOOLEANS = {
    "add": "bitwise_or",
    "maximum": "bitwise_or",
    "multiply": "bitwise_and",
    "minimum": "bitwise_and",
}
_COMPARISONS = ("less", "less_equal", "equal", "not_equal")
_INTEGERS_ALONE = ("floor_divide", "left_shift", "right_shift")
_BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor", "invert")
_FLOATS_ALONE = (
    *("divide", "power", "sqrt", "exp", "expm1", "log", "log1p", "log2"),
    *("tanh", "sin", "cos", "arctan", "erf", "sigmoid"),
)
_SAME_FOR_INTEGERS = ("floor", "ceil", "rint")

_DTYPES = {Kind.BOOLEAN: np.bool_, Kind.INTEGER: np.int64, Kind.FLOAT: np.float64}


def element(number: int, kind: Kind, indices: Sequence[Node]) -> Node:
    """Make an element of the array ``aux[number]``."""
    return Node("aux", kind, tuple(indices), number)


def cast(x: Node, kind: Kind) -> Node:
    """Convert to a kind: floats to integers towards zero, numbers to booleans as ``x != 0``."""
    if x.kind == kind:
        return x
    if kind == Kind.BOOLEAN:
        return _node("not_equal", kind, (x, constant(0.0 if x.kind == Kind.FLOAT else 0)))
    return _node("cast", kind, (x,))


def where(condition: Node, x: Node, y: Node) -> Node:
    """Choose ``x`` or ``y``."""
    kind = max(x.kind, y.kind)
    x, y = cast(x, kind), cast(y, kind)
    if condition.op == "constant":
        return x if condition.value else y
    return x if x == y else _node("where", kind, (cast(condition, Kind.BOOLEAN), x, y))


def apply(op: str, *inputs: Node) -> Node:
    """Apply any other operation; raise TypeError where NumPy would, or the kinds do not suit it."""
    kind = max(x.kind for x in inputs)
    if kind == Kind.BOOLEAN and op in _OF_BOOLEANS:
        op = _OF_BOOLEANS[op]
    elif kind == Kind.BOOLEAN and op == "absolute":
        return inputs[0]
    elif kind == Kind.BOOLEAN and op in ("negative", "subtract", "sign"):
        raise TypeError(f"numpy.{op} of booleans; use ~ or ^, or .astype(int) first")
    if op in _INTEGERS_ALONE:
        if kind == Kind.FLOAT:
            hint = "numpy.floor(x / y)" if op == "floor_divide" else ".astype(int) first"
            raise TypeError(f"numpy.{op} of floats; its inputs must be integers ({hint})")
        kind = Kind.INTEGER
    elif op in _FLOATS_ALONE:
        kind = Kind.FLOAT
    elif op in _BITWISE:
        if kind == Kind.FLOAT:
            raise TypeError(f"numpy.{op} of floats; its inputs must be booleans or integers")
    elif op in _SAME_FOR_INTEGERS and kind != Kind.FLOAT:
        return inputs[0]
    elif op not in _COMPARISONS:
        kind = max(kind, Kind.INTEGER)
    inputs = tuple(cast(x, kind) for x in inputs)
    return _node(op, Kind.BOOLEAN if op in _COMPARISONS else kind, inputs)


def times(x: Node, y: Node) -> Node:
    """Multiply, where a factor is often 1."""
    if x == constant(1.0):
        return y
    return x if y == constant(1.0) else apply("multiply", x, y)


def logaddexp(x: Node, y: Node) -> Node:
    """Compute ``log(exp(x) + exp(y))``; of equal inputs, infinite ones too, it is x + log(2)."""
    x, y = cast(x, Kind.FLOAT), cast(y, Kind.FLOAT)
    rest = apply("negative", apply("absolute", apply("subtract", x, y)))
    apart = apply("add", apply("maximum", x, y), apply("log1p", apply("exp", rest)))
    half = constant(0.5)
    mean = apply("add", apply("multiply", half, x), apply("multiply", half, y))
    return where(apply("equal", x, y), apply("add", mean, constant(math.log(2))), apart)


def integer_power(x: Node, n: int) -> Node:
    """Multiply ``x`` with itself, by repeated squaring; ``n`` is 1 or more."""
    half = integer_power(x, n // 2) if n > 1 else None
    square = x if half is None else apply("multiply", half, half)
    return apply("multiply", square, x) if n > 1 and n % 2 else square


def _node(op: str, kind: Kind, inputs: tuple[Node, ...]) -> Node:
    """Make a node, or the constant that it is."""
    if any(x.op != "constant" for x in inputs):
        return Node(op, kind, inputs)
    values = [_DTYPES[x.kind](x.value) for x in inputs]
    return constant(computed(op, kind, values).item())


def computed(op: str, kind: Kind, values: Sequence[Any]) -> Any:
    """Compute an operation on numbers of NumPy; floats are of float64."""
    with np.errstate(all="ignore"):
        return values[0].astype(_DTYPES[kind]) if op == "cast" else FUNCTIONS[op](*values)
