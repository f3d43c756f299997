"""The user's own mask: its pairs, and the tiles in which some pair may be visible."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.tiles import cut_between
from tileattn.call.block_mask import FULL, PARTIAL
from tileattn.expressions.build import apply
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.extrema import RangeExtrema
from tileattn.expressions.nodes import INDICES, Kind, Node, depends_on, elements
from tileattn.expressions.quadtree import BlockRuns, find_blocks
from tileattn.expressions.trace import Traced

Rectangle = tuple[int, int, int, int, int]
"""Queries from and to, keys from and to, and the kind."""

BLOCK = 128  # queries and keys of a block; a partial block is evaluated pair by pair

_I, _J = (Node("input", Kind.INTEGER, (), name) for name in "ij")


def extrema(visible: Node, aux: Sequence[NDArray[Any]]) -> list[RangeExtrema | None]:
    """Return the extrema of the arrays that a mask reads."""
    read = {node.value for node in elements(visible)}
    return [RangeExtrema(x) if n in read else None for n, x in enumerate(aux)]


class FunctionMask:
    """A ``mask_mod`` with the arrays that it reads, for the heads of one call.

    Parameters
    ----------
    visible : Node
        The expression of the function.
    aux : sequence of array
        Arrays that it reads.
    block : int
        Queries and keys of a block.
    constants : sequence of int
        The cells of its parameters.
    """

    def __init__(
        self,
        visible: Node,
        aux: Sequence[NDArray[Any]],
        block: int = BLOCK,
        constants: Sequence[int] = (),
    ) -> None:
        self._visible, self._aux, self._block, self._constants = visible, aux, block, constants
        self._extrema = extrema(visible, aux)
        self.over_batch, self.over_heads = (depends_on(visible, name) for name in "bh")
        self._found: dict[Any, VisibleBlocks] = {}
        self._lock = Lock()

    def visible(self, *indices: Any) -> NDArray[np.bool_]:
        """Return True if query ``i`` of batch entry ``b`` and head ``h`` attends to key ``j``."""
        inputs = dict(zip(INDICES, map(np.asarray, indices), strict=True))
        dtype = np.dtype(np.float64)
        return evaluate([self._visible], inputs, self._aux, dtype, self._constants)[0]

    def blocks(self, window: Any, Nk: int, b: int, heads: slice) -> "VisibleBlocks":
        """Find the blocks in which some pair may be visible to some heads, within a window."""
        h = heads.start, heads.stop - 1
        key = window, Nk, b if self.over_batch else 0, h if self.over_heads else 0
        with self._lock:
            if key not in self._found:
                visible = apply("bitwise_and", self._visible, within(window))
                sizes = (window.Nq, Nk), (self._block, self._block)
                runs = find_blocks(visible, self._extrema, b, h, *sizes, self._constants)
                self._found[key] = VisibleBlocks(runs, self._block)
            return self._found[key]


class VisibleBlocks:
    """The blocks of a mask that may not be empty, by query block and by key block."""

    def __init__(self, runs: BlockRuns, block: int) -> None:
        self._block = block
        self._rows: dict[int, list[tuple[int, int, int]]] = {
            row: [run[1:] for run in of_row]
            for row, of_row in groupby(
                zip(*map(np.ndarray.tolist, runs), strict=True), itemgetter(0)
            )
        }
        self._rows_of_column: dict[int, list[int]] = {}
        for row, of_row in self._rows.items():
            for first, stop, _ in of_row:
                for column in range(first, stop):
                    rows = self._rows_of_column.setdefault(column, [])
                    if not rows or rows[-1] != row:
                        rows.append(row)
        self._listed = sorted(self._rows_of_column)

    def key_ranges(self, q0: int, q1: int, k0: int, k1: int, size: int) -> list[tuple[int, int]]:
        """Cut keys k0 to k1 - 1 at the multiples of a size; skip keys that no query attends to."""
        found: set[int] = set()
        for row in range(q0 // self._block, -(-q1 // self._block)):
            for first, stop, _ in self._rows.get(row, ()):
                lo, hi = max(first * self._block, k0), min(stop * self._block, k1)
                found.update(range(lo // size, -(-hi // size)) if lo < hi else ())
        return [(max(n * size, k0), min(n * size + size, k1)) for n in sorted(found)]

    def query_ranges(self, k0: int, k1: int, q0: int, q1: int, size: int) -> list[tuple[int, int]]:
        """Cut queries q0 to q1 - 1 in the same way."""
        found: set[int] = set()
        for column in self._listed[
            bisect_left(self._listed, k0 // self._block) : bisect_left(
                self._listed, -(-k1 // self._block)
            )
        ]:
            for row in self._rows_of_column[column]:
                lo, hi = max(row * self._block, q0), min((row + 1) * self._block, q1)
                found.update(range(lo // size, -(-hi // size)) if lo < hi else ())
        return [(max(n * size, q0), min(n * size + size, q1)) for n in sorted(found)]

    def kind(self, q0: int, q1: int, k0: int, k1: int) -> int:
        """Return the kind of a tile, from the kinds of its blocks."""
        parts = list(self.rectangles(q0, q1, k0, k1))
        area = sum((b - a) * (d - c) for a, b, c, d, kind in parts if kind == FULL)
        if area == (q1 - q0) * (k1 - k0):
            return FULL
        return PARTIAL if parts else 0

    def rectangles(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Rectangle]:
        """Cut a tile into rectangles of one kind, none empty: query blocks with the same runs."""
        rows = list(cut_between(q0, q1, self._block))
        runs = [tuple(self._clipped(r0 // self._block, k0, k1)) for r0, _ in rows]
        at = 0
        for same, group in groupby(runs):
            stop = at + sum(1 for _ in group)
            for first, last, kind in same:
                yield rows[at][0], rows[stop - 1][1], first, last, kind
            at = stop

    def _clipped(self, row: int, k0: int, k1: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of a query block within a range of keys."""
        of_row = self._rows.get(row, ())
        for n in range(bisect_left(of_row, k0 // self._block + 1, key=itemgetter(1)), len(of_row)):
            first, stop, kind = of_row[n]
            if first * self._block >= k1:
                return
            yield max(first * self._block, k0), min(stop * self._block, k1), kind


def within(window: Any) -> Node:
    """Write down ``SlidingWindow.visible`` as an expression, for intervals."""
    visible: Traced = window.visible(*(Traced(x, "window") for x in (_I, _J)))
    return visible.node
