"""Dynamic shared memory of every kernel, as its CUDA source lays it out: the one place."""

from tileattn.kernels.cuda.tuning import TileSize

RESERVED = 1024  # bytes that the system takes from an SM for each thread block
HOPPER_LIMIT = 227 * 1024  # bytes that a thread block may have on compute capability 9.0
HOPPER_STATIC = 2048  # bytes of static shared memory of a Hopper kernel, at most
HOPPER_GROUP_ROWS = 64  # queries of a warpgroup
_DQ_COPY_BYTES = 64 * 32 * 4  # what one bulk copy adds to dQ in device memory
DAUX_WINDOW_BYTES = 64 * 1024  # of sums that threads have for themselves, at most
_NARROW_DIM = 128  # of a tile with all that the Hopper backward kernels have


def generic_bytes(
    kernel: str, tile: TileSize, dim: int, value: int, size: int, bias_size: int = 0
) -> int:
    """Count the dynamic shared memory of a generic kernel.

    ``size`` is bytes of an element, ``bias_size`` of one of the bias: 0 where it is not copied
    there.
    """

    def tiled(rows: int, columns: int, size: int = size) -> int:
        return _tiled(rows, columns, size)

    if tile.pair:
        dim, value = dim // 2, value // 2
    shares_scores = tile.warps_n > 1 or tile.pair
    warps = {"backward_dkdv": tile.warps_m}.get(kernel, tile.warps_n)  # side by side along keys
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
    """Bound the static shared memory of a generic kernel: statistics, and what warps exchange."""
    if kernel in ("backward_dbias", "backward_daux"):
        return 0
    number, passes = max(size, 4), 2  # each of the passes has its own
    used = 128
    if kernel == "backward_dkdv":
        used += passes * 2 * tile.stages * tile.block_q * number
    elif tile.warps_n > 1:
        used += 2 * tile.warps_n * tile.block_q * number
    return -(-used // 1024) * 1024  # where the tiles begin


def split_bytes(tile: TileSize, dim: int, value: int, size: int) -> int:
    """Count the dynamic shared memory of the kernel over splits of the keys.

    It has the queries, and for each slice of warps its stages; in the end the sums of the slices.
    """
    stages = tile.warps_n * tile.stages
    tiles = _tiled(tile.block_q, dim, size)
    tiles += stages * (_tiled(tile.block_k, dim, size) + _tiled(tile.block_k, value, size))
    return max(tiles, tile.warps_n * tile.block_q * (value + 8) * max(size, 4))


def split_static_bytes(tile: TileSize, number: int) -> int:
    """Count its static shared memory, up to where the tiles begin: two numbers of each row."""
    return -(-tile.warps_n * tile.block_q * 2 * number // 1024) * 1024


def latent_bytes(tile: TileSize, dim: int) -> int:
    """Count the dynamic shared memory of the kernel for latent attention.

    It has the queries, the stages of keys, and P.
    """
    keys = tile.stages * _swizzled(tile.block_k, dim)
    return _swizzled(tile.block_q, dim) + keys + _swizzled(tile.block_q, tile.block_k)


def hopper_forward_bytes(tile: TileSize, dim: int, value: int, bias_size: int = 0) -> int:
    """Count the dynamic shared memory of the Hopper forward kernel.

    It has the stages of keys and values, the queries, and a tile of the bias; as far as they fit,
    also 64 columns of the output, and the next queries of some warpgroups. Each group has them for
    itself. ``bias_size`` is as in `generic_bytes`.
    """
    queries = _swizzled(HOPPER_GROUP_ROWS, dim)
    stages = tile.stages * (_swizzled(tile.block_k, dim) + _swizzled(tile.block_k, value))
    bias = _tiled(tile.block_q, tile.block_k, bias_size)
    left = (HOPPER_LIMIT - HOPPER_STATIC) // tile.groups - stages - bias
    warpgroups = tile.block_q // HOPPER_GROUP_ROWS
    out = _swizzled(tile.block_q, 64)
    if out > left - warpgroups * queries:
        out = 0
    buffers = max(warpgroups, min(2 * warpgroups, (left - out) // queries))
    return tile.groups * (stages + buffers * queries + out + bias)


def hopper_backward_bytes(
    tile: TileSize, dim: int, value: int, bias_size: int = 0, *, repairs: bool = False
) -> int:
    """Count the dynamic shared memory of the Hopper backward kernels.

    They have k and v; stages of dout, and one more of q; two tiles of dS; three dQ tiles for each
    warpgroup, or two with a bias, and a tile of that. Where queries are no multiple of 64, dQ is
    transposed: there is one tile of dS, and one of dQ. With three stages dQ is staged beside
    dP: dout has one less, and there is one tile of dS. Where halves of a tile take turns there are
    as many stages of q as of dout, and one tile of dS. Wide heads, of 64 keys, have as many stages
    of q, too, and two tiles of P in place of dS and dQ. A kernel that repairs has k twice and two
    tiles of dS; as many stages of q as of dout where dQ is transposed, and one dQ tile for halves.
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
        return kv + buffers + 2 * rows * keys * 4
    ds = (1 if (halves or transposed or beside) and not repairs else 2) * _swizzled(rows, keys)
    dq_tiles = 1 if halves and repairs else 2 if bias_size else 3
    dq = rows * 64 * 4 if transposed else dq_tiles * _DQ_COPY_BYTES
    dq *= keys // HOPPER_GROUP_ROWS
    return kv + buffers + ds + dq + _tiled(rows, keys, bias_size)


def hopper_wide_dq_bytes(tile: TileSize, dim: int, value: int) -> int:
    """Count the dynamic shared memory of the Hopper kernel for dq of wide heads.

    It has its queries and dout, and stages that take keys and values in turn.
    """
    rows = _swizzled(tile.block_q, dim) + _swizzled(tile.block_q, value)
    return rows + tile.stages * _swizzled(tile.block_k, max(dim, value))


def hopper_ds_bytes(tile: TileSize, dim: int, value: int, bias_size: int = 0) -> int:
    """Count the dynamic shared memory of the Hopper kernels that sum dS.

    They have a tile of each operand and of the bias; and for each warp, a sum of every key.
    """
    rows, keys = tile.block_q, tile.block_k
    tiles = _swizzled(rows, dim) + _swizzled(keys, dim)
    tiles += _swizzled(rows, value) + _swizzled(keys, value)
    return tiles + tile.warps_m * (_tiled(16, keys, bias_size) + 4 * keys)


def _tiled(rows: int, columns: int, size: int) -> int:
    """Bytes of a tile whose rows have 64, or whole times 128; none where elements have none."""
    used = columns * size
    return rows * (64 if used <= 64 else -(-used // 128) * 128) if used else 0


def _swizzled(rows: int, columns: int) -> int:
    """Bytes of a tile of 16-bit elements in columns of 128 bytes, as TMA swizzles them."""
    return rows * 128 * -(-columns // 64)
