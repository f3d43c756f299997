"""Head-dimension buckets, and the tile sizes that a kernel tries in turn."""

from collections.abc import Sequence
from functools import cache

from tileattn.kernels.cuda.tile_sizes import TILES, TileSize

HEAD_DIM_BUCKETS = (32, 64, 96, 128, 192, 256)  # others are padded; Hopper kernels have more
# Columns of the narrowest generic kernels for float32 and float64. Kernels over splits of the keys
# have no such bucket (H200: docs/tuning-log.md).
_NARROW_BUCKET = 16
SMALL_TILE = 64  # queries, and keys
MAX_HEAD_DIM = HEAD_DIM_BUCKETS[-1]
_WIDE_BUCKETS = (384, 512)  # of the kernels that have tiles for them


@cache
def bucket(dim: int, unit: int = 1) -> int:
    """Return the smallest bucket for a head dimension that is a multiple of ``unit``."""
    buckets = (*HEAD_DIM_BUCKETS, *_WIDE_BUCKETS)
    return next(size for size in buckets if dim <= size and size % unit == 0)


def whole_row_bucket(dim: int, itemsize: int, unit: int = 1) -> int:
    """Return the bucket of a generic kernel without splits of the keys."""
    is_narrow = itemsize >= 4 and dim <= _NARROW_BUCKET and _NARROW_BUCKET % unit == 0
    return _NARROW_BUCKET if is_narrow else bucket(dim, unit)


def small_first(tiles: Sequence[TileSize]) -> tuple[TileSize, ...]:
    """Put tiles of 64 queries and 64 keys first."""
    return tuple(sorted(tiles, key=lambda tile: tile[:2] != (SMALL_TILE, SMALL_TILE)))


def invariant_keys(dim: int) -> int:
    """Return the keys of all Hopper forward tiles of ``invariant``, for the larger head dimension.

    They divide the keys of a split.
    """
    return 128 if dim <= SMALL_TILE else SMALL_TILE


@cache
def tuned_tiles(kernel: str, itemsize: int, dim: int) -> tuple[TileSize, ...]:
    """Return the tile sizes of a kernel for a head dimension, the fastest first; maybe none."""
    rows = TILES[kernel, itemsize].items()
    return next((tiles for limit, tiles in rows if dim <= limit), ())
