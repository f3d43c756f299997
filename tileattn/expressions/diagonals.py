"""Expressions of the distance ``i - j``: one value for each diagonal of a tile.

A tile of M queries and N keys has M + N - 1 diagonals. Expressions of ``i - j`` are evaluated on
the diagonals, and viewed as a tile without a copy.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tileattn.expressions.nodes import Node, depends_on, ordered

Array = NDArray[Any]

_OF_DISTANCE = ("subtract", "less", "less_equal", "equal", "not_equal")


class Diagonals(NamedTuple):
    """The diagonals of a tile."""

    distance: Array  # (1, M + N - 1), i - j of each
    rows: int
    columns: int

    @classmethod
    def of(cls, i: Any, j: Any) -> "Diagonals | None":
        """Return the diagonals of indices along the last two axes; None for other layouts."""
        i, j = np.asarray(i), np.asarray(j)
        if i.shape[-2:-1] != (i.size,) or j.shape[-1:] != (j.size,) or not i.size * j.size:
            return None
        i, j = i.ravel(), j.ravel()
        if (np.diff(i) != 1).any() or (np.diff(j) != 1).any():
            return None
        return cls(np.arange(i[0] - j[-1], i[-1] - j[0] + 1)[None], len(i), len(j))

    def tile(self, x: Array) -> Array:
        """View values of the diagonals, (..., 1, M + N - 1), as a tile, (..., M, N)."""
        start, step = x[..., self.columns - 1 :], x.strides[-1]
        shape, strides = (*x.shape[:-2], self.rows, self.columns), (*x.strides[:-2], step, -step)
        return as_strided(start, shape, strides, writeable=False)


def is_distance(node: Node) -> bool:
    """Return True if a node compares or subtracts the indices of a query and a key."""
    return node.op in _OF_DISTANCE and {x.value for x in node.inputs if x.op == "input"} == {*"ij"}


def of_distance(nodes: Sequence[Node], *, moved: bool = False) -> set[Node]:
    """Collect the nodes that depend on a pair only through its distance.

    With ``moved``, each index may be shifted by a value that is constant for a head.
    """
    found: set[Node] = set()
    fixed: set[Node] = set()  # the same for all pairs of a head
    for node in nodes:
        if is_distance(node) or (moved and _is_moved_distance(node, fixed)):
            found.add(node)
        elif all(x in found or x in fixed for x in node.inputs):
            varies = any(x in found for x in node.inputs)
            if varies:
                found.add(node)
            elif node.op != "input" or node.value in ("b", "h"):
                fixed.add(node)
    return found


def _is_moved_distance(node: Node, fixed: set[Node]) -> bool:
    """Return True if a node compares or subtracts, maybe shifted, query and key indices."""
    places = set()
    for x in node.inputs:
        name, *others = sorted(x.inputs, key=fixed.__contains__) if x.op == "add" else [x]
        places.add(name.value if name.op == "input" and fixed.issuperset(others) else None)
    return node.op in _OF_DISTANCE and places == {*"ij"}


def by_distance(outputs: Sequence[Node]) -> bool:
    """Return True if expressions depend on a pair only through its distance, and on no score."""
    found = of_distance(ordered(outputs), moved=True)
    return all(x in found or not any(depends_on(x, name) for name in "sij") for x in outputs)
