"""Parameters of expressions: numbers that may differ from call to call, in cells of 64 bits.

A cell is an int64, or the bits of a float64. So NaN equals itself, and -0.0 differs from 0.0.
"""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tileattn.expressions.build import apply, computed
from tileattn.expressions.derivative import derivatives
from tileattn.expressions.nodes import (
    Kind,
    Node,
    elements,
    from_text,
    ordered,
    substituted,
    to_text,
)

NEAR = 1 << 30
"""Integer parameters are at least -NEAR and below NEAR: plus an index they fit in 32 bits."""

_DOUBLE, _INT64 = struct.Struct("<d"), struct.Struct("<q")
DIVISIONS = ("floor_divide", "remainder", "left_shift", "right_shift")


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression and the cells of its parameters; it may be passed in place of a function.

    Parameters
    ----------
    node : Node
        The expression; parameter n has the op ``"parameter"`` and the value n.
    constants : tuple of int
        The cell of each parameter.
    """

    node: Node
    constants: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Serialise as the text of the node, followed by the cells."""
        return " ".join([to_text(self.node), *map(str, self.constants)])

    @classmethod
    def from_text(cls, text: str) -> "Expression":
        """Parse the output of `to_text`."""
        node, _, cells = text.rpartition("]")
        return cls(from_text(f"{node}]"), tuple(map(int, cells.split())))


def joined(op: str, x: Expression, y: Expression) -> Expression:
    """Apply an operation to two expressions; the parameters of the first one come first."""
    node = apply(op, x.node, renumbered(y.node, len(x.constants)))
    return Expression(node, x.constants + y.constants)


def parameter(n: int, kind: Kind) -> Node:
    """Make parameter n."""
    return Node("parameter", kind, (), n)


def cell_of(x: float) -> int:
    """Return the cell of a number."""
    if isinstance(x, float | np.floating):
        bits: int = _INT64.unpack(_DOUBLE.pack(x))[0]
        return bits
    return int(x)


def number_of(kind: Kind, cell: int) -> bool | int | float:
    """Return the number in a cell."""
    if kind == Kind.FLOAT:
        number: float = _DOUBLE.unpack(_INT64.pack(cell))[0]
        return number
    return bool(cell) if kind == Kind.BOOLEAN else cell


@lru_cache(maxsize=256)
def renumbered(output: Node, first: int) -> Node:
    """Return an expression whose parameters count from ``first``."""
    own = [x for x in ordered([output]) if x.op == "parameter"] if first else []
    return substituted(output, {x: parameter(first + int(x.value or 0), x.kind) for x in own})


def index_cells(output: Node, constants: tuple[int, ...]) -> tuple[int, ...]:
    """Return the cells that indices into arrays depend on; the others are 0.

    What depends only on indices is kept under these: other numbers may differ in every call.
    """
    used = _of_indices(output) if constants else ()
    return tuple([cell if n in used else 0 for n, cell in enumerate(constants)])


@lru_cache(maxsize=256)
def _of_indices(output: Node) -> frozenset[int]:
    nodes = ordered(elements(output))
    return frozenset(int(x.value or 0) for x in nodes if x.op == "parameter")


class Hoisted(dict[Node, int]):
    """Expressions that have one value in a call, numbered.

    Their floats are computed in float64, as folded constants are.
    """

    def __init__(self, outputs: Sequence[Node]) -> None:
        super().__init__({node: n for n, node in enumerate(outputs)})
        self._nodes = ordered(outputs)
        slots = {node: n for n, node in enumerate(self._nodes)}
        self._inputs = [[slots[x] for x in node.inputs] for node in self._nodes]
        self._slots = [slots[node] for node in outputs]
        self._known = [
            computed("cast", x.kind, [np.asarray(x.value)[()]]) if x.op == "constant" else None
            for x in self._nodes
        ]
        # Often they are the parameters themselves.
        self._parameters = [int(x.value or 0) for x in outputs if x.op == "parameter"]

    def cells(self, constants: Sequence[int]) -> tuple[int, ...]:
        """Return their cells, given the cells of the parameters."""
        if len(self._parameters) == len(self):
            return tuple([constants[n] for n in self._parameters])
        values: list[Any] = [*self._known]
        for n, node in enumerate(self._nodes):
            if node.op == "parameter":
                number = number_of(node.kind, constants[int(node.value or 0)])
                values[n] = np.float64(number) if node.kind == Kind.FLOAT else np.int64(number)
            elif node.op != "constant":
                values[n] = computed(node.op, node.kind, [values[x] for x in self._inputs[n]])
        return tuple([cell_of(values[n]) for n in self._slots])

    def numbers(self, constants: Sequence[int]) -> list[bool | int | float]:
        """Return their values, given the cells of the parameters."""
        cells = self.cells(constants)
        return [number_of(x.kind, cell) for x, cell in zip(self, cells, strict=True)]


@lru_cache(maxsize=256)
def hoisted(outputs: tuple[Node, ...]) -> Hoisted:
    """Find the largest subexpressions of parameters and constants only."""
    nodes = ordered(outputs)
    fixed: set[Node] = set()
    for node in nodes:
        varying = [x for x in node.inputs if x.op != "constant"]
        is_computed = varying and node.op != "aux" and fixed.issuperset(varying)
        if node.op == "parameter" or is_computed:
            fixed.add(node)
    used = {x for node in nodes if node not in fixed for x in node.inputs}.union(outputs)
    return Hoisted([x for x in nodes if x in fixed and x in used])


@lru_cache(maxsize=256)
def kernel_cells(score_mod: Node | None, mask_mod: Node | None) -> Hoisted:
    """Find the hoisted expressions of a call's functions, and of the derivatives of scores.

    Kernels read their cells.
    """
    outputs = [x for x in (score_mod, mask_mod) if x is not None]
    if score_mod is not None:
        outputs += derivatives(score_mod).values()
    return hoisted(tuple(outputs))


def lifted(output: Node, literals: Collection[Any] = ()) -> Expression:
    """Turn the constants of an expression into parameters, except ``literals``.

    Integers that divide, shift or are not `NEAR` stay constants: kernels are faster by them.
    """
    nodes = ordered([output])
    divisors = {x.inputs[1] for x in nodes if x.kind == Kind.INTEGER and x.op in DIVISIONS}
    made: dict[Node, Node] = {}
    for node in nodes:
        is_number = node.op == "constant" and is_near(node.value)
        if is_number and node not in divisors and node.value not in literals:
            made[node] = parameter(len(made), node.kind)
    numbers: list[Any] = [node.value for node in made]
    return Expression(substituted(output, made), tuple(map(cell_of, numbers)))


def is_near(x: Any) -> bool:
    """Return True for a float, or an integer that is `NEAR`; not for booleans."""
    if isinstance(x, float | np.floating):
        return True
    is_integer = isinstance(x, int | np.integer) and not isinstance(x, bool)
    return is_integer and -NEAR <= x < NEAR
