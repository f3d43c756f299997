"""Rules for the number of thread blocks of a launch; sizes are filled in later."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from tileattn.call.problem import Problem

_ROW_PAD = 128  # queries; longest query block; all lengths but `TALL_ROWS` divide it
_ROW_BLOCKS = 2  # blocks of padded rows of a packed sequence besides whole ones
TALL_ROWS = 80  # queries of a block
PACKED_ROWS = 16  # rows that share a key head, at most, in packed sequences that are split
_UNBOUNDED = (1 << 63) - 1
_WARP, _FEW_ELEMENTS = 32, 1 << 16  # up to so many of dbias each warp of a block adds some copies
_ROWS_OF_COPY = 4  # rows of score tiles that a thread block sums into a copy of dbias, at least


Over = Literal[
    "queries",
    "keys",
    "padded queries",
    "queries of a head",
    "keys of a head",
    "heads",
    "splits",
    "packed splits",
    "packed rows",
    "splits of keys",
    "bias",
    "copies of dbias",
    "learned",
    "elements",
    "tile rows",
    "listed rows",
    "listed columns",
]


class GridSizes(NamedTuple):
    """The numbers that grids are counted from."""

    problem: Problem
    bias_shape: tuple[int, ...] = ()
    learned: tuple[int, ...] = ()  # for each learned element: heads times copies of its sums
    elements: Mapping[int, int] = {}  # of each array of ``aux`` with a gradient, by number
    mask_lines: tuple[int, int, int] = (0, 0, 0)  # classified rows; listed rows, listed columns
    splits: int = 1  # work tiles of a key block


class Grid(NamedTuple):
    """A number of thread blocks, left open until the sizes of a call are known.

    Parameters
    ----------
    over : str
        What the thread blocks divide among themselves: the queries or keys of all heads, or of one
        head; the splits of all key heads, or of the queries of all key blocks; the splits, or the
        rows, of packed sequences with few rows; ...
    block : int
        Rows of a block; 0 if there is one block, however many rows there are.
    block_k : int
        Keys of a tile of dbias.
    split_keys : int
        Keys of a split.
    number : int
        Which learned element, or which array.
    each : int
        Thread blocks for each block.
    together : int
        Blocks that one thread block takes.
    most : int
        Upper bound of the thread blocks, for persistent kernels.
    above : int
        The kernel runs only if there are more blocks than this.
    tasks : int
        Divide the score tiles of each tile of dbias among thread blocks until there are about as
        many thread blocks as this. 0: each batch entry has a copy of dbias.
    """

    over: Over
    block: int = 1
    block_k: int = 1
    split_keys: int = 0
    number: int = 0
    each: int = 1
    together: int = 1
    most: int = _UNBOUNDED
    above: int = -1
    tasks: int = 1

    def thread_blocks(self, sizes: GridSizes) -> int | None:
        """Count the thread blocks for some sizes; None if the kernel does not run."""
        blocks = self._blocks(sizes)
        if blocks <= self.above:
            return None
        return min(-(-blocks * self.each // self.together), self.most)

    def _blocks(self, sizes: GridSizes) -> int:
        P = sizes.problem
        match self.over:
            case "queries":
                return P.B * P.Hq * block_count(P, P.Nq, self.block)
            case "keys":
                return P.B * P.Hkv * block_count(P, P.Nk, self.block)
            case "splits of keys":
                return P.B * P.Hkv * block_count(P, P.Nk, self.block) * sizes.splits
            case "padded queries":
                return P.B * P.Hq * padded_rows(P)
            case "queries of a head":
                return block_count(P, P.Nq, self.block)
            case "keys of a head":
                return block_count(P, P.Nk, self.block)
            case "heads":
                return P.Hq
            case "splits":
                rows = block_count(P, P.group * P.Nq, self.block)
                return split_count(P, self.split_keys) * P.B * P.Hkv * rows
            case "packed splits":
                return split_count(P, self.split_keys) * P.entries * P.Hkv
            case "packed rows":
                return P.entries * P.Hkv * PACKED_ROWS
            case "bias":
                return self._bias_tiles(sizes) * self.copies(sizes)
            case "copies of dbias":
                elements = math.prod(sizes.bias_shape)
                threads = self.together // _WARP if elements <= _FEW_ELEMENTS else 1
                return elements * threads if self.copies(sizes) > 1 else 1
            case "learned":
                return sizes.learned[self.number] * (-(-P.Nq // self.block) if self.block else 1)
            case "elements":
                return sizes.elements[self.number]
        lines = ("tile rows", "listed rows", "listed columns").index(self.over)
        return sizes.mask_lines[lines]

    def copies(self, sizes: GridSizes) -> int:
        """Count the thread blocks that share a tile of dbias: each sums into a copy of its own.

        It does not depend on the GPU, and so the bits of dbias do not.
        """
        P, (b, h, queries, _) = sizes.problem, sizes.bias_shape
        if not self.tasks:
            return P.B
        rows = -(-P.Nq // self.block) if queries == 1 else 1  # of score tiles
        rows *= (P.B if b == 1 else 1) * (P.Hq if h == 1 else 1)
        return max(1, min(-(-rows // _ROWS_OF_COPY), self.tasks // self._bias_tiles(sizes)))

    def _bias_tiles(self, sizes: GridSizes) -> int:
        P, (b, h, queries, keys) = sizes.problem, sizes.bias_shape
        rows = 1 if queries == 1 else -(-P.Nq // self.block)
        return b * h * rows * (1 if keys == 1 else -(-P.Nk // self.block_k))


OPEN = Grid("heads")
"""Stands for a grid that is set later."""


def block_count(problem: Problem, rows: int, block: int) -> int:
    """Count the block numbers of a head with ``rows`` rows: as in ``src/sequence.cuh``.

    Some numbers have no block in packed sequences, whose ends are known only on the device.
    """
    if problem.sequences is None:
        return -(-rows // block)
    return rows // block + problem.sequences


def split_count(problem: Problem, split_keys: int) -> int:
    """Count the splits of a sequence as long as the arrays have room for."""
    return -(-problem.Nk // split_keys)


def partial_rows(problem: Problem) -> int:
    """Return the rows of a key head whose sums over splits are stored: as in ``src/splits.cuh``."""
    P = problem
    rows = P.group * P.Nq
    return rows if P.sequences is None else min(rows, P.sequences * PACKED_ROWS)


def padded_rows(problem: Problem) -> int:
    """Return the rows of a head in the arrays that kernels of the backward pass exchange."""
    P = problem
    if P.sequences is not None:
        return (P.Nq // _ROW_PAD + _ROW_BLOCKS * P.sequences) * _ROW_PAD
    rows = block_count(P, P.Nq, TALL_ROWS) * TALL_ROWS
    return block_count(P, rows, _ROW_PAD) * _ROW_PAD
