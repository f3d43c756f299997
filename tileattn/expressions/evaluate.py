"""The NumPy visitor: evaluate expressions on arrays, each node in its broadcast shape.

An expression of batch entry, head and key is evaluated once for a tile, not for each query; an
expression of ``i - j`` once for each distance.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.expressions.build import FUNCTIONS
from tileattn.expressions.diagonals import Diagonals, is_distance, of_distance
from tileattn.expressions.intervals import may_be_negative
from tileattn.expressions.nodes import Kind, Node, ordered
from tileattn.expressions.parameters import hoisted

Array = NDArray[Any]


class Step(NamedTuple):
    """One node of a program; values are kept in slots until their last use."""

    node: Node
    inputs: tuple[int, ...]
    done: tuple[int, ...]  # slots that no later step reads
    of_distance: bool
    number: int | None  # of a hoisted expression


@lru_cache(maxsize=256)
def program(outputs: tuple[Node, ...]) -> tuple[list[Step], list[int]]:
    """Order the steps of some outputs; return them, and the slots of the outputs."""
    numbers = hoisted(outputs)
    nodes = ordered(outputs, numbers)
    slots = {node: n for n, node in enumerate(nodes)}
    inputs = [tuple(slots[x] for x in (() if y in numbers else y.inputs)) for y in nodes]
    last = {slot: n for n, given in enumerate(inputs) for slot in given}
    kept = [slots[node] for node in outputs]
    done: dict[int, list[int]] = {}
    for slot, n in last.items():
        if slot not in kept:
            done.setdefault(n, []).append(slot)
    diagonal = of_distance(ordered(outputs))
    steps = [
        Step(node, inputs[n], tuple(done.get(n, ())), node in diagonal, numbers.get(node))
        for n, node in enumerate(nodes)
    ]
    return steps, kept


def evaluate(
    outputs: Sequence[Node],
    inputs: Mapping[str, Any],
    aux: Sequence[Array],
    dtype: np.dtype[Any],
    constants: Sequence[int] = (),
) -> list[Array]:
    """Evaluate some outputs together.

    ``inputs`` broadcast against one another. Negative indices into ``aux`` count from the end;
    indices past an end are clamped. An output may be one of the inputs. ``constants`` are the cells
    of the parameters.
    """
    types = {Kind.BOOLEAN: np.dtype(np.bool_), Kind.INTEGER: np.dtype(np.int64), Kind.FLOAT: dtype}
    steps, kept = program(tuple(outputs))
    diagonals = None
    if any(step.of_distance for step in steps):
        diagonals = Diagonals.of(inputs["i"], inputs["j"])
    values: list[Any] = [None] * len(steps)
    numbers = hoisted(tuple(outputs)).numbers(constants) if constants else []

    def value(slot: int, along: bool) -> Any:
        """Look up a value: along the diagonals, or for each pair."""
        if along or diagonals is None or not steps[slot].of_distance:
            return values[slot]
        return diagonals.tile(values[slot])

    for n, (node, slots, done, along, number) in enumerate(steps):
        if number is not None:
            values[n] = types[node.kind].type(numbers[number])
            continue
        if diagonals is not None and is_distance(node):
            given = [diagonals.distance if x.value == "i" else np.int64(0) for x in node.inputs]
        else:
            given = [value(slot, along) for slot in slots]
        values[n] = _value(node, given, inputs, aux, types[node.kind])
        for slot in done:
            values[slot] = None
    return [np.asarray(value(slot, along=False)) for slot in kept]


def clamped(x: Array, indices: Sequence[Any]) -> tuple[Any, ...]:
    """Clamp indices to -n .. n - 1 for an axis of n elements."""
    return tuple(
        np.minimum(np.maximum(index, -n), n - 1) for index, n in zip(indices, x.shape, strict=True)
    )


def places(element: Node, x: Array, indices: Sequence[Any], dtype: np.dtype[Any]) -> list[Any]:
    """Return the indices of the elements that are read, counted from the start of each axis."""
    found = zip(element.inputs, clamped(x, indices), x.shape, strict=True)
    return [np.where(at < 0, at + n, at) if may_be_negative(i, dtype) else at for i, at, n in found]


def _value(
    node: Node,
    given: list[Any],
    inputs: Mapping[str, Any],
    aux: Sequence[Array],
    dtype: np.dtype[Any],
) -> Any:
    if node.op == "input":
        return inputs[str(node.value)]
    if node.op == "constant":
        return dtype.type(node.value)
    if node.op == "aux":
        array = aux[int(node.value or 0)]
        return array[clamped(array, given)].astype(dtype, copy=False)
    if node.op == "cast":
        return given[0].astype(dtype)
    function: Callable[..., Any] = FUNCTIONS[node.op]
    return function(*given)
