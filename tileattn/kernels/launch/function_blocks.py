"""Which blocks a ``mask_mod`` leaves empty or full, as far as kernels are told.

Arrays are on the device, and nobody waits for their values: intervals decide without them.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.block_mask import FULL, PARTIAL, BlockMask
from tileattn.algorithm.function_mask import BLOCK
from tileattn.expressions.build import apply
from tileattn.expressions.nodes import Node, depends_on, ordered
from tileattn.expressions.quadtree import kinds_by_intervals
from tileattn.kernels.launch.block_sparse import tile_kinds
from tileattn.problem import Problem

_MOST = 1 << 20  # blocks that are looked at; of more, each is looked into by the kernels


def evaluating(P: Problem, visible: Node) -> Problem:
    """Let kernels evaluate a block mask that is known as an expression: no pair of it is stored."""
    if P.mask_mod is not None:
        visible = apply("bitwise_and", P.mask_mod, visible)
    options = P.enabled_options - {"block_mask"} | {"mask_mod"}
    return replace(P, mask_mod=visible, enabled_options=options)


def undecided(P: Problem, mask: BlockMask | None) -> bool:
    """Whether there is a function whose blocks a block mask does not already tell."""
    return P.mask_mod is not None and (mask is None or P.mask_mod != mask.expression)


def decidable(P: Problem) -> Node | None:
    """Write the mask without the values of arrays; None where the blocks are too many."""
    visible = None if P.mask_mod is None else _without_values(P.mask_mod)
    if visible is None or 0 in (P.B, P.Hq, P.Nq, P.Nk):
        return None
    blocks = -(-P.Nq // BLOCK) * -(-P.Nk // BLOCK)
    for name, n in (("b", P.B), ("h", P.Hq)):
        blocks *= n if depends_on(visible, name) else 1
    return visible if blocks <= _MOST else None


def block_kinds(P: Problem, mask: BlockMask | None = None) -> NDArray[np.int8]:
    """Give the kinds of the blocks, shape (B or 1, Hq or 1, query blocks, key blocks).

    Indices past an end of it count as the last: one partial block stands for all. ``mask`` is a
    block mask that the function evaluates, too.
    """
    visible = decidable(P) if undecided(P, mask) else None
    kinds = np.full((1, 1, 1, 1), PARTIAL if undecided(P, mask) else FULL, np.int8)
    if visible is not None:
        kinds = _kinds(visible, (P.B, P.Hq, P.Nq, P.Nk))
    if mask is not None:
        rows, columns = (-(-n // BLOCK) for n in (P.Nq, P.Nk))
        kinds = np.minimum(kinds, tile_kinds(mask, (BLOCK, BLOCK))[..., :rows, :columns])
    return kinds.astype(np.int8, copy=False)


@lru_cache(maxsize=16)
def _kinds(visible: Node, shape: tuple[int, int, int, int]) -> NDArray[np.int8]:
    kinds = kinds_by_intervals(visible, shape, (BLOCK, BLOCK))
    kinds.setflags(write=False)
    return kinds


@lru_cache(maxsize=256)
def _without_values(output: Node) -> Node:
    """Replace each element of an array by an input of which nothing is known."""
    made: dict[Node, Node] = {}
    for n, node in enumerate(ordered([output])):
        if node.op == "aux":
            made[node] = Node("input", node.kind, (), f"element {n}")
        else:
            made[node] = Node(node.op, node.kind, tuple(made[x] for x in node.inputs), node.value)
    return made[output]
