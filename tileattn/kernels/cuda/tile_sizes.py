"""Tile sizes of the CUDA kernels, by kernel, size of an element and head dimension."""

from typing import NamedTuple

_LOW_QUERIES = 128  # of the tiles of two warpgroups


class TileSize(NamedTuple):
    """The tile of a kernel and how its warps share it; fields as in `KernelKey`."""

    block_q: int
    block_k: int
    warps_m: int
    warps_n: int = 1
    stages: int = 1
    min_blocks_per_sm: int = 1
    groups: int = 1  # of warps in a thread block, each with work tiles of its own
    tuned: bool = False  # chosen by measurement, not only for its size
    spills: bool = False  # the fastest although its loop spills some addresses
    pair: bool = False  # two thread blocks (a cluster) hold half of the columns each
    short: bool = False  # for few queries and keys that larger tiles would pad more

    @property
    def is_tall(self) -> bool:
        """True if a Hopper tile has more queries than two warpgroups take."""
        return self.block_q > _LOW_QUERIES

    def lowered(self) -> "TileSize":
        """Return a tall tile with 128 queries and as many keys, and any other tile as it is.

        Each warpgroup has 64 queries of its own, so rows have the same bits in both.
        """
        return self._replace(block_q=_LOW_QUERIES, warps_m=8) if self.is_tall else self

    @property
    def why(self) -> str:
        """Reason for this size, in a few words."""
        return "tiles from measurements" if self.tuned else "tiles that fit in shared memory"


# Tile sizes by kernel and bytes of an element, then by the largest head dimension; the first that
# fits in shared memory is taken. Rows with ``tuned`` were the fastest with ``bench gpu`` on an H100
# or H200 (docs/tuning-log.md); the others fit where those do not.
TILES: dict[tuple[str, int], dict[int, tuple[TileSize, ...]]] = {
    ("forward", 2): {
        64: (TileSize(128, 48, 4, 1, 2, 3, tuned=True, spills=True), TileSize(128, 64, 4)),
        128: (TileSize(128, 64, 4, 1, 2, 2, tuned=True, spills=True), TileSize(128, 32, 4)),
        256: (TileSize(128, 64, 8, tuned=True), TileSize(128, 32, 8)),
        512: (TileSize(128, 64, 8), TileSize(64, 64, 4)),
    },
    # One warpgroup per 64 queries. Several groups are for few keys. With score modifiers, a mask or
    # dropout four groups would leave them too few registers. Tall tiles are also taken lowered.
    ("forward_sm90", 2): {
        64: (
            TileSize(64, 64, 4, 1, 2, groups=4, tuned=True, short=True),
            TileSize(64, 64, 4, 1, 2, groups=3, tuned=True, short=True),
            TileSize(128, 64, 8, 1, 4, groups=2, tuned=True),
            TileSize(192, 128, 12, 1, 4, tuned=True),
            TileSize(192, 64, 12, 1, 4, tuned=True),
        ),
        96: (
            TileSize(192, 96, 12, 1, 3, tuned=True),
            TileSize(192, 64, 12, 1, 3, tuned=True),
            TileSize(128, 96, 8, 1, 2, tuned=True, short=True),
            TileSize(128, 128, 8, 1, 2, tuned=True),
        ),
        128: (
            TileSize(192, 64, 12, 1, 3, tuned=True),
            TileSize(128, 128, 8, 1, 2, tuned=True),
        ),
        192: (TileSize(128, 128, 8, 1, 2, tuned=True), TileSize(128, 96, 8, 1, 2)),
        256: (TileSize(128, 64, 8, 1, 2, tuned=True),),
    },
    ("forward", 4): {
        64: (
            TileSize(64, 32, 4, 1, 2, 3, tuned=True, spills=True, short=True),
            TileSize(128, 32, 4, 1, 2, tuned=True, spills=True),
        ),
        128: (TileSize(128, 32, 8, 1, 2, tuned=True),),
        256: (TileSize(128, 32, 8, tuned=True, spills=True), TileSize(64, 16, 4)),
        512: (TileSize(64, 32, 4),),
    },
    # One warpgroup per 64 queries. Three leave too few registers for wide heads.
    ("forward_float32_sm90", 4): {
        64: (TileSize(192, 64, 12, 1, 4), TileSize(128, 64, 8, 1, 4)),
        128: (TileSize(128, 64, 8, 1, 2),),
        192: (TileSize(128, 64, 8),),
        256: (TileSize(128, 32, 8),),
    },
    # Two warpgroups share 64 keys; in the dq kernel one warpgroup has 64 queries.
    ("backward_float32_sm90", 4): {
        64: (TileSize(64, 64, 8, 1, 3, tuned=True),),
        128: (TileSize(64, 64, 8, 1, 2, tuned=True),),
        192: (TileSize(64, 64, 8, tuned=True),),
        256: (TileSize(32, 64, 8, tuned=True),),
    },
    ("backward_float32_dq_sm90", 4): {
        64: (TileSize(128, 64, 8, 1, 4, tuned=True),),
        128: (TileSize(128, 64, 8, 1, 3, tuned=True),),
        192: (TileSize(64, 32, 4, 1, 5, tuned=True),),
        256: (TileSize(64, 32, 4, 1, 3, tuned=True),),
    },
    # float32 as two float16 numbers in the generic kernel: ``forward`` with ``split_floats``.
    ("forward_split_floats", 4): {
        64: (
            TileSize(64, 64, 4, 1, 2, 2, tuned=True),
            TileSize(128, 64, 8, 1, 2),
            TileSize(64, 32, 4, 1, 2),
        ),
        128: (TileSize(128, 32, 8, 1, 2),),
    },
    # As the forward pass: ``backward_float32`` and ``backward_float32_dq``.
    ("backward_float32", 4): {
        64: (TileSize(16, 64, 4, 1, 2, 2, tuned=True), TileSize(16, 64, 4, 1, 2)),
        128: (TileSize(16, 64, 4, 1, 1, 2, tuned=True), TileSize(16, 64, 4)),
    },
    ("backward_float32_dq", 4): {
        64: (
            TileSize(64, 32, 4, 1, 2, 2, tuned=True),
            TileSize(64, 32, 4, 1, 1, 2),
            TileSize(64, 32, 4, 1, 2),
        ),
        128: (
            TileSize(64, 32, 4, 1, 1, 2, tuned=True),
            TileSize(64, 16, 4, 1, 1, 2),
            TileSize(64, 16, 4),
        ),
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
        512: (TileSize(64, 16, 4, pair=True), TileSize(32, 16, 2)),
    },
    # Tiles of 64 x 64 come first for calls with few keys (`suits_small_key_blocks`).
    ("backward_dkdv", 2): {
        32: (
            TileSize(128, 128, 4, 2, 2, 1, tuned=True, spills=True),
            TileSize(64, 64, 4, 1, 1, 4, tuned=True, spills=True),
        ),
        64: (TileSize(128, 128, 4, 2, 2, 1, tuned=True, spills=True), TileSize(64, 64, 4, 1, 1, 3)),
        128: (TileSize(64, 128, 4, 2, 2, tuned=True, spills=True), TileSize(64, 64, 2, 2)),
        256: (TileSize(64, 64, 2, 4, 2, tuned=True, spills=True), TileSize(64, 64, 2, 4)),
    },
    ("backward_dkdv", 4): {
        32: (
            TileSize(64, 128, 4, 2, tuned=True, spills=True),
            TileSize(64, 64, 4, 1, 1, 3, tuned=True, spills=True),
        ),
        64: (TileSize(64, 128, 4, 2, tuned=True, spills=True), TileSize(64, 64, 4, 1, 1, 2)),
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
    # One warpgroup per 64 keys. Tiles of 64 queries leave registers to score modifiers and dropout;
    # tiles of 80 are mostly for calls without a mask. With three stages dS is computed from the
    # rounded P. With a bias one stage fits.
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
    # dK and dV leave registers for half of a tile.
    ("backward_halves_sm90", 2): {192: (TileSize(64, 128, 8, 1, 2),)},
    # Wide heads: two warpgroups share 64 keys; in the dq kernel one warpgroup has 64 queries.
    # Above 256 columns two thread blocks have half of the columns each.
    ("backward_wide_sm90", 2): {512: (TileSize(64, 64, 8, 1, 3), TileSize(64, 64, 8, 1, 2))},
    ("backward_wide_dq_sm90", 2): {
        256: (TileSize(128, 64, 8, 1, 4), TileSize(128, 64, 8, 1, 3)),
        384: (TileSize(128, 64, 8, 1, 4),),
        512: (TileSize(128, 32, 8, 1, 5),),
    },
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
    # One warpgroup per 64 queries.
    ("backward_dbias_sm90", 2): {
        64: (TileSize(128, 128, 8), TileSize(64, 64, 4, 1, 1, 3)),
        128: (TileSize(128, 128, 8), TileSize(64, 64, 4, 1, 1, 2)),
    },
    ("backward_daux_sm90", 2): {128: (TileSize(128, 128, 8),)},
    ("backward_daux", 2): {256: (TileSize(64, 64, 4),)},
    ("backward_daux", 4): {
        128: (TileSize(64, 32, 4),),
        256: (TileSize(64, 32, 4), TileSize(64, 16, 4)),
    },
    ("backward_daux", 8): {256: (TileSize(32, 16, 2),)},
    ("backward_dbias", 4): {
        128: (TileSize(128, 64, 4, 2, 2, tuned=True, spills=True), TileSize(64, 64, 4, 1, 1, 2)),
        256: (TileSize(64, 32, 4, 2, 2),),
    },
    ("backward_dbias", 8): {
        128: (TileSize(64, 32, 4, 2, 2, tuned=True), TileSize(32, 16, 2)),
        256: (TileSize(32, 16, 2, 1, 2), TileSize(32, 16, 2)),
    },
}
# The kernel for large scores has the loop of the dq kernel.
TILES |= {("backward_large_scores", size): TILES["backward_dq", size] for size in (2, 4, 8)}
