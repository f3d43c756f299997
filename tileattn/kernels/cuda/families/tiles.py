"""Head-dimension buckets, and the tile sizes that a kernel tries in turn."""

from collections.abc import Sequence
from functools import cache

from tileattn.kernels.cuda.tuning import TILES, TileSize

HEAD_DIM_BUCKETS = (32, 64, 96, 128, 192, 256)  # others are padded; Hopper kernels have more
MAX_HEAD_DIM = HEAD_DIM_BUCKETS[-1]


@cache
def bucket(dim: int, unit: int = 1) -> int:
    """Return the smallest bucket for a head dimension that is a multiple of ``unit``."""
    return next(size for size in HEAD_DIM_BUCKETS if dim <= size and size % unit == 0)


def smallest_first(tiles: Sequence[TileSize]) -> tuple[TileSize, ...]:
    """Sort tile sizes by their number of pairs."""
    return tuple(sorted(tiles, key=lambda tile: tile.block_q * tile.block_k))


@cache
def tuned_tiles(kernel: str, itemsize: int, dim: int) -> tuple[TileSize, ...]:
    """Return the tile sizes of a kernel for a head dimension, the fastest first."""
    return next(tiles for limit, tiles in TILES[kernel, itemsize].items() if dim <= limit)
