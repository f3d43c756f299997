"""Straight-line code for the paths that calls take through validation and planning.

Planning asks many small functions, whose calls cost more than their arithmetic. `Paths` runs them
on numbers that take note of each operation, and compiles these operations to one function. A
comparison becomes a branch: to the path of another call, or out of the function.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from operator import (
    add,
    and_,
    eq,
    floordiv,
    ge,
    gt,
    le,
    lshift,
    lt,
    mod,
    mul,
    ne,
    or_,
    rshift,
    sub,
    truediv,
)
from threading import Lock
from typing import Any, NamedTuple

_VARIABLE = re.compile(r"\bx\d+\b")


class Paths:
    """The paths that were taken through a function of numbers, as one function."""

    def __init__(self) -> None:
        self._paths, self._lock = list[_Path](), Lock()
        self.ends: list[Any] = []
        """What `add` was given for each path."""
        self.find: Callable[..., tuple[Any, ...] | None] = lambda *_: None
        """Return what the function returns, then the number of the path that the arguments take.

        None if they take no path that was added.
        """

    def add(
        self,
        function: Callable[..., Sequence[Any] | None],
        arguments: Mapping[str, Any],
        end: Any = None,
    ) -> bool:
        """Add the path that some numbers take; return False if it cannot be compiled.

        Parameters
        ----------
        function : callable
            Returns numbers, or None for numbers that it declines. On a path that can be compiled it
            needs arithmetic and comparisons only.
        arguments : mapping of str to number
            Its arguments, by their names in the compiled code; the same names for all paths.
        end : object
            Kept in ``ends``.
        """
        steps = _Steps()
        try:
            found = function(*(Noted(steps, name, x) for name, x in arguments.items()))
            result = None if found is None else [*map(_text, found)]
        except (TypeError, AttributeError):
            return False
        if result is None:
            return False
        with self._lock:
            values = ", ".join([*result, str(len(self._paths))])
            self._paths.append(_Path(steps.taken, f"return ({values},)"))
            self.ends.append(end)
            body = "\n    ".join(_written(self._paths, 0)[0])
            scope: dict[str, Any] = {"floor": math.floor}
            exec(f"def find({', '.join(arguments)}):\n    {body}\n", scope)
            self.find = scope["find"]
        return True


class _Step(NamedTuple):
    """One line of a path: a variable with its expression, or a condition with its outcome."""

    text: str
    variable: str = ""
    outcome: bool = True


class _Path(NamedTuple):
    """The steps of one path, and its last line."""

    steps: list[_Step]
    end: str


def _written(paths: Sequence[_Path], first: int) -> tuple[list[str], set[str]]:
    """Write paths that agree before a step; also return the variables that the lines read.

    Variables that no path reads are left out.
    """
    made: list[tuple[str, list[str]]] = []  # a variable or "", and lines
    read: set[str] = set()
    for n in range(first, len(paths[0].steps)):
        step = paths[0].steps[n]
        alike = [path for path in paths if path.steps[n] == step]
        if step.variable:
            made.append((step.variable, [f"{step.variable} = {step.text}"]))
            continue
        if len(alike) == len(paths):
            made.append(("", [f"if {_denied(step)}: return None"]))
            continue
        # Numbers that meet a condition take no path with another one.
        inner, read = _written(alike, n + 1)
        outer, others = _written([path for path in paths if path.steps[n] != step], n)
        met = step.text if step.outcome else f"not ({step.text})"
        made.append(("", [f"if {met}:", *(f"    {line}" for line in inner), *outer]))
        read |= others
        break
    else:
        made.append(("", [paths[0].end]))
    lines: list[str] = []
    for variable, text in reversed(made):
        if not variable or variable in read:
            read.update(_VARIABLE.findall(text[0]))
            lines[:0] = text
    return lines, read


def _denied(step: _Step) -> str:
    return f"not ({step.text})" if step.outcome else step.text


class _Steps:
    """The steps that a path has taken."""

    def __init__(self) -> None:
        self.taken: list[_Step] = []
        self._known: dict[str, str] = {}  # expressions and conditions

    def computed(self, text: str, value: Any) -> "Noted":
        """Compute a value, unless a variable has it."""
        name = self._known.get(text)
        if name is None:
            name = self._known[text] = f"x{len(self._known)}"
            self.taken.append(_Step(text, variable=name))
        return Noted(self, name, value)

    def compared(self, text: str, outcome: bool) -> bool:
        """Meet a condition, unless it was met before."""
        if text not in self._known:
            self._known[text] = text
            self.taken.append(_Step(text, outcome=outcome))
        return outcome


class Noted:
    """A number that takes note of what is computed from it.

    It is no Python integer: functions that need one raise TypeError.
    """

    __slots__ = ("_name", "_steps", "value")
    __hash__ = None  # type: ignore[assignment] # it cannot be a key

    def __init__(self, steps: _Steps, name: str, value: Any) -> None:
        self._steps, self._name, self.value = steps, name, value

    def __neg__(self) -> "Noted":
        return self._steps.computed(f"-{self._name}", -self.value)

    def __round__(self) -> "Noted":
        return self._steps.computed(f"round({self._name})", round(self.value))

    def __floor__(self) -> "Noted":
        return self._steps.computed(f"floor({self._name})", math.floor(self.value))

    def __bool__(self) -> bool:
        return self._steps.compared(f"{self._name} != 0", self.value != 0)


def pinned(x: Any) -> Any:
    """Return the value of a number; it is the same on the whole path."""
    if isinstance(x, Noted):
        x._steps.compared(f"{x._name} == {x.value!r}", True)
        return x.value
    return x


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Noted) else x


def _text(x: Any) -> str:
    if isinstance(x, Noted):
        return x._name
    if type(x) not in (int, float, bool):
        raise TypeError(f"a number must be combined with a number; got {x!r}")
    return repr(x)


# Operations on integers that return the first one, and those that return either.
_ALWAYS = {("*", 1), ("+", 0)}
_UNCHANGED = _ALWAYS | {("//", 1), ("-", 0)}


def _operation(symbol: str, function: Callable[[Any, Any], Any], *, swapped: bool = False) -> Any:
    def noted(self: Noted, other: Any) -> Noted:
        are_integers = type(other) is int is type(self.value)
        if are_integers and (symbol, other) in (_ALWAYS if swapped else _UNCHANGED):
            return self
        a, b = (other, self) if swapped else (self, other)
        text = f"{_text(a)} {symbol} {_text(b)}"
        return self._steps.computed(text, function(_value(a), _value(b)))

    return noted


def _comparison(symbol: str, function: Callable[[Any, Any], bool]) -> Any:
    def noted(self: Noted, other: Any) -> bool:
        if other is None:
            return function(0, other)
        text = f"{self._name} {symbol} {_text(other)}"
        return self._steps.compared(text, function(self.value, _value(other)))

    return noted


_OPERATIONS = {
    **{"add": ("+", add), "sub": ("-", sub), "mul": ("*", mul), "truediv": ("/", truediv)},
    **{"floordiv": ("//", floordiv), "mod": ("%", mod)},
    **{"lshift": ("<<", lshift), "rshift": (">>", rshift), "and": ("&", and_), "or": ("|", or_)},
}
_COMPARISONS = {
    **{"lt": ("<", lt), "le": ("<=", le), "gt": (">", gt), "ge": (">=", ge)},
    **{"eq": ("==", eq), "ne": ("!=", ne)},
}
for _name, (_symbol, _function) in _OPERATIONS.items():
    setattr(Noted, f"__{_name}__", _operation(_symbol, _function))
    setattr(Noted, f"__r{_name}__", _operation(_symbol, _function, swapped=True))
for _name, (_symbol, _function) in _COMPARISONS.items():
    setattr(Noted, f"__{_name}__", _comparison(_symbol, _function))
