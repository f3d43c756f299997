"""Which kernel, with which tiles, serves a problem on a device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.config.tiles import LARGEST, ROOMS, TileSize, candidates
from tileattn.problem import Problem

WARP = 32
ROW_PAD = 128  # no block of queries is longer, and all divide it
ROW_WARPS = 4  # of kernels in which a warp takes a row: one block has so many
SHARED_LIMIT = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KiB of shared memory that a block may have, by compute capability times ten."""

RESERVED = 1024  # bytes of shared memory that each block costs a multiprocessor besides

TILED = ("forward", "backward_keys", "backward_queries", "backward_bias")
PLAIN = {
    "forward": "plain_forward",
    "backward_keys": "plain_keys",
    "backward_queries": "plain_queries",
    "backward_bias": "plain_bias",
    "backward_renormalise": "plain_renormalise",
}


class Facts(NamedTuple):
    """What decides about kernels besides the problem.

    Parameters
    ----------
    vector : int
        Bytes at whose multiples every row of every array starts.
    shared_limit : int
        Bytes of shared memory that a block may have.
    bias : str
        Element type of the bias; empty where there is none.
    bias_shape : tuple of int
        Its four axes.
    span : int
        Neighbouring keys of the mask that can be read at once: 1, 2 or 16.
    bias_vector : int
        Bytes at whose multiples every row of the bias starts and ends; 0 where it cannot be copied
        in rows.
    arch : str
        What kernels are compiled for, as in ``"sm_90a"``.
    boxes : bool
        Whether q, k and v, and in the backward pass dout, can be copied by tensor maps.
    processors : int
        Multiprocessors of the device.
    mask_block : int
        Keys of a block of the block mask; 0 where there is none.
    """

    vector: int
    shared_limit: int
    bias: str = ""
    bias_shape: tuple[int, ...] = ()
    span: int = 1
    bias_vector: int = 0
    arch: str = ""
    boxes: bool = True
    processors: int = 1
    mask_block: int = 0


class Choice(NamedTuple):
    """A kernel, how much shared memory it is given, and why it was chosen.

    Parameters
    ----------
    key : KernelKey
        What is compiled.
    shared : int
        Bytes of dynamic shared memory.
    tuned : bool
        Whether its tiles were chosen by measurement, and its registers suffice.
    why : str
        One clause.
    """

    key: KernelKey
    shared: int
    tuned: bool
    why: str


def choose(kernel: str, problem: Problem, facts: Facts, tiles: Sequence[TileSize] = ()) -> Choice:
    """Choose the variant of one kernel.

    Parameters
    ----------
    kernel : str
        Name of a tiled kernel.
    problem : Problem
        What is asked.
    facts : Facts
        Of its arrays and its device.
    tiles : sequence of TileSize
        What to try in the place of the table's rows.

    Returns
    -------
    Choice
        The first row of the table that has room; the textbook kernel where none has.
    """
    dtype, size = problem.dtype.name, problem.dtype.itemsize
    options = {**options_of(problem, facts.bias), "span": facts.span, "vector": facts.vector}
    bias_size = itemsize_of(facts.bias) if facts.bias_vector else 0
    if max(problem.D, problem.Dv) <= LARGEST:
        dim, value = room(problem.D), room(problem.Dv)
        for tile in tiles or candidates(kernel, size, max(dim, value), facts.mask_block):
            shared = shared_bytes(kernel, tile, dim, value, size, bias_size)
            # A bias must not cost a block that the multiprocessor is to hold besides.
            blocks = tile.residents if bias_size else 1
            limit = (facts.shared_limit + RESERVED) // blocks - RESERVED
            fits = shared + _static_bytes(kernel, tile, size) <= limit
            if fits and _divides(kernel, tile, dim, value):
                key = KernelKey(kernel, dtype, dim, value, *tile[:6], **options)
                key = replace(key, bias_vector=facts.bias_vector)
                return Choice(key, shared, tile.tuned and not tile.spills, said_of(tile))
    key = KernelKey(PLAIN[kernel], dtype, warps_m=ROW_WARPS, **options)
    why = f"no tile has room for head dimensions {problem.D} and {problem.Dv}: textbook, row by row"
    return Choice(key, 0, False, why)


def said_of(tile: TileSize) -> str:
    """Say in a few words why tiles were chosen."""
    return "tiles from measurements" if tile.tuned else "tiles that fit in shared memory"


def shared_bytes(
    kernel: str, tile: TileSize, dim: int, value: int, size: int, bias_size: int = 0
) -> int:
    """Count the dynamic shared memory of a kernel, as its source lays it out.

    Parameters
    ----------
    kernel : str
        Name of a tiled kernel.
    tile : TileSize
        Its tiles.
    dim, value : int
        Columns it has room for.
    size : int
        Bytes of an element.
    bias_size : int
        Bytes of an element of the bias; 0 where it is not copied to shared memory.

    Returns
    -------
    int
        Bytes.
    """

    def tiled(rows: int, columns: int, size: int = size) -> int:
        used = columns * size
        return rows * (64 if used <= 64 else -(-used // 128) * 128)

    warps = {"backward_keys": tile.warps_m}.get(kernel, tile.warps_n)  # side by side along keys
    bias = warps * tiled(tile.block_q, tile.block_k // warps, bias_size) if bias_size else 0
    q, out = tiled(tile.block_q, dim), tiled(tile.block_q, value)
    k, v = tiled(tile.block_k, dim), tiled(tile.block_k, value)
    if kernel == "forward":
        pairs = tiled(tile.block_q, tile.block_k) if tile.warps_n > 1 else 0
        return max(q, out) + tile.stages * (k + v) + pairs + bias
    if kernel == "backward_keys":
        return k + v + 2 * tiled(tile.block_k, tile.block_q) + tile.stages * (q + out) + bias
    if kernel == "backward_queries":
        return q + out + tile.stages * (k + v) + bias
    if kernel == "backward_renormalise":
        return q + tile.stages * k + bias
    statistics = 2 * tile.block_q * max(size, 4)  # of numbers as sums are kept
    return (q + k + out + v if tile.stages > 1 else max(q + k, out + v)) + statistics + bias


def _static_bytes(kernel: str, tile: TileSize, size: int) -> int:
    """Bound what a kernel has besides: statistics, and what warps exchange."""
    if kernel == "backward_bias":
        return 0
    number, passes = max(size, 4), 2  # each of the passes has its own
    used = 128
    if kernel == "backward_keys":
        used += passes * 2 * tile.stages * tile.block_q * number
    elif tile.warps_n > 1:
        used += 2 * tile.warps_n * tile.block_q * number
    return -(-used // 1024) * 1024  # where the tiles begin


def row_key(kernel: str, dtype: str, dim: int = 64) -> KernelKey:
    """Key of a kernel that takes rows, and for which the options do not matter."""
    return KernelKey(kernel, dtype, head_dim=dim, warps_m=ROW_WARPS)


def _divides(kernel: str, tile: TileSize, dim: int, value: int) -> bool:
    """Whether every warp has whole pairs of atoms of the columns that warps share."""
    shared = {
        "forward": (tile.block_k, value),
        "backward_keys": (tile.block_q, dim, value),
        "backward_bias": (tile.block_k,),
    }.get(kernel, ())
    return all(columns % (16 * tile.warps_n) == 0 for columns in shared)


def options_of(problem: Problem, bias: str) -> dict[str, Any]:
    """Fields of a key that say which options are in use; ``bias`` is the type of its elements."""
    uses = problem.uses
    return {
        "bias": bias,
        "softcap": "softcap" in uses,
        "alibi": "alibi_slopes" in uses,
        "mask": "mask" in uses,
        "block_mask": "block_mask" in uses,
        "dropout": problem.dropout_p > 0,
        "fold": not bias and folds(problem),
    }


def folds(problem: Problem) -> bool:
    """Whether kernels hold products of q and k for scores, and scale in the exponent."""
    terms = {"softcap", "alibi_slopes", "bias"}
    return problem.uses.isdisjoint(terms) and problem.scale > 0


def room(dim: int) -> int:
    """Columns that the kernels for a head dimension have room for."""
    return next(size for size in ROOMS if dim <= size)


def padded_rows(queries: int) -> int:
    """Give the rows of a head in the arrays between the kernels of the backward pass."""
    return -(-queries // ROW_PAD) * ROW_PAD


def itemsize_of(dtype: str) -> int:
    """Bytes of an element, by the name of its type."""
    return int(dtype[-2:]) // 8


def rows_of_block(key: KernelKey, columns: int) -> int:
    """Rows that a block takes where a few lanes take each: twin of ``src/rows.cuh``."""
    itemsize = itemsize_of(key.dtype)
    piece = max(key.vector, itemsize) // itemsize
    lanes = 1
    while lanes < WARP and lanes * piece < columns:
        lanes *= 2
    return key.threads // lanes
