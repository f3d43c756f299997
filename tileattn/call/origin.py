"""Where a call starts in a larger one: its functions take indices of that one.

Of each sequence four integers are added to the indices b, h, i and j.
"""

from typing import Any

from tileattn.expressions.build import apply, element
from tileattn.expressions.nodes import INDICES, Kind, Node, constant, replaced


def from_origin(function: Node, count: int) -> Node:
    """Let a function count from an origin, which is the array ``aux[count]``."""
    # b is the first: what is read at b is not moved again.
    for n, name in enumerate(INDICES):
        start = element(count, Kind.INTEGER, (_input("b"), constant(n)))
        function = replaced(function, name, apply("add", _input(name), start))
    return function


def origin_arrays(origin: Any, functions: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the array that functions read, if there are any."""
    there = origin is not None and any(function is not None for function in functions)
    return (origin,) if there else ()


def _input(name: str) -> Node:
    return Node("input", Kind.INTEGER, (), name)
