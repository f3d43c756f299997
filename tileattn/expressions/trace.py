"""Trace a Python function: call it with symbolic values that record every operation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tileattn.array_functions import ArrayFunctions, kind_name
from tileattn.expressions import build
from tileattn.expressions.aux_arrays import AuxArrays, is_array, kind_of
from tileattn.expressions.captured_numbers import CapturedNumber
from tileattn.expressions.nodes import Kind, Node, constant

_WITHOUT_IF = (
    "use numpy.where(condition, x, y) in place of if, &, | and ~ in place of and, or and not, "
    " (a <= x) & (x < b) in place of a <= x < b, numpy.minimum and numpy.maximum in place of "
    "min and max"
)
_NOT_A_NUMBER = (
    "use numpy's functions in place of math's, and .astype(int) and .astype(float) in place of "
    "int() and float()"
)
_KINDS = {"bool": Kind.BOOLEAN, "int": Kind.INTEGER, "float": Kind.FLOAT}


class Traced(ArrayFunctions, NDArrayOperatorsMixin):
    """A value in a traced function: an expression so far.

    Operators and functions, NumPy's or PyTorch's, make new ones. ``function`` is the name in
    messages.
    """

    __slots__ = ("function", "node")

    def __init__(self, node: Node, function: "Source | str") -> None:
        self.node = node
        self.function = function

    def astype(self, dtype: Any) -> "Traced":
        """Convert to a kind of number: bool, int or float."""
        try:
            kind = _KINDS[kind_name(dtype) or str(kind_name(np.dtype(dtype)))]
        except (KeyError, TypeError):
            raise self.refused(f"must convert to bool, int or float; got {dtype!r}") from None
        return Traced(build.cast(self.node, kind), self.function)

    def named(self, name: str, *given: Any) -> "Traced":
        """Call a function by its name in NumPy."""
        if name not in _FUNCTIONS or len(given) != _input_count(name):
            raise self.refused(f"calls {name}; {ACCEPTED}")
        *_, last = given
        if type(last) is CapturedNumber:
            last.recorder.settle(last.place, name)
        return self._made(_FUNCTIONS[name], given)

    def element(self, tensor: Any, key: Any) -> Any:
        """Read a tensor at a traced index."""
        return self.source.captured(tensor)[key]

    @property
    def source(self) -> "Source":
        """The function that is traced."""
        return self.function if isinstance(self.function, Source) else Source(self.function)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any, **options: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return self.called(name, given, options)

    def __array_function__(self, function: Any, _types: Any, given: Any, options: Any) -> Any:
        return self.called(function.__name__, given, options)

    def __abs__(self) -> "Traced":
        return self.named("absolute", self)

    def __bool__(self) -> bool:
        raise self.refused(f"asks whether a traced value is true; {_WITHOUT_IF}")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise self.refused(
            "turns a traced value into an array; pass arrays as aux=(array, ...) and index them "
            f"inside the function; {ACCEPTED}"
        )

    def __index__(self) -> int:
        raise self.refused(
            "uses a traced value as a plain integer, to index a list or to count; pass arrays as "
            "aux=(array, ...) and index them inside the function"
        )

    def __float__(self, *_: Any) -> NoReturn:
        raise self.refused(f"asks for the number of a traced value; {_NOT_A_NUMBER}")

    __int__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = __float__

    def __iter__(self) -> Any:
        raise self.refused("asks for the elements of a traced value, which is one number")

    def __getitem__(self, key: Any) -> "Traced":
        if key == ():
            return self
        raise self.refused(f"indexes a number with {key!r}")

    def refused(self, what: str) -> TypeError:
        """Return the TypeError for an unsupported operation of the function."""
        return TypeError(f"{self.function} {what}")

    def _made(self, make: Callable[..., Node], given: Sequence[Any]) -> "Traced":
        nodes = [node_of(x, self) for x in given]
        try:
            return Traced(make(*nodes), self.function)
        except TypeError as error:
            raise self.refused(f"calls {error}") from None


class Source:
    """The function being traced: its name in messages, and the arrays of its call.

    Parameters
    ----------
    name : str
        Name of the option.
    arrays : AuxArrays, optional
        Arrays of the call, extended by captured arrays; without, captured arrays are refused.
    """

    __slots__ = ("arrays", "name")

    def __init__(self, name: str, arrays: AuxArrays | None = None) -> None:
        self.name = name
        self.arrays = arrays

    def __str__(self) -> str:
        return self.name

    def captured(self, x: Any, variable: str = "") -> "Traced | TracedArray":
        """Return a captured array as an array of ``aux``."""
        kind = kind_of(x)
        if self.arrays is None or kind is None:
            given = f"`{variable}`, an array" if variable else "an array"
            name = variable or "array"
            raise TypeError(
                f"{self.name} indexes {given} of dtype {x.dtype} that is no parameter; pass "
                f"aux=({name},) and add the parameter {name} after j"
            )
        return array_or_element(self.arrays.number(x), kind, len(x.shape), self)


class TracedArray:
    """An array of ``aux`` in a traced function; indexing returns elements."""

    __slots__ = ("_function", "_indices", "_kind", "_ndim", "_number")

    def __init__(
        self,
        number: int,
        kind: Kind,
        ndim: int,
        function: Source | str,
        indices: tuple[Node, ...] = (),
    ) -> None:
        self._number = number
        self._kind = kind
        self._ndim = ndim
        self._function = function
        self._indices = indices

    def __getitem__(self, key: Any) -> Any:
        name, function = f"aux[{self._number}]", self._function
        keys = key if isinstance(key, tuple) else (key,)
        indices = list(self._indices)
        for x in keys:
            if isinstance(x, slice | list | tuple) or x is None or x is Ellipsis:
                raise TypeError(f"{function} must index {name} with integers; got {x!r}")
            node = node_of(x, Traced(constant(0), function))
            if node.kind != Kind.INTEGER:
                raise TypeError(
                    f"{function} must index {name} with integers; got a "
                    f"{node.kind.name.lower()} (.astype(int) makes an integer)"
                )
            indices.append(node)
        if len(indices) > self._ndim:
            raise TypeError(
                f"{function} indexes {name} with {len(indices)} indices; it has {self._ndim} axes"
            )
        return array_or_element(self._number, self._kind, self._ndim, function, tuple(indices))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._refusal())

    def _refusal(self) -> str:
        return (
            f"{self._function} computes with aux[{self._number}], an array of {self._ndim} axes of "
            f"which {len(self._indices)} are indexed; it must index all, as x[h, i - j], and write "
            "a sum over an axis as sum(x[i, n] * y[j, n] for n in range(width))"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._refusal())

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        del function, types
        next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __xor__ = __rxor__ = __lshift__ = __rshift__ = __rlshift__ = __rrshift__ = _refuse
    __neg__ = __abs__ = __invert__ = __bool__ = __array__ = __index__ = __float__ = _refuse
    __matmul__ = __rmatmul__ = __len__ = __iter__ = __array_ufunc__ = __array_function__ = _refuse


def array_or_element(
    number: int, kind: Kind, ndim: int, function: Source | str, indices: tuple[Node, ...] = ()
) -> Traced | TracedArray:
    """Return a value if all axes are indexed; otherwise the partly indexed array."""
    if len(indices) == ndim:
        return Traced(build.element(number, kind, indices), function)
    return TracedArray(number, kind, ndim, function, indices)


def node_of(x: Any, among: Traced) -> Node:
    """Return the node of a traced value, or of a number."""
    if type(x) is CapturedNumber:
        x = x.recorder.operand(x.place)
        if type(x) is Node:
            return x
    if isinstance(x, Traced):
        return x.node
    if isinstance(x, TracedArray):
        x._refuse()
    if isinstance(x, np.generic):
        x = x.item() if x.dtype.kind in "biuc" else float(x)
    if not isinstance(x, bool | int | float) and is_array(x) and x.shape == ():
        if not _is_constant(x):
            return node_of(among.source.captured(x), among)
        x = x.item()
    if isinstance(x, bool):
        return constant(x)
    if isinstance(x, int):
        if not build.INT64.min <= x <= build.INT64.max:
            raise among.refused(f"must compute with integers of 64 bits; got {x}")
        return constant(int(x))
    if isinstance(x, float):
        return constant(float(x))
    if is_array(x):
        raise among.refused(
            "must compute with elements of an array, such as array[h, i - j]; got an array of "
            f"shape {tuple(x.shape)}"
        )
    symbol = None if among.source.arrays is None else among.source.arrays.symbol(x)
    if symbol is not None:
        return node_of(among.source.captured(symbol), among)
    raise among.refused(f"must compute with booleans, integers and floats; got {type(x).__name__}")


def _is_constant(x: Any) -> bool:
    """Return True for an array without axes whose value is at hand, and has no gradient."""
    if isinstance(x, np.ndarray):
        return True
    return not getattr(x, "requires_grad", True) and str(x.device) == "cpu"


def _power(x: Node, y: Node) -> Node:
    """Raise to a power; integer exponents that are constant become products."""
    if y.op == "constant" and y.kind == Kind.INTEGER and 1 <= int(y.value or 0) <= 64:
        return build.integer_power(build.cast(x, max(x.kind, Kind.INTEGER)), int(y.value or 0))
    if Kind.FLOAT not in (x.kind, y.kind):
        raise TypeError("numpy.power of integers with other exponents than constants from 1 to 64")
    return build.apply("power", x, y)


def _logical(op: str) -> Callable[..., Node]:
    return lambda *given: build.apply(op, *(build.cast(x, Kind.BOOLEAN) for x in given))


def _swapped(op: str) -> Callable[[Node, Node], Node]:
    return lambda x, y: build.apply(op, y, x)


def _is_finite(x: Node) -> Node:
    return build.apply("less", build.apply("absolute", x), constant(float("inf")))


def _is_inf(x: Node) -> Node:
    return build.apply("equal", build.apply("absolute", x), constant(float("inf")))


def _input_count(name: str) -> int:
    return {"where": 3, "erf": 1, "sigmoid": 1}.get(name) or getattr(np, name).nin


_FUNCTIONS: dict[str, Callable[..., Node]] = {
    **{name: partial(build.apply, name) for name in build.FUNCTIONS},
    "where": build.where,
    "greater": _swapped("less"),
    "greater_equal": _swapped("less_equal"),
    "power": _power,
    "logaddexp": build.logaddexp,
    "float_power": lambda x, y: build.apply("power", x, y),
    "square": lambda x: build.integer_power(build.cast(x, max(x.kind, Kind.INTEGER)), 2),
    "exp2": lambda x: build.apply("power", constant(2.0), x),
    "positive": lambda x: x,
    "fabs": lambda x: build.apply("absolute", build.cast(x, Kind.FLOAT)),
    "logical_and": _logical("bitwise_and"),
    "logical_or": _logical("bitwise_or"),
    "logical_xor": _logical("bitwise_xor"),
    "logical_not": _logical("invert"),
    "isfinite": _is_finite,
    "isinf": _is_inf,
    "isnan": lambda x: build.apply("not_equal", x, x),
}

ACCEPTED = "functions must be among " + ", ".join(sorted([*_FUNCTIONS, "clip", "isin", "round"]))
"""The end of a message about a function that is not supported."""


def trace(
    function: Callable[..., Any],
    name: Source | str,
    inputs: Sequence[str],
    aux: Sequence[tuple[Kind, int]],
) -> Any:
    """Call a function with traced inputs and arrays; return what it returns.

    ``aux`` has the kind and the number of axes of each array.
    """
    kinds = {"s": Kind.FLOAT}
    given = [Traced(Node("input", kinds.get(x, Kind.INTEGER), (), x), name) for x in inputs]
    arrays = [array_or_element(n, *each, name) for n, each in enumerate(aux)]
    return function(*given, *arrays)
