"""Tile sizes of the kernels, by element size and head dimension; the first that fits is taken.

Rows marked as tuned were chosen by measurement with ``benchmarks/gpu.py``; the others are what has
room on GPUs with less shared memory.
"""

from typing import NamedTuple


class TileSize(NamedTuple):
    """How one kernel cuts its problem; fields as in `KernelKey`.

    ``tuned`` rows were chosen by measurement. One that ``spills`` is the fastest although it spills
    some addresses of its loop to local memory; tuned kernels of other rows may not.
    """

    block_q: int
    block_k: int
    warps_m: int
    warps_n: int = 1
    stages: int = 1
    min_blocks_per_sm: int = 1
    groups: int = 1  # of warps in a thread block, each with tiles of its own
    tuned: bool = False
    spills: bool = False
    pair: bool = False  # of thread blocks that have half of the columns each

    @property
    def why(self) -> str:
        """Why tiles of this size, in a few words."""
        return "tiles from measurements" if self.tuned else "tiles that fit in shared memory"


HEAD_DIM_BUCKETS = (32, 64, 96, 128, 192, 256)  # others are padded; Hopper kernels have more
MAX_HEAD_DIM = HEAD_DIM_BUCKETS[-1]

_LIKE = {"backward_large_scores": "backward_dq"}  # with the loop of another, and its tiles

_SMALL = (
    TileSize(64, 32, 4),
    TileSize(32, 32, 2),
    TileSize(32, 16, 2),
    TileSize(16, 16, 1),
)
_SMALL_KEYS = (
    TileSize(32, 64, 4, 2),
    TileSize(32, 32, 2, 2),
    TileSize(16, 32, 2),
    TileSize(16, 16, 1),
)
_HOPPER = (
    *("forward_sm90", "backward_sm90", "backward_halves_sm90", "backward_wide_sm90"),
    *("backward_wide_dq_sm90",),
    *("backward_dbias_sm90", "backward_daux_sm90"),
)
_SMALLER = {
    "backward_dkdv": _SMALL_KEYS,
    **dict.fromkeys(_HOPPER, ()),
}
"""What is tried after the rows of the table, where it is not `_SMALL`."""

# (kernel, bytes of an element) -> for each largest head dimension, what to try in turn.
_TABLE: dict[tuple[str, int], dict[int, tuple[TileSize, ...]]] = {
    ("forward", 2): {
        64: (TileSize(128, 48, 4, 1, 2, 3, tuned=True, spills=True), TileSize(128, 64, 4)),
        128: (TileSize(128, 64, 4, 1, 2, 2, tuned=True, spills=True), TileSize(128, 32, 4)),
        256: (TileSize(128, 64, 8, tuned=True), TileSize(128, 32, 8)),
    },
    # Hopper: a warpgroup for each 64 queries. Two groups are for few keys, and block masks use
    # tiles of at most 128 queries.
    ("forward_sm90", 2): {
        64: (
            TileSize(128, 64, 8, 1, 4, groups=2, tuned=True),
            TileSize(192, 128, 12, 1, 4, tuned=True),
            TileSize(128, 128, 8, 1, 4, tuned=True),
            TileSize(192, 64, 12, 1, 4, tuned=True),
        ),
        96: (TileSize(192, 96, 12, 1, 3, tuned=True), TileSize(128, 128, 8, 1, 2, tuned=True)),
        128: (TileSize(192, 64, 12, 1, 3, tuned=True), TileSize(128, 128, 8, 1, 2, tuned=True)),
        192: (TileSize(128, 128, 8, 1, 2, tuned=True), TileSize(128, 96, 8, 1, 2)),
        256: (TileSize(128, 64, 8, 1, 2, tuned=True),),
    },
    ("forward", 4): {
        64: (TileSize(128, 32, 4, 1, 2, tuned=True, spills=True),),
        128: (TileSize(128, 32, 8, 1, 2, tuned=True),),
        256: (TileSize(128, 32, 8, tuned=True, spills=True), TileSize(64, 16, 4)),
    },
    ("forward", 8): {
        64: (TileSize(128, 32, 8, 1, 2, tuned=True),),
        128: (TileSize(128, 32, 8, tuned=True, spills=True),),
        256: (
            TileSize(128, 32, 8, tuned=True, spills=True, pair=True),
            TileSize(64, 32, 4, pair=True),
            TileSize(32, 32, 2, 2, tuned=True, spills=True),
            TileSize(64, 16, 4),
        ),
    },
    ("backward_dkdv", 2): {
        64: (TileSize(128, 128, 4, 2, 2, 1, tuned=True, spills=True), TileSize(64, 64, 2, 2, 2)),
        128: (TileSize(64, 128, 4, 2, 2, tuned=True, spills=True), TileSize(64, 64, 2, 2)),
        256: (TileSize(64, 64, 2, 4, 2, tuned=True, spills=True), TileSize(64, 64, 2, 4)),
    },
    ("backward_dkdv", 4): {
        64: (TileSize(64, 128, 4, 2, tuned=True, spills=True),),
        128: (TileSize(64, 64, 2, 4, tuned=True, spills=True),),
        256: (TileSize(64, 32, 2, 4), TileSize(32, 32, 2, 2)),
    },
    ("backward_dkdv", 8): {
        64: (TileSize(32, 64, 4, 1, 1, 2, tuned=True, spills=True), TileSize(32, 64, 4, 2, 2)),
        96: (TileSize(32, 64, 4, 2, 2),),
        128: (TileSize(32, 64, 4, 2, tuned=True, spills=True),),
        256: (
            TileSize(32, 64, 4, 2, tuned=True, spills=True, pair=True),
            TileSize(32, 32, 2, 2, pair=True),
            TileSize(32, 16, 1, 2),
        ),
    },
    # Hopper: a warpgroup for each 64 keys; those of at most 64 queries are for score modifiers and
    # dropout, which need registers, those of 80 mostly for calls without a mask. Those of
    # three stages round P for dS. With a bias there is room for one stage.
    ("backward_sm90", 2): {
        64: (
            TileSize(128, 128, 8, 1, 3, tuned=True),
            TileSize(128, 128, 8, 1, 2),
            TileSize(64, 128, 8, 1, 2),
        ),
        128: (
            TileSize(80, 128, 8, 1, 2, tuned=True),
            TileSize(64, 128, 8, 1, 2),
            TileSize(64, 128, 8, 1, 1),
        ),
    },
    # The same where dK and dV leave registers for half of a tile.
    ("backward_halves_sm90", 2): {192: (TileSize(64, 128, 8, 1, 2),)},
    # The same for wide heads: two warpgroups for the same 64 keys. Then a warpgroup for each 64
    # queries, and as many stages as there is room for.
    ("backward_wide_sm90", 2): {256: (TileSize(64, 64, 8, 1, 3), TileSize(64, 64, 8, 1, 2))},
    ("backward_wide_dq_sm90", 2): {256: (TileSize(128, 64, 8, 1, 4), TileSize(128, 64, 8, 1, 3))},
    ("backward_dq", 2): {
        64: (TileSize(128, 64, 4, 1, 2, tuned=True, spills=True),),
        128: (TileSize(128, 32, 4, 1, 2, tuned=True, spills=True),),
        256: (TileSize(64, 64, 4),),
    },
    ("backward_dq", 4): {
        64: (TileSize(64, 32, 4, 1, 2),),
        128: (TileSize(64, 32, 4),),
        256: (TileSize(32, 16, 2),),
    },
    ("backward_dq", 8): {
        64: (TileSize(128, 32, 8, 1, 2),),
        128: (TileSize(64, 16, 4, 1, 2), TileSize(32, 16, 2)),
        256: (TileSize(64, 16, 4, 1, 2, pair=True), TileSize(16, 16, 1)),
    },
    ("backward_dbias", 2): {
        128: (TileSize(64, 128, 2, 2, 2, 2, tuned=True, spills=True), TileSize(64, 64, 4, 1, 2)),
        256: (TileSize(128, 64, 4, 2, 2, tuned=True), TileSize(64, 64, 4, 1, 2)),
    },
    # The same on Hopper: a warpgroup for each 64 queries.
    ("backward_dbias_sm90", 2): {128: (TileSize(128, 128, 8),)},
    ("backward_daux_sm90", 2): {128: (TileSize(128, 128, 8),)},
    ("backward_daux", 2): {
        128: (TileSize(64, 64, 4),),
        256: (TileSize(64, 64, 4), TileSize(64, 32, 4)),
    },
    ("backward_daux", 4): {
        128: (TileSize(64, 32, 4),),
        256: (TileSize(64, 32, 4), TileSize(64, 16, 4)),
    },
    ("backward_daux", 8): {
        128: (TileSize(32, 16, 2),),
        256: (TileSize(32, 16, 2),),
    },
    ("backward_dbias", 4): {
        128: (TileSize(128, 64, 4, 2, 2, tuned=True, spills=True), TileSize(64, 32, 4)),
        256: (TileSize(64, 32, 4, 2, 2), TileSize(64, 32, 4)),
    },
    ("backward_dbias", 8): {
        128: (TileSize(64, 32, 4, 2, 2, tuned=True), TileSize(32, 16, 2)),
        256: (TileSize(32, 16, 2, 1, 2), TileSize(32, 16, 2)),
    },
}


def bucket(dim: int, unit: int = 1) -> int:
    """Pad a head dimension to the one that kernels are compiled for, a multiple of some columns."""
    return next(size for size in HEAD_DIM_BUCKETS if dim <= size and size % unit == 0)


def candidates(kernel: str, itemsize: int, dim: int, mask_block_k: int = 0) -> tuple[TileSize, ...]:
    """List the tile sizes of a kernel, the fastest first, by the larger head-dimension bucket.

    Forward tiles whose keys lie along the blocks of a block mask, of ``mask_block_k`` keys, come
    first: a tile across the border of two blocks is often partial, which costs most (measured).
    """

    def straddles(tile: TileSize) -> bool:
        return max(tile.block_k, mask_block_k) % min(tile.block_k, mask_block_k) > 0

    table = _TABLE[_LIKE.get(kernel, kernel), itemsize]
    best = next(sizes for limit, sizes in table.items() if dim <= limit)
    if mask_block_k and kernel == "forward":
        best = tuple(sorted(best, key=straddles))
    return best + _SMALLER.get(kernel, _SMALL)
