"""Bytes between slow and fast memory, counted over the schedule that the backends run."""

from collections import Counter

from tileattn.block_mask import FULL
from tileattn.blocks import cut
from tileattn.lane import lanes
from tileattn.problem import Operands, Problem


def forward_traffic(
    problem: Problem, operands: Operands, tile: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Count the tiles and bytes of a FlashAttention-2 forward pass.

    Parameters
    ----------
    problem : Problem
        What is asked.
    operands : Operands
        The arrays; only masks and sizes are looked at.
    tile : (int, int)
        Queries and keys of a tile.

    Returns
    -------
    tiles : dict of str to int
        Tiles that are ``"skipped"``, ``"partial"`` and ``"full"``, summed over heads.
    moved : dict of str to int
        Bytes read of ``q``, ``k`` and ``v`` and written of ``out`` and ``lse``: q, out and lse
        once, k and v once for each tile that is visited.

    References
    ----------
    Dao et al., arXiv:2205.14135, Theorem 2, with query blocks in the outer loop.
    """
    tiles: Counter[str] = Counter(skipped=0, partial=0, full=0)
    keys = queries = 0
    for lane in lanes(problem, operands):
        heads = lane.heads.stop - lane.heads.start
        for q0, q1 in cut(problem.Nq, tile[0]):
            visited = 0
            for visit in lane.sight.row_tiles(q0, q1, tile[1]):
                tiles["full" if visit.kind == FULL else "partial"] += heads
                keys += heads * (visit.k1 - visit.k0)
                visited += 1
            tiles["skipped"] += heads * (-(-problem.Nk // tile[1]) - visited)
            queries += heads * (q1 - q0)
    size = problem.dtype.itemsize
    moved = {
        "q": queries * problem.D * size,
        "k": keys * problem.D * size,
        "v": keys * problem.Dv * size,
        "out": queries * problem.Dv * size,
        "lse": queries * problem.sum_dtype.itemsize,
    }
    return dict(tiles), moved
