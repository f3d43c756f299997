"""Straight-line code for the path that one problem takes through planning.

Planning asks many small functions, whose calls cost more than their arithmetic. `straight_line`
runs them once on numbers that take note of each operation, and compiles these operations to one
function. A comparison becomes a guard: the function returns None for numbers with another outcome.
"""

import math
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
from typing import Any

Compiled = Callable[..., tuple[Any, ...] | None]


def straight_line(
    function: Callable[..., Sequence[Any] | None], arguments: Mapping[str, Any]
) -> Compiled | None:
    """Compile the path that some numbers take through a function that returns numbers.

    Parameters
    ----------
    function : callable
        Takes ``arguments`` by position; it returns None for numbers that it declines.
    arguments : mapping of str to number
        The numbers, by their names in the compiled code.

    Returns
    -------
    callable or None
        Takes the arguments by position, and returns what the function returns, or None on another
        path. None if the function declines the numbers, or needs more than arithmetic and
        comparisons.
    """
    code = _Code()
    try:
        found = function(*(Noted(code, name, x) for name, x in arguments.items()))
        result = None if found is None else [*map(_text, found)]
    except (TypeError, AttributeError):
        return None
    if result is None:
        return None
    body = "\n    ".join([*code.lines, f"return ({', '.join(result)},)"])
    scope: dict[str, Any] = {"floor": math.floor}
    exec(f"def compiled({', '.join(arguments)}):\n    {body}", scope)
    compiled: Compiled = scope["compiled"]
    return compiled


class _Code:
    """Statements, and the names of the values that they compute."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[str, str] = {}

    def computed(self, text: str, value: Any) -> "Noted":
        """Add the statement that computes a value, unless there is one."""
        name = self._names.get(text)
        if name is None:
            name = self._names[text] = f"x{len(self._names)}"
            self.lines.append(f"{name} = {text}")
        return Noted(self, name, value)

    def guarded(self, text: str, outcome: bool) -> bool:
        """Add a guard, unless there is one."""
        line = f"if {'not ' if outcome else ''}({text}): return None"
        if text not in self._names:
            self._names[text] = text
            self.lines.append(line)
        return outcome


class Noted:
    """A number that takes note of what is computed from it.

    It is no Python integer: functions that need one raise TypeError.
    """

    __slots__ = ("_code", "_name", "value")
    __hash__ = None  # type: ignore[assignment] # it cannot be a key

    def __init__(self, code: _Code, name: str, value: Any) -> None:
        self._code, self._name, self.value = code, name, value

    def __neg__(self) -> "Noted":
        return self._code.computed(f"-{self._name}", -self.value)

    def __round__(self) -> "Noted":
        return self._code.computed(f"round({self._name})", round(self.value))

    def __floor__(self) -> "Noted":
        return self._code.computed(f"floor({self._name})", math.floor(self.value))

    def __bool__(self) -> bool:
        return self._code.guarded(f"{self._name} != 0", self.value != 0)


def pinned(x: Any) -> Any:
    """Return the value of a number, with a guard that it stays the same."""
    if isinstance(x, Noted):
        x._code.guarded(f"{x._name} == {x.value!r}", True)
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


def _operation(symbol: str, function: Callable[[Any, Any], Any], *, swapped: bool = False) -> Any:
    def noted(self: Noted, other: Any) -> Noted:
        a, b = (other, self) if swapped else (self, other)
        text = f"{_text(a)} {symbol} {_text(b)}"
        return self._code.computed(text, function(_value(a), _value(b)))

    return noted


def _comparison(symbol: str, function: Callable[[Any, Any], bool]) -> Any:
    def noted(self: Noted, other: Any) -> bool:
        if other is None:
            return function(0, other)
        text = f"{self._name} {symbol} {_text(other)}"
        return self._code.guarded(text, function(self.value, _value(other)))

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
