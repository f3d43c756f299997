"""Operations and bytes of attention as ``tileattn.traffic`` models them."""

import numpy as np

from benchmarks.gpu_cells import Cell
from benchmarks.gpu_device import DTYPES
from benchmarks.report import Row
from tileattn import traffic
from tileattn.problem import Problem, parse

KINDS = ("forward", "backward")
Tile = tuple[int, int]


def problem_of(cell: Cell) -> Problem:
    """Facts of a cell, from arrays that take no memory."""
    one = np.zeros((), DTYPES[cell.dtype])
    q, k, v = (np.broadcast_to(one, shape) for shape in cell.shapes[:3])
    return parse(q, k, v, cell.mask.options())[0]


def nbytes(cell: Cell, tile: Tile, algorithm: str = "flash2", share: float | None = None) -> int:
    """Bytes between slow and fast memory of the pass of a cell.

    Parameters
    ----------
    cell : Cell
        The problem and its pass.
    tile : (int, int)
        Queries and keys of a tile.
    algorithm : str
        A name of ``tileattn.traffic.ALGORITHMS``.
    share : float, optional
        Share of the blocks that a block mask shows.

    Returns
    -------
    int
        Bytes read and written.
    """
    return traffic.modelled(problem_of(cell), tile, algorithm, cell.kind, share).nbytes


def row(cells: tuple[Cell, Cell], tile: Tile) -> Row:
    """Operations and bytes of the forward and the backward pass together, by each algorithm."""
    gflop, modelled = {}, {}
    for name in traffic.ALGORITHMS:
        flops = (traffic.flops(problem_of(cell), cell.kind, algorithm=name) for cell in cells)
        gflop[name] = sum(flops) / 1e9
        modelled[name] = sum(nbytes(cell, tile, name) for cell in cells)
    return {"gflop": gflop, "modelled_bytes": modelled}
