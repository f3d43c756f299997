"""The tree mask of speculative decoding, as a mask function with arrays of its own.

The last Nq keys of a sequence are the nodes of a tree, as its queries are. With ``first`` the first
of these keys, query i attends to key j where::

    j < first[b] or tree_mask[b, i, j - first[b]]
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tileattn.expressions.build import apply, element
from tileattn.expressions.nodes import INDICES, Kind, Node, constant

_B, _, _I, _J = (Node("input", Kind.INTEGER, (), name) for name in INDICES)


def with_tree(mask: Node | None, options: Mapping[str, Any], count: int) -> Node | None:
    """Narrow a mask to the tree of a call, whose arrays come behind the caller's, so many."""
    if options.get("tree_mask") is None:
        return mask
    first = element(count + 1, Kind.INTEGER, (_B,))
    node = apply("maximum", apply("subtract", _J, first), constant(0))
    # Indices past the end are moved to it: b to 0 where all sequences share one tree.
    in_tree = element(count, Kind.BOOLEAN, (_B, _I, node))
    visible = apply("bitwise_or", apply("less", _J, first), in_tree)
    return visible if mask is None else apply("bitwise_and", mask, visible)


def tree_arrays(options: Mapping[str, Any], kv_lengths: Any, Nq: int) -> tuple[Any, ...]:
    """Give the arrays that the mask of a tree reads."""
    tree = options.get("tree_mask")
    return () if tree is None else (tree, kv_lengths.astype(np.int64, copy=False) - Nq)
