"""Numbers that a function captures, while it is traced: they become parameters where they can.

A `CapturedNumber` stands in for the number. Arithmetic on captured numbers is recorded, and done
again on the numbers of each call, in Python. Where the function needs to know a value, as in ``if``
or ``range``, the trace asks a question. The answers lead to what was traced: a function is traced
again only for new answers.
"""

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tileattn.array_functions import ArrayFunctions
from tileattn.expressions.nodes import Kind, Node, ordered, substituted
from tileattn.expressions.parameters import DIVISIONS, Expression, cell_of, is_near, parameter
from tileattn.expressions.state import exact

_MOST = 256  # questions and expressions that are kept of one function

Answers = tuple[Hashable, ...]
Step = tuple[Callable[..., Any], tuple[tuple[int | None, Any], ...]]
"""A function, and its inputs: the place of a value, or None and a constant."""


class Question(NamedTuple):
    """What a trace must know about a value."""

    steps: Sequence[Step]  # to compute before
    place: int  # of the value
    about: str
    answer: Callable[[Any], Hashable]


class Answer(NamedTuple):
    """What was traced."""

    steps: Sequence[Step]
    node: Node
    places: tuple[int, ...]  # of the values of the parameters


class Traces(dict[Answers, Question | Answer]):
    """The traces of a function, by the answers to their questions."""

    def find(self, numbers: Sequence[Any]) -> Expression | None:
        """Return the expression for captured numbers; None if it must be traced."""
        values, known = [*numbers], self.get(())
        answers: Answers = ()
        while known is not None:
            for function, inputs in known.steps:
                given = [x if n is None else values[n] for n, x in inputs]
                with np.errstate(all="ignore"):
                    values.append(function(*given))
            if isinstance(known, Answer):
                return Expression(known.node, tuple([cell_of(values[n]) for n in known.places]))
            answers = (*answers, known.answer(values[known.place]))
            known = self.get(answers)
        return None


class Recorder:
    """Records what a trace does with captured numbers.

    Parameters
    ----------
    traces : Traces
        The earlier traces of the function.
    numbers : sequence of number
        The captured numbers.
    """

    def __init__(self, traces: Traces, numbers: Sequence[Any]) -> None:
        if len(traces) >= _MOST:
            traces.clear()
        self._traces, self._values, self._captured = traces, [*numbers], len(numbers)
        self._answers: Answers = ()
        self._steps: list[Step] = []
        self._fixed: set[int] = set()
        self._known: dict[tuple[int, str], Any] = {}  # what has been answered

    def number(self, place: int) -> "CapturedNumber":
        """Return the stand-in for a captured number."""
        return CapturedNumber(self, place)

    def type_of(self, place: int) -> type:
        """Return the type of a value; captured numbers always have the same."""
        value = self._values[place]
        found: type = type(value) if place < self._captured else self.ask(place, "type", type)
        return found

    def apply(self, function: Callable[..., Any], *given: Any) -> Any:
        """Compute a number from numbers, some of them captured."""
        values = [self._values[x.place] if type(x) is CapturedNumber else x for x in given]
        if all(map(is_number, values)):
            result = function(*values)
            if is_number(result):
                places = (x.place if type(x) is CapturedNumber else None for x in given)
                self._steps.append((function, tuple(zip(places, values, strict=True))))
                self._values.append(result)
                return CapturedNumber(self, len(self._values) - 1)
        return function(*map(fixed, given))

    def ask(self, place: int, about: str, answer: Callable[[Any], Hashable]) -> Any:
        """Answer a question about a value; an earlier trace may have asked it differently."""
        if (place, about) in self._known:
            return self._known[place, about]
        known = self._traces.setdefault(
            self._answers, Question(tuple(self._steps), place, about, answer)
        )
        if type(known) is not Question or (known.place, known.about) != (place, about):
            raise RuntimeError("the function does not do the same again")
        found = known.answer(self._values[place])
        self._answers, self._steps = (*self._answers, found), []
        self._known[place, about] = found
        return found

    def fix(self, place: int) -> Any:
        """Make a value a constant of the trace, and return it."""
        if place not in self._fixed:
            self.ask(place, "value", exact)
            self._fixed.add(place)
        return self._values[place]

    def settle(self, place: int, name: str) -> None:
        """Decide about the second input of an operation on integers.

        The exponent of a power is a constant. Division by a constant is faster: the first divisor
        is one. If there comes another, it is a parameter.
        """
        value = self._values[place]
        if place in self._fixed or not isinstance(value, int | np.integer):
            return
        if name == "power":
            self.fix(place)
        elif name in DIVISIONS:
            first = exact(value)
            if self.ask(place, "divisor", lambda x: exact(x) == first):
                self._fixed.add(place)

    def operand(self, place: int) -> Any:
        """Return a parameter, or the value of a constant."""
        if place in self._fixed:
            return self._values[place]
        if isinstance(self._values[place], bool | np.bool_):
            return self.ask(place, "truth", bool)
        if place < self._captured and isinstance(self._values[place], float | np.floating):
            return parameter(place, Kind.FLOAT)
        kind = self.ask(place, "kind", _kind)
        # Until the end, a parameter has the place of its value.
        return parameter(place, kind) if type(kind) is Kind else self.fix(place)

    def keep(self, node: Node) -> Expression:
        """Keep what was traced."""
        used = [x for x in ordered([node]) if x.op == "parameter"]
        places = tuple(int(x.value or 0) for x in used)
        own = {x: parameter(n, x.kind) for n, x in enumerate(used)}
        node = substituted(node, own)
        self._traces[self._answers] = Answer(tuple(self._steps), node, places)
        return Expression(node, tuple(cell_of(self._values[n]) for n in places))


class CapturedNumber:
    """A number that a traced function captures, or computes from such numbers."""

    __slots__ = ("place", "recorder")

    def __init__(self, recorder: Recorder, place: int) -> None:
        self.recorder, self.place = recorder, place

    @property  # type: ignore[misc] # that of object can be assigned
    def __class__(self) -> type:
        """The type of the number, for ``isinstance``."""
        return self.recorder.type_of(self.place)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any, **options: Any) -> Any:
        if _is_traced(given):
            return NotImplemented
        if method == "__call__" and not options:
            return self.recorder.apply(ufunc, *given)
        options = {name: fixed(x) for name, x in options.items()}
        return getattr(ufunc, method)(*map(fixed, given), **options)

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        if any(issubclass(x, ArrayFunctions) for x in types):
            return NotImplemented
        return function(*map(fixed, given), **{name: fixed(x) for name, x in options.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorder.fix(self.place), name)

    def __bool__(self) -> bool:
        return bool(self.recorder.ask(self.place, "truth", bool))


def is_number(x: Any) -> bool:
    """Return True for a boolean, an integer or a float, of Python or NumPy."""
    kind = type(x)
    if kind in (bool, int, float):
        return True
    return issubclass(kind, np.generic) and x.dtype.kind in "biuf" and x.dtype.itemsize <= 8


def fixed(x: Any) -> Any:
    """Return an object with constants in place of captured numbers."""
    if type(x) is CapturedNumber:
        return x.recorder.fix(x.place)
    return type(x)(map(fixed, x)) if type(x) in (tuple, list) else x


class Mathematics:
    """The module ``math``, whose functions take captured numbers."""

    def __getattr__(self, name: str) -> Any:
        return on_numbers(getattr(math, name))


def on_numbers(function: Any) -> Any:
    """Let a function of ``math`` take captured numbers."""
    if not callable(function):
        return function

    def call(*given: Any, **options: Any) -> Any:
        number = next((x for x in given if type(x) is CapturedNumber), None)
        if number is None or options:
            return function(*map(fixed, given), **{name: fixed(x) for name, x in options.items()})
        return number.recorder.apply(function, *given)

    return call


def _is_traced(given: Sequence[Any]) -> bool:
    """Return True if an input is a traced value."""
    return any(issubclass(type(x), ArrayFunctions) for x in given)


def _kind(x: Any) -> Hashable:
    """Return the kind of a parameter; the exact value of a number that must be a constant."""
    if not is_near(x):
        return exact(x)
    return Kind.FLOAT if isinstance(x, float | np.floating) else Kind.INTEGER


_BINARY = "add sub mul truediv floordiv mod pow lshift rshift and or xor"
_OTHERS = "lt le gt ge eq ne neg pos abs invert"
_ROUNDINGS = "floor ceil trunc"
_WITH_VALUES = "index int float complex hash repr str format divmod rdivmod"


def _operate(name: str, function: Callable[..., Any]) -> None:
    """Record an operator, and its reflection."""

    def method(self: CapturedNumber, *given: Any) -> Any:
        return NotImplemented if _is_traced(given) else self.recorder.apply(function, self, *given)

    def reflected(self: CapturedNumber, other: Any) -> Any:
        return self.recorder.apply(function, other, self)

    setattr(CapturedNumber, f"__{name}__", method)
    if name in _BINARY.split():
        setattr(CapturedNumber, f"__r{name}__", reflected)


def _with_value(name: str) -> None:
    """Call a method of the number itself."""

    def method(self: CapturedNumber, *given: Any) -> Any:
        return getattr(fixed(self), f"__{name}__")(*map(fixed, given))

    setattr(CapturedNumber, f"__{name}__", method)


for _name in f"{_BINARY} {_OTHERS}".split():
    _operate(_name, pow if _name == "pow" else getattr(operator, f"__{_name}__"))
for _name in _ROUNDINGS.split():
    _operate(_name, getattr(math, _name))
_operate("round", round)
for _name in _WITH_VALUES.split():
    _with_value(_name)
