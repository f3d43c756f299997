"""Shared memory of every kernel, as its CUDA source lays it out."""

from functools import cache
from typing import NamedTuple

from tileattn.kernels.cuda.tile_sizes import TileSize

RESERVED = 1024  # bytes of an SM that CUDA reserves for each thread block
HOPPER_LIMIT = 227 * 1024  # bytes per thread block on compute capability 9.0
HOPPER_STATIC = 2048  # upper bound of the static shared memory of a Hopper kernel, in bytes
_SUM_BYTES = 4  # of a partial sum of a Hopper kernel
_STAGING_BYTES = 2048  # of each warp: 64 columns of 16 rows of the output
HOPPER_GROUP_ROWS = 64  # rows of a warpgroup's wgmma
_RESULT_BYTES = 4  # of an element of a result in float32
_DQ_COPY_BYTES = 64 * 32 * 4  # float32 sums that one bulk copy adds to dQ in device memory
_BLOCK_PIECES = 4  # pieces of a block of a running total, as in src/fwd_smem_sm90.cuh
_DESCALE_BYTES = 4  # of the factor of a key, or a value, of 8 bits
DAUX_WINDOW_BYTES = 64 * 1024  # upper bound of the private sums of all threads of a thread block
_NARROW_DIM = 128  # largest head dimension at which dK and dV of a whole tile fit in registers


@cache
def generic_bytes(
    kernel: str, tile: TileSize, dim: int, value: int, size: int, bias_size: int = 0
) -> int:
    """Count the dynamic shared memory of a generic kernel.

    ``size`` is the bytes of an element of q. ``bias_size`` is the bytes of an element of the bias,
    or 0 if it is not copied to shared memory.
    """

    def tiled(rows: int, columns: int, size: int = size) -> int:
        return _tiled(rows, columns, size)

    if tile.pair:
        dim, value = dim // 2, value // 2
    shares_scores = tile.warps_n > 1 or tile.pair
    warps = tile.warps_m if kernel == "backward_dkdv" else tile.warps_n  # side by side along keys
    bias = warps * tiled(tile.block_q, tile.block_k // warps, bias_size) if bias_size else 0
    q, out = tiled(tile.block_q, dim), tiled(tile.block_q, value)
    k, v = tiled(tile.block_k, dim), tiled(tile.block_k, value)
    if kernel == "forward":
        P = tiled(tile.block_q, tile.block_k) if shares_scores else 0
        return max(q, out) + tile.stages * (k + v) + P + bias
    if kernel == "backward_dkdv":
        scores = (1 + shares_scores) * tiled(tile.block_k, tile.block_q)  # dS, and P if shared
        return k + v + scores + tile.stages * (q + out) + bias
    if kernel == "backward_dq":
        exchanged = 2 * tiled(tile.block_q, tile.block_k) if tile.pair else 0
        return q + out + tile.stages * (k + v) + exchanged + bias
    if kernel == "backward_large_scores":
        return q + tile.stages * k + bias
    statistics = 2 * tile.block_q * max(size, 4)  # in the accumulation dtype
    return (q + k + out + v if tile.stages > 1 else max(q + k, out + v)) + statistics + bias


def generic_static_bytes(kernel: str, tile: TileSize, size: int) -> int:
    """Bound the static shared memory of a generic kernel: row statistics and exchanged sums."""
    if kernel in ("backward_dbias", "backward_daux"):
        return 0
    number, passes = max(size, 4), 2  # the fast and the NaN-safe pass have their own
    used = 128
    if kernel == "backward_dkdv":
        used += passes * 2 * tile.stages * tile.block_q * number
    elif tile.warps_n > 1:
        used += 2 * tile.warps_n * tile.block_q * number
    return -(-used // 1024) * 1024  # the alignment of the tiles after it


def split_bytes(tile: TileSize, dim: int, value: int, size: int, kv_size: int) -> int:
    """Count the dynamic shared memory of the split-KV kernel.

    It holds the queries and the stages of each slice of warps; with keys and values of 8 bits a
    stage has their descales, too. The sums of the slices replace them at the end. ``size`` and
    ``kv_size`` are the bytes of an element of q, and of k and v.
    """
    stage = _tiled(tile.block_k, dim, kv_size) + _tiled(tile.block_k, value, kv_size)
    stage += 2 * tile.block_k * _DESCALE_BYTES if kv_size == 1 else 0
    tiles = _tiled(tile.block_q, dim, size) + tile.warps_n * tile.stages * stage
    return max(tiles, tile.warps_n * tile.block_q * (value + 8) * max(size, 4))


def split_static_bytes(tile: TileSize, number: int, *, quantised: bool = False) -> int:
    """Count the static shared memory of the split-KV kernel.

    It holds two numbers for each row and slice, and a factor of each row if k is ``quantised``.
    """
    numbers = tile.block_q * (2 * tile.warps_n + quantised)
    return -(-numbers * number // 1024) * 1024


def latent_bytes(tile: TileSize, dim: int) -> int:
    """Count the dynamic shared memory of the latent kernel: queries, stages of keys, and P."""
    keys = tile.stages * _swizzled(tile.block_k, dim)
    return _swizzled(tile.block_q, dim) + keys + _swizzled(tile.block_q, tile.block_k)


def wide_bytes(tile: TileSize, dim: int) -> int:
    """Count the dynamic shared memory of the Hopper kernel for wide heads.

    It holds its queries, half of P, and stages of 128 columns of half of the keys of a tile.
    """
    half = tile.block_k // 2
    stages = tile.stages * _swizzled(half, 128)
    return _swizzled(tile.block_q, dim) + _swizzled(tile.block_q, half) + stages


class ForwardMemory(NamedTuple):
    """The dynamic shared memory of the Hopper forward kernel.

    Parameters
    ----------
    nbytes : int
        Total bytes.
    total_pieces : int
        Pieces of a running total, 16 bytes for each thread, that are in the workspace instead.
    """

    nbytes: int
    total_pieces: int


@cache
def hopper_forward_memory(
    tile: TileSize,
    dim: int,
    value: int,
    bias_size: int = 0,
    kv_size: int = 2,
    *,
    totals: bool = False,
    splits: bool = False,
) -> ForwardMemory:
    """Divide the dynamic shared memory of the Hopper forward kernel.

    Each group of warps holds the stages of keys and values, its queries and a tile of the bias. If
    they fit, it also holds 64 columns of the output, the next queries of some warpgroups, and more
    of a running total, if the kernel has ``totals``. ``bias_size`` is as in `generic_bytes`. A
    kernel over ``splits`` holds the queries of one work tile. With fewer than 64 rows it also holds
    P, and later one row of the output for each warp in the same place. ``kv_size`` is the bytes of
    an element of k and v.
    """
    warpgroups = tile.warps_m // 4
    queries = _swizzled(tile.block_q // warpgroups, dim)
    keys, values = (_swizzled(tile.block_k, n * kv_size // 2) for n in (dim, value))
    stages = tile.stages * (keys + values)
    if splits:
        rows = tile.block_q // warpgroups
        staged = max(_swizzled(rows, tile.block_k), tile.warps_m * value * _SUM_BYTES)
        out = staged if rows < HOPPER_GROUP_ROWS else 0
        return ForwardMemory(stages + warpgroups * queries + out, 0)
    bias = _tiled(tile.block_q, tile.block_k, bias_size)
    shares = tile.groups * tile.min_blocks_per_sm
    left = (HOPPER_LIMIT - HOPPER_STATIC) // shares - stages - bias
    pieces, block = value // 8 + 1 if totals else 0, tile.warps_m * _STAGING_BYTES
    least = int(left >= warpgroups * queries + block)
    most = -(-pieces // _BLOCK_PIECES) if totals else least
    blocks = max(least, min((left - 2 * warpgroups * queries) // block, most))
    out = blocks * block
    buffers = max(warpgroups, min(2 * warpgroups, (left - out) // queries))
    nbytes = tile.groups * (stages + buffers * queries + out + bias)
    return ForwardMemory(nbytes, max(0, pieces - blocks * _BLOCK_PIECES))


@cache
def float32_forward_bytes(tile: TileSize, dim: int, value: int, bias_size: int = 0) -> int:
    """Count the dynamic shared memory of the Hopper forward kernel for float32.

    It holds the queries and the stages of keys and values, which are float16 numbers in pairs, and
    a tile of the bias.
    """
    queries = 2 * _swizzled(tile.block_q, dim)
    keys, values = (2 * _swizzled(tile.block_k, n) for n in (dim, value))
    return queries + tile.stages * (keys + values) + _tiled(tile.block_q, tile.block_k, bias_size)


@cache
def float32_generic_bytes(tile: TileSize, dim: int, value: int, bias_size: int = 0) -> int:
    """Count the dynamic shared memory of the generic forward kernel for split float32.

    It holds the stages of keys and values, which are float16 numbers in pairs, and a tile of the
    bias. The results replace them at the end. Queries are in registers.
    """
    stages = tile.stages * 2 * (_swizzled(tile.block_k, dim) + _swizzled(tile.block_k, value))
    bias = _tiled(tile.block_q, tile.block_k, bias_size)
    return max(stages + bias, _tiled(tile.block_q, value, _RESULT_BYTES))


@cache
def float32_generic_backward_bytes(
    tile: TileSize, dim: int, value: int, bias_size: int, *, over_keys: bool
) -> int:
    """Count the dynamic shared memory of the generic backward kernels for split float32.

    They hold their own rows, the stages of the rows that they read one tile after another, and a
    tile of the bias. All rows are float16 numbers in pairs.
    """
    own, others = (tile.block_k, tile.block_q) if over_keys else (tile.block_q, tile.block_k)
    rows = own + tile.stages * others
    warps = tile.warps_m if over_keys else 1  # side by side along keys
    bias = warps * _tiled(tile.block_q, tile.block_k // warps, bias_size)
    return 2 * (_swizzled(rows, dim) + _swizzled(rows, value)) + bias


def limit_of_block(most: int, blocks: int) -> int:
    """Return the shared memory of each of several thread blocks on an SM; one may have ``most``."""
    return (most + RESERVED) // blocks - RESERVED


@cache
def hopper_backward_bytes(
    tile: TileSize,
    dim: int,
    value: int,
    bias_size: int = 0,
    *,
    repairs: bool = False,
    pair: bool = False,
) -> int:
    """Count the dynamic shared memory of the Hopper backward kernels.

    All hold k, v, stages of q and of dout, and with a bias one tile of it. The rest differs:

    * normally: one stage of q more than of dout, two tiles of dS, and per warpgroup three dQ tiles
      (two with a bias);
    * three stages: dQ is staged beside dP, so dout has one stage less and dS one tile;
    * queries no multiple of 64: dQ is transposed, with one tile of dS and one of dQ;
    * above 128 columns: halves of a tile take turns, with as many stages of q as of dout and one
      tile of dS;
    * 64 keys (wide heads): as many stages of q as of dout, and two tiles of P instead of dS and dQ.
      One of a ``pair`` of thread blocks holds half of two such tiles, and operands of half a tile.

    A kernel that ``repairs`` holds k twice and two tiles of dS. If dQ is transposed it has as many
    stages of q as of dout; for halves it has one dQ tile.
    """
    rows, keys, stages = tile.block_q, tile.block_k, tile.stages
    wide = keys == HOPPER_GROUP_ROWS
    halves = not wide and dim > _NARROW_DIM
    transposed = rows % HOPPER_GROUP_ROWS > 0
    beside = not wide and stages > 2
    kv = (2 if repairs else 1) * _swizzled(keys, dim) + _swizzled(keys, value)
    equal = wide or halves or (transposed and repairs)
    buffers = (stages if equal else stages + 1) * _swizzled(rows, dim)
    buffers += (stages - beside) * _swizzled(rows, value)
    if wide:
        return kv + buffers + rows * keys * (5 if pair else 8)
    ds = (1 if (halves or transposed or beside) and not repairs else 2) * _swizzled(rows, keys)
    dq_tiles = 1 if halves and repairs else 2 if bias_size else 3
    dq = rows * 64 * 4 if transposed else dq_tiles * _DQ_COPY_BYTES
    dq *= keys // HOPPER_GROUP_ROWS
    return kv + buffers + ds + dq + _tiled(rows, keys, bias_size)


def hopper_wide_dq_bytes(tile: TileSize, dim: int, value: int, *, pair: bool = False) -> int:
    """Count the dynamic shared memory of the Hopper kernel for dq of wide heads.

    It holds its queries and dout, and stages that hold keys and values alternately. One of a
    ``pair`` of thread blocks, with half of the columns, also holds parts of half of the scores.
    """
    rows = _swizzled(tile.block_q, dim) + _swizzled(tile.block_q, value)
    scores = tile.block_q * tile.block_k * 2 if pair else 0
    return rows + scores + tile.stages * _swizzled(tile.block_k, max(dim, value))


@cache
def hopper_ds_bytes(tile: TileSize, dim: int, value: int, bias_size: int = 0) -> int:
    """Count the dynamic shared memory of the Hopper kernels that sum dS.

    They hold a tile of each operand and of the bias, and one sum per warp and key.
    """
    rows, keys = tile.block_q, tile.block_k
    tiles = _swizzled(rows, dim) + _swizzled(keys, dim)
    tiles += _swizzled(rows, value) + _swizzled(keys, value)
    return tiles + tile.warps_m * (_tiled(16, keys, bias_size) + 4 * keys)


def _tiled(rows: int, columns: int, size: int) -> int:
    """Return the bytes of a tile whose rows are padded to 64 or a multiple of 128 bytes."""
    used = columns * size
    return rows * (64 if used <= 64 else -(-used // 128) * 128) if used else 0


def _swizzled(rows: int, columns: int) -> int:
    """Return the bytes of a tile of 16-bit elements with TMA's 128-byte swizzle."""
    return rows * 128 * -(-columns // 64)
