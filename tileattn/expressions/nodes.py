"""Expressions: immutable, typed nodes of a directed acyclic graph.

Nodes with the same meaning are equal, so a visitor handles a common subexpression once. A visitor
is a table of rules by operation, and one loop over `ordered`.
"""

import enum
import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any


class Kind(enum.IntEnum):
    """The type of a node's value, in the order of promotion."""

    BOOLEAN = 0
    INTEGER = 1  # 64 bits, with the semantics of NumPy's int64
    FLOAT = 2  # of the dtype in which the expression is evaluated


INDICES = ("b", "h", "i", "j")
"""Names of the integer inputs: batch entry, query head, query and key."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation, input or constant; ``aux`` is an element of an array, at integer indices.

    A parameter is a constant whose value is not part of the expression (`parameters`).
    """

    op: str
    kind: Kind
    inputs: tuple["Node", ...] = ()
    # A constant; the name of an input; the number of an array of aux, or of a parameter.
    value: bool | int | float | str | None = None
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # hex() tells -0.0 from 0.0, and a NaN equals itself.
        value = self.value.hex() if isinstance(self.value, float) else repr(self.value)
        text = f"{self.op} {int(self.kind)} {value}".encode()
        parts = b"".join(node.digest for node in self.inputs)
        object.__setattr__(self, "digest", hashlib.blake2b(parts + text, digest_size=16).digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_text, (to_text(self),)  # without recursion: expressions may be deep


def constant(value: bool | float) -> Node:
    """Make a constant; its kind is that of the value."""
    kinds = {bool: Kind.BOOLEAN, int: Kind.INTEGER, float: Kind.FLOAT}
    return Node("constant", kinds[type(value)], (), value)


def ordered(outputs: Iterable[Node], leaves: Container[Node] = ()) -> list[Node]:
    """List the nodes of some outputs, each once and after its inputs.

    The inputs of ``leaves`` are left out.
    """
    found: dict[Node, None] = {}
    stack: list[tuple[Node, Iterator[Node]]] = []

    def inputs_of(node: Node) -> Iterator[Node]:
        return iter(() if node in leaves else node.inputs)

    for output in outputs:
        stack.append((output, inputs_of(output)))
        while stack:
            node, inputs = stack[-1]
            following = next((x for x in inputs if x not in found), None)
            if following is not None:
                stack.append((following, inputs_of(following)))
            else:
                found[node] = None
                stack.pop()
    return list(found)


@lru_cache(maxsize=256)
def to_text(output: Node) -> str:
    """Serialise an expression as a JSON list of its nodes, each after its inputs."""
    nodes = {node: n for n, node in enumerate(ordered([output]))}
    rows = [(x.op, int(x.kind), x.value, *(nodes[y] for y in x.inputs)) for x in nodes]
    return json.dumps(rows, separators=(",", ":"))


@lru_cache(maxsize=256)
def from_text(text: str) -> Node:
    """Parse the output of `to_text`."""
    made: list[Node] = []
    for op, kind, value, *inputs in json.loads(text):
        made.append(Node(op, Kind(kind), tuple(made[n] for n in inputs), value))
    return made[-1]


@lru_cache(maxsize=1024)
def depends_on(output: Node, name: str) -> bool:
    """Return True if an expression reads an input."""
    return any(node.op == "input" and node.value == name for node in ordered([output]))


def substituted(output: Node, by: Mapping[Node, Node]) -> Node:
    """Replace some nodes of an expression."""
    made: dict[Node, Node] = {}
    for node in ordered([output], by):
        inputs = () if node in by else tuple(made[x] for x in node.inputs)
        made[node] = by.get(node) or Node(node.op, node.kind, inputs, node.value)
    return made[output]


def replaced(output: Node, name: str, by: Node) -> Node:
    """Replace an input by a node."""
    inputs = (x for x in ordered([output]) if x.op == "input" and x.value == name)
    return substituted(output, dict.fromkeys(inputs, by))


def elements(output: Node) -> list[Node]:
    """List the elements of ``aux`` that an expression reads."""
    return [node for node in ordered([output]) if node.op == "aux"]
