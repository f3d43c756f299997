"""The visitor that emits the caller's score and mask functions on vectors of scores.

A value that is the same in all lanes stays a scalar. Integers have 64 bits and NumPy's semantics.
A score_mod computes in the accumulation dtype, a mask_mod in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from tileattn.expressions.intervals import may_be_negative
from tileattn.expressions.nodes import Kind, Node, ordered
from tileattn.kernels.llvm.instructions import numerics
from tileattn.kernels.llvm.instructions.code import I1, I8, I64, POINTER, Code, i64, same
from tileattn.kernels.llvm.user_functions import Functions, slots

_SMALLEST = -(1 << 63)
_INTEGERS = {f"{u}int{n}": ir.IntType(n) for u in ("", "u") for n in (8, 16, 32, 64)}
_DTYPES = {"float": "float32", "double": "float64"}
_FLOATS = {"float16": ir.HalfType(), "float32": ir.FloatType(), "float64": ir.DoubleType()}


class TileFunctions:
    """The caller's functions on the pairs of a tile.

    ``indices`` returns the inputs b, h, i and j of each vector of a row. The field ``aux`` of ``p``
    is the address of a table: the address of each array, then length and stride in bytes of each
    axis; see `slots`. The cells of parameters follow.
    """

    def __init__(
        self, c: Code, p: Any, functions: Functions, indices: Callable[[Any], list[dict[str, Any]]]
    ) -> None:
        self._c, self._p, self._functions, self._indices = c, p, functions, indices

    @property
    def modify(self) -> bool:
        """Return True with a score_mod."""
        return self._functions.score_mod is not None

    @property
    def mask(self) -> bool:
        """Return True with a mask_mod."""
        return self._functions.mask_mod is not None

    def scores(self, n: Any, row: list[Any], *, grad: bool) -> list[list[Any]]:
        """Return the new scores of a row; with ``grad``, then their derivatives.

        Derivatives are by the old scores, and by each learned element.
        """
        functions, outputs = self._functions, [self._functions.score_mod]
        if grad:
            outputs += [functions.derivative, *functions.learned.values()]
        found = [
            [_vector(self._c, x) for x in self._evaluate(outputs, inputs, self._c.scalar)]
            for inputs in self._inputs(n, row)
        ]
        return [list(x) for x in zip(*found, strict=True)]

    def elements(self, n: Any, row: list[Any]) -> list[list[Any]]:
        """Return the flat index of each learned element that a row reads.

        A scalar stands for all lanes.
        """
        learned = list(self._functions.learned)
        nodes = [index for node in learned for index in node.inputs]
        found = []
        for inputs in self._inputs(n, row):
            indices = iter(self._evaluate(nodes, inputs, self._c.scalar))
            found.append([self._number(x, [next(indices) for _ in x.inputs]) for x in learned])
        return [list(x) for x in zip(*found, strict=True)]

    def visible(self, n: Any) -> list[Any]:
        """Return True for the visible pairs of a row."""
        outputs = [self._functions.mask_mod]
        found = [self._evaluate(outputs, x, ir.DoubleType()) for x in self._indices(n)]
        return [_vector(self._c, x) for (x,) in found]

    def _inputs(self, n: Any, row: list[Any]) -> list[dict[str, Any]]:
        return [{**x, "s": s} for s, x in zip(row, self._indices(n), strict=True)]

    def _evaluate(
        self, outputs: Sequence[Node | None], inputs: Mapping[str, Any], real: Any
    ) -> list[Any]:
        c, values, cells = self._c, dict[Node, Any](), self._functions.cells
        wanted = [x for x in outputs if x is not None]
        for node in ordered(wanted, cells):
            if node in cells:
                values[node] = self._cell(node, real)
                continue
            given = [values[x] for x in node.inputs]
            if node.op == "input":
                values[node] = inputs[str(node.value)]
            elif node.op == "constant":
                values[node] = _constant(node, real)
            elif node.op == "aux":
                values[node] = self._element(node, given, real)
            elif node.op == "cast":
                values[node] = _cast(c, given[0], node, real)
            else:
                values[node] = _apply(c, node, given)
        return [values[x] for x in wanted]

    def _cell(self, node: Node, real: Any) -> Any:
        """Load the value of a hoisted expression."""
        c, number = self._c, slots(self._functions.aux) + self._functions.cells[node]
        at = c.at(self._p.aux, 8 * number)
        if node.kind == Kind.FLOAT:
            return _float(c, c.load(at, ir.DoubleType()), real)
        x = c.load(at, I64)
        return x if node.kind == Kind.INTEGER else c.b.icmp_signed("!=", x, i64(0))

    def _axes(
        self, node: Node, indices: list[Any], real: Any
    ) -> tuple[Any, list[tuple[Any, Any, Any]]]:
        """Return an array's address, and index, length and stride of each axis.

        Negative indices count from the end; indices past an end are moved to it.
        """
        c, b = self._c, self._c.b
        first = slots(self._functions.aux[: int(node.value or 0)])
        start, *facts = (
            c.load(c.at(self._p.aux, 8 * (first + n)), I64) for n in range(1 + 2 * len(indices))
        )
        axes = []
        dtype = np.dtype(_DTYPES[str(real)])
        each = zip(node.inputs, indices, facts[::2], facts[1::2], strict=True)
        for source, given, length, stride in each:
            index, end, zero, last = _alike(c, given, length, i64(0), b.sub(length, i64(1)))
            if may_be_negative(source, dtype):
                index = b.select(b.icmp_signed("<", index, zero), b.add(index, end), index)
            index = b.select(b.icmp_signed(">", index, zero), index, zero)
            index = b.select(b.icmp_signed("<", index, last), index, last)
            axes.append((index, length, stride))
        return start, axes

    def _number(self, node: Node, indices: list[Any]) -> Any:
        """Return the flat index of an element in its array."""
        c, b = self._c, self._c.b
        number: Any = i64(0)
        for index, length, _ in self._axes(node, indices, c.scalar)[1]:
            number = b.mul(*_alike(c, number, length))
            number = b.add(*_alike(c, number, index))
        return number

    def _element(self, node: Node, indices: list[Any], real: Any) -> Any:
        """Load an element of an array for each lane."""
        c, b = self._c, self._c.b
        place, axes = self._axes(node, indices, real)
        for index, _, stride in axes:
            place = b.add(*_alike(c, place, b.mul(*_alike(c, index, stride))))
        dtype = self._functions.aux[int(node.value or 0)][0]

        def load(at: Any) -> Any:
            return _load(c, dtype, b.inttoptr(at, POINTER), real)

        if not isinstance(place.type, ir.VectorType):
            return load(place)
        return c.join([load(at) for at in c.split(place)])


# --- values ---------------------------------------------------------------------------------------


def _constant(node: Node, real: Any) -> Any:
    kinds = {Kind.BOOLEAN: I1, Kind.INTEGER: I64, Kind.FLOAT: real}
    return ir.Constant(kinds[node.kind], node.value)


def _load(c: Code, dtype: str, pointer: Any, real: Any) -> Any:
    """Load a number as a value: a boolean, a 64-bit integer or a float."""
    b = c.b
    if dtype == "bool":
        return b.icmp_unsigned("!=", c.load(pointer, I8), same(I8, 0))
    if dtype in _INTEGERS:
        x = c.load(pointer, _INTEGERS[dtype])
        widen = b.zext if dtype.startswith("u") else b.sext
        return x if x.type == I64 else widen(x, I64)
    if dtype == "bfloat16":
        bits = b.zext(c.load(pointer, ir.IntType(16)), ir.IntType(32))
        return _float(c, b.bitcast(b.shl(bits, same(bits.type, 16)), ir.FloatType()), real)
    return _float(c, c.load(pointer, _FLOATS[dtype]), real)


def _float(c: Code, x: Any, real: Any) -> Any:
    sizes = {"half": 2, "float": 4, "double": 8}
    given, wanted = sizes[str(x.type)], sizes[str(real)]
    if given == wanted:
        return x
    return c.b.fpext(x, real) if given < wanted else c.b.fptrunc(x, real)


def _is_vector(x: Any) -> bool:
    return isinstance(x.type, ir.VectorType)


def _vector(c: Code, x: Any) -> Any:
    return x if _is_vector(x) else c.splat(x)


def _alike(c: Code, *values: Any) -> list[Any]:
    """Broadcast all values to vectors if one is a vector."""
    if any(map(_is_vector, values)):
        return [_vector(c, x) for x in values]
    return list(values)


def _of(x: Any, kind: Any) -> Any:
    """Return the type with as many lanes as a value."""
    return ir.VectorType(kind, x.type.count) if _is_vector(x) else kind


def _element_type(x: Any) -> Any:
    return x.type.element if _is_vector(x) else x.type


def _number(x: Any, value: float) -> Any:
    """Make a constant like a value."""
    one = ir.Constant(_element_type(x), value)
    return ir.Constant(x.type, [one] * x.type.count) if _is_vector(x) else one


def _cast(c: Code, x: Any, node: Node, real: Any) -> Any:
    """Convert; floats to integers round towards zero, and to the smallest integer on overflow."""
    b, source = c.b, node.inputs[0].kind
    if node.kind == Kind.FLOAT:
        convert = b.uitofp if source == Kind.BOOLEAN else b.sitofp
        return convert(x, _of(x, real))
    if source == Kind.BOOLEAN:
        return b.zext(x, _of(x, I64))
    above = b.fcmp_ordered(">=", x, _number(x, float(_SMALLEST)))
    fits = b.and_(above, b.fcmp_ordered("<", x, _number(x, -float(_SMALLEST))))
    found = b.fptosi(x, _of(x, I64))
    return b.select(fits, found, _number(found, _SMALLEST))


# --- operations -----------------------------------------------------------------------------------


def _apply(c: Code, node: Node, given: list[Any]) -> Any:
    """Emit an operation on values of one kind."""
    if node.op == "where":
        condition, x, y = _alike(c, *given)
        return c.b.select(condition, x, y)
    values = _alike(c, *given)
    if node.inputs[0].kind == Kind.FLOAT:
        return _FLOAT[node.op](c, *values)
    return _INTEGER[node.op](c, *values)


def _builder(name: str, *first: Any) -> Callable[..., Any]:
    """Emit one instruction."""
    return lambda c, *values: getattr(c.b, name)(*first, *values)


def _intrinsic(name: str) -> Callable[..., Any]:
    def emit(c: Code, x: Any) -> Any:
        bits = {"float": 32, "double": 64}[str(_element_type(x))]
        lanes = f"v{x.type.count}" if _is_vector(x) else ""
        return c.intrinsic(f"llvm.{name}.{lanes}f{bits}", x.type, x)

    return emit


def _library(name: str) -> Callable[..., Any]:
    """Call a function of the C library, for one lane after the other."""

    def emit(c: Code, *given: Any) -> Any:
        b, real, wide = c.b, _element_type(given[0]), ir.DoubleType()
        function = c.module.globals.get(f"math_{name}")
        if function is None:
            kind = ir.FunctionType(wide, [wide] * len(given))
            function = ir.Function(c.module, kind, f"math_{name}")
            for attribute in ("nounwind", "readnone"):
                function.attributes.add(attribute)

        def call(*x: Any) -> Any:
            return _float(c, b.call(function, [_float(c, one, wide) for one in x]), real)

        if not _is_vector(given[0]):
            return call(*given)
        return c.join([call(*x) for x in zip(*map(c.split, given), strict=True)])

    return emit


def _of_sums(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Emit the vector version for the accumulation dtype, and the C library's for other floats."""

    def emit(c: Code, x: Any) -> Any:
        if _element_type(x) != c.scalar:
            return _library(name)(c, x)
        return function(c, _vector(c, x))

    return emit


def _sign(less: Callable[..., Any]) -> Callable[..., Any]:
    """1 and -1; 0 and NaN as they are."""

    def emit(c: Code, x: Any) -> Any:
        zero, one, minus = (_number(x, n) for n in (0, 1, -1))
        negative = c.b.select(less(c, x, zero), minus, x)
        return c.b.select(less(c, zero, x), one, negative)

    return emit


def _extremum(compare: str) -> Callable[..., Any]:
    """Take the smaller or larger; a NaN where either is."""

    def emit(c: Code, x: Any, y: Any) -> Any:
        chosen = c.b.or_(c.b.fcmp_ordered(compare, x, y), c.b.fcmp_unordered("uno", x, x))
        return c.b.select(chosen, x, y)

    return emit


def _integer_extremum(compare: str) -> Callable[..., Any]:
    return lambda c, x, y: c.b.select(c.b.icmp_signed(compare, x, y), x, y)


def _log(c: Code, x: Any) -> Any:
    """Emit the natural logarithm, of subnormal numbers too; NaN for negative numbers."""
    b, shift = c.b, 64 if c.size == 8 else 32
    tiny = b.fcmp_ordered("<", x, c.const(2.0 ** (-1022 if c.size == 8 else -126)))
    scaled = b.select(tiny, b.fmul(x, c.const(2.0**shift)), x)
    found = numerics.log(c, scaled)
    found = b.fsub(found, b.select(tiny, c.const(shift * 0.6931471805599453), c.const(0.0)))
    return b.select(b.fcmp_ordered("<", x, c.const(0.0)), c.const(float("nan")), found)


def _sigmoid(c: Code, x: Any) -> Any:
    y = _FLOAT["exp"](c, c.b.fneg(x))
    return c.b.fdiv(_number(y, 1), c.b.fadd(_number(y, 1), y))


def _float_remainder(c: Code, x: Any, y: Any) -> Any:
    """Emit the remainder with the sign of the divisor, as in NumPy."""
    b = c.b
    rest = _library("fmod")(c, x, y)
    zero = _number(rest, 0)
    none = b.fcmp_ordered("==", rest, zero)
    signs = b.xor(b.fcmp_ordered("<", rest, zero), b.fcmp_ordered("<", y, zero))
    rest = b.select(b.and_(signs, b.fcmp_unordered("!=", rest, zero)), b.fadd(rest, y), rest)
    return b.select(none, _copysign(c, zero, y), rest)


def _copysign(c: Code, x: Any, y: Any) -> Any:
    bits = {"float": 32, "double": 64}[str(_element_type(x))]
    lanes = f"v{x.type.count}" if _is_vector(x) else ""
    return c.intrinsic(f"llvm.copysign.{lanes}f{bits}", x.type, x, y)


def _quotient(c: Code, x: Any, y: Any) -> tuple[Any, Any]:
    """Divide, rounding down: quotient and remainder; by 0 both are 0, as NumPy has them.

    By -1 the quotient is ``-x``, which of the smallest integer is itself.
    """
    b = c.b
    zero, one, minus = (_number(y, n) for n in (0, 1, -1))
    none, negated = b.icmp_signed("==", y, zero), b.icmp_signed("==", y, minus)
    divisor = b.select(b.or_(none, negated), one, y)
    down = b.sdiv(x, divisor)
    rest = b.sub(x, b.mul(down, divisor))
    signs = b.icmp_signed("<", b.xor(rest, divisor), zero)
    off = b.and_(b.icmp_signed("!=", rest, zero), signs)
    down = b.select(off, b.sub(down, one), down)
    rest = b.select(off, b.add(rest, divisor), rest)
    down = b.select(negated, b.sub(zero, x), down)
    return b.select(none, zero, down), rest


def _shift(c: Code, x: Any, y: Any, *, left: bool) -> Any:
    """Shift; by 64 and more, or a negative number, all bits go."""
    b = c.b
    some = b.icmp_unsigned("<", y, _number(y, 64))
    if left:
        return b.select(some, b.shl(x, b.select(some, y, _number(y, 0))), _number(x, 0))
    return b.ashr(x, b.select(some, y, _number(y, 63)))


def _ordered(compare: str) -> Callable[..., Any]:
    """Compare integers; booleans as 0 and 1."""

    def emit(c: Code, x: Any, y: Any) -> Any:
        unsigned = _element_type(x) == I1
        return (c.b.icmp_unsigned if unsigned else c.b.icmp_signed)(compare, x, y)

    return emit


_FLOAT: dict[str, Callable[..., Any]] = {
    "add": _builder("fadd"),
    "subtract": _builder("fsub"),
    "multiply": _builder("fmul"),
    "divide": _builder("fdiv"),
    "negative": _builder("fneg"),
    "absolute": _intrinsic("fabs"),
    "sqrt": _intrinsic("sqrt"),
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "rint": _intrinsic("rint"),
    "remainder": _float_remainder,
    "sign": _sign(_builder("fcmp_ordered", "<")),
    "minimum": _extremum("<="),
    "maximum": _extremum(">="),
    "exp": _of_sums(numerics.exp, "exp"),
    "log": _of_sums(_log, "log"),
    "tanh": _of_sums(numerics.tanh, "tanh"),
    "sigmoid": _sigmoid,
    "expm1": _library("expm1"),
    "log1p": _library("log1p"),
    "log2": _library("log2"),
    "erf": _library("erf"),
    "arctan": _library("atan"),
    "sin": _library("sin"),
    "cos": _library("cos"),
    "power": _library("pow"),
    "less": _builder("fcmp_ordered", "<"),
    "less_equal": _builder("fcmp_ordered", "<="),
    "equal": _builder("fcmp_ordered", "=="),
    "not_equal": _builder("fcmp_unordered", "!="),
}
_INTEGER: dict[str, Callable[..., Any]] = {
    "add": _builder("add"),
    "subtract": _builder("sub"),
    "multiply": _builder("mul"),
    "negative": _builder("neg"),
    "absolute": lambda c, x: c.b.select(
        c.b.icmp_signed("<", x, _number(x, 0)), c.b.sub(_number(x, 0), x), x
    ),
    "sign": _sign(_ordered("<")),
    "minimum": _integer_extremum("<"),
    "maximum": _integer_extremum(">"),
    "floor_divide": lambda c, x, y: _quotient(c, x, y)[0],
    "remainder": lambda c, x, y: _quotient(c, x, y)[1],
    "bitwise_and": _builder("and_"),
    "bitwise_or": _builder("or_"),
    "bitwise_xor": _builder("xor"),
    "invert": lambda c, x: c.b.xor(x, _number(x, 1 if _element_type(x) == I1 else -1)),
    "left_shift": lambda c, x, y: _shift(c, x, y, left=True),
    "right_shift": lambda c, x, y: _shift(c, x, y, left=False),
    "less": _ordered("<"),
    "less_equal": _ordered("<="),
    "equal": _ordered("=="),
    "not_equal": _ordered("!="),
}
