"""Which tiles masks leave empty or full, as far as that is known before a pass.

Arrays are on the device, and the host does not wait for their values: tiles of a ``mask_mod`` that
reads an array are classified on the device, just before the pass. A plan without tables leaves the
tiles of other functions to the device as well.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.call.block_mask import FULL, PARTIAL, BlockMask
from tileattn.call.problem import Problem
from tileattn.expressions.build import apply
from tileattn.expressions.intervals import ROUNDED
from tileattn.expressions.nodes import Node, depends_on, ordered
from tileattn.expressions.parameters import Expression, renumbered
from tileattn.expressions.quadtree import kinds_by_intervals
from tileattn.kernels.cuda.plan.block_sparse import once_for_mask, tile_kinds
from tileattn.kernels.cuda.plan.layout import Constant

# Tiles that are classified on the host, where results are kept, and on the device, in each call. If
# there are more, kernels look into each.
_MOST, _MOST_ON_DEVICE = 1 << 20, 1 << 24

_KNOWN_TO_DEVICE = frozenset({"aux", "power", *ROUNDED})  # operations


class TileKinds(NamedTuple):
    """How the tiles of a pass are classified, given its block mask if it has one."""

    tile: tuple[int, int]  # queries and keys
    shape: tuple[int, int, int, int]  # B, Hq, Nq, Nk
    function: Node | None = None  # the caller's own mask, where no block mask tells its tiles
    decided: str = ""  # where its kinds are found: on the "host", on the "device", or nowhere
    is_provisional: bool = False  # True: on the device although the host could decide
    constants: tuple[int, ...] = ()  # the cells of its parameters

    @property
    def on_device(self) -> bool:
        """True if kernels write the kinds."""
        return self.decided == "device"

    def device_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the kinds: (B or 1, Hq or 1, query tiles, key tiles)."""
        return _device_shape(self.function, self.shape, self.tile)

    @once_for_mask
    def kinds(self, mask: BlockMask | None) -> NDArray[np.int8]:
        """Classify each tile as empty, partial or full, as far as the host knows.

        An array that broadcasts to (B, Hq, query tiles, key tiles).
        """
        kinds: Any = np.full((1, 1, 1, 1), FULL, np.int8)
        if mask is not None:
            *_, rows, columns = self.device_shape()
            kinds = tile_kinds(mask, self.tile)[..., :rows, :columns]
        if self.function is not None and self.decided == "host":
            own = kinds_by_intervals(self.function, self.shape, self.tile, constants=self.constants)
            kinds = np.minimum(kinds, own)
        elif self.function is not None:
            kinds = np.minimum(kinds, PARTIAL)
        return np.asarray(kinds, np.int8)

    @once_for_mask
    def constant(self, mask: BlockMask | None) -> Constant:
        """Return the kinds as an array that a plan uploads."""
        return Constant.of(self.kinds(mask))


def tile_kinds_of(
    P: Problem, mask: BlockMask | None, tile: tuple[int, int], *, tables: bool = True
) -> TileKinds:
    """Say what the kinds of tiles are made of; ``mask`` is the call's block mask.

    Without ``tables`` the device classifies the tiles of every ``mask_mod``.
    """
    shape = P.B, P.Hq, P.Nq, P.Nk
    own = P.mask_mod
    if own is None or (mask is not None and _evaluates(P, mask)):
        return TileKinds(tile, shape)
    if P.sequences is not None:  # tiles begin where sequences do, which the device alone may know
        return TileKinds(tile, shape, own, constants=P.constants)
    count = math.prod(_device_shape(own, shape, tile))
    of_host = count <= _MOST and kinds_agree(own)
    if mask is None and not (of_host and tables) and 0 < count <= _MOST_ON_DEVICE:
        return TileKinds(tile, shape, own, "device", of_host, P.constants)
    decided = "host" if 0 < count <= _MOST else ""
    return TileKinds(tile, shape, without_values(own), decided, constants=P.constants)


def _device_shape(
    own: Node | None, shape: tuple[int, int, int, int], tile: tuple[int, int]
) -> tuple[int, int, int, int]:
    B, Hq, Nq, Nk = shape
    b = B if own is not None and depends_on(own, "b") else 1
    h = Hq if own is not None and depends_on(own, "h") else 1
    return b, h, -(-Nq // tile[0]), -(-Nk // tile[1])


@lru_cache(maxsize=256)
def kinds_agree(own: Node) -> bool:
    """Return True if host and device find the same kinds, so that results have the same bits.

    The host does not know the elements of arrays, and libraries round some functions differently.
    Bounds of all other functions are exact or correctly rounded.
    """
    return not any(node.op in _KNOWN_TO_DEVICE for node in ordered([own]))


def evaluating(P: Problem, visible: Expression) -> Problem:
    """Let kernels evaluate a block mask that is an expression: no pair of it is stored."""
    node, constants = renumbered(visible.node, len(P.constants)), P.constants + visible.constants
    if P.mask_mod is not None:
        node = apply("bitwise_and", P.mask_mod, node)
    return replace(P.without_block_mask(), mask_mod=node, constants=constants)


def _evaluates(P: Problem, mask: BlockMask) -> bool:
    """Return True if the mask function is a block mask, and nothing else."""
    if mask.expression is None:
        return False
    node, constants = mask.expression.node, mask.expression.constants
    first = len(P.constants) - len(constants)
    return P.constants[first:] == constants and P.mask_mod == renumbered(node, first)


@lru_cache(maxsize=256)
def without_values(output: Node) -> Node:
    """Replace each element of an array by an input of unknown value."""
    made: dict[Node, Node] = {}
    for n, node in enumerate(ordered([output])):
        if node.op == "aux":
            made[node] = Node("input", node.kind, (), f"element {n}")
        else:
            made[node] = Node(node.op, node.kind, tuple(made[x] for x in node.inputs), node.value)
    return made[output]
