"""Which kernel, with which tiles, serves a problem on a device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from tileattn.kernels.key import KernelKey
from tileattn.kernels.tiles import LARGEST, ROOMS, TileSize, candidates
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
}

HOPPER = "forward_sm90"
HOPPER_GROUP_ROWS = 64  # queries of a warpgroup
HOPPER_LOADERS = 4  # warps: registers are handed from one warpgroup to another
HOPPER_FEW_KEYS = 512
HOPPER_NARROW, HOPPER_WASTE = 128, 1.02  # keys of a tile, and padded keys over keys
HOPPER_STATIC = 2048  # at most, bytes of shared memory besides the tiles

_Clause = tuple[str, Callable[["Problem", "Facts"], bool]]

# What leaves a call to the portable kernel: the first clause that holds is the reason.
_NOT_HOPPER: tuple[_Clause, ...] = (
    ("the GPU is not of compute capability 9.0", lambda _, facts: facts.arch != "sm_90a"),
    ("dtype is neither float16 nor bfloat16", lambda P, _: P.dtype.itemsize != 2),
    (f"a head dimension is above {LARGEST}", lambda P, _: max(P.D, P.Dv) > LARGEST),
    ("bias is in use", lambda P, _: "bias" in P.uses),
    ("mask is in use", lambda P, _: "mask" in P.uses),
    ("block_mask is in use", lambda P, _: "block_mask" in P.uses),
    ("dropout is in use", lambda P, _: P.dropout_p > 0),
    ("an array is empty", lambda P, _: 0 in (P.B, P.Hq, P.Hkv, P.Nq, P.Nk, P.D, P.Dv)),
    (
        # With a margin for what a last block or turn goes beyond: positions have 32 bits.
        "an array has nearly 2**31 rows or more",
        lambda P, _: P.B * max(P.Hq * P.Nq, P.Hkv * P.Nk) >= (1 << 31) - (1 << 16),
    ),
    ("v has columns that are no multiple of 8", lambda P, _: P.Dv % 8 > 0),
    ("a row does not start at a multiple of 16 bytes", lambda _, facts: facts.vector < 16),
    (
        "q, k or v has an axis that is broadcast, reversed or of too long strides",
        lambda _, facts: not facts.boxes,
    ),
)


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
        Whether q, k and v can be copied by tensor maps.
    processors : int
        Multiprocessors of the device.
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


def choose_forward(problem: Problem, facts: Facts) -> Choice:
    """Choose the kernel of the forward pass, and its variant.

    Parameters
    ----------
    problem : Problem
        What is asked.
    facts : Facts
        Of its arrays and its device.

    Returns
    -------
    Choice
        Hopper's own kernel where it serves the call; else what `choose` finds, and why.
    """
    for why, holds in _NOT_HOPPER:
        if holds(problem, facts):
            choice = choose("forward", problem, facts)
            return choice._replace(why=f"the portable kernel, because {why}; {choice.why}")
    dim, value, tile = room(problem.D), room(problem.Dv), hopper_tile(problem)
    options = _options(problem, facts.bias)
    key = KernelKey(
        *(HOPPER, problem.dtype.name, dim, value, *tile[:6]), loaders=HOPPER_LOADERS, **options
    )
    why = f"tensor maps and products of warpgroups, {_said_of(tile)}"
    return Choice(key, hopper_bytes(tile, dim, value), tile.tuned and not tile.spills, why)


def _said_of(tile: TileSize) -> str:
    return "tiles from measurements" if tile.tuned else "tiles that fit in shared memory"


def hopper_tile(problem: Problem) -> TileSize:
    """Pick the tiles of Hopper's own kernel, of those that fit.

    Where few keys are cut by a diagonal, small tiles waste less of what it hides (measured). Wide
    ones are faster where nothing is cut, scores are plain, and keys fill the last one (measured);
    with terms their registers spill.
    """
    P = problem
    dim, value = room(P.D), room(P.Dv)
    uncut = P.window == (None, None) and P.uses.isdisjoint({"softcap", "alibi_slopes"})

    def suits(tile: TileSize) -> bool:
        if hopper_bytes(tile, dim, value) + HOPPER_STATIC > SHARED_LIMIT[90] * 1024:
            return False
        keys = -(-P.Nk // tile.block_k) * tile.block_k
        return tile.block_k <= HOPPER_NARROW or (uncut and keys <= HOPPER_WASTE * P.Nk)

    tiles = list(filter(suits, candidates(HOPPER, P.dtype.itemsize, max(dim, value))))
    return tiles[-1 if P.Nk <= HOPPER_FEW_KEYS and P.window[1] is not None else 0]


def hopper_bytes(tile: TileSize, dim: int, value: int) -> int:
    """Count the dynamic shared memory of Hopper's own kernel, as its source lays it out.

    Parameters
    ----------
    tile : TileSize
        Its tiles.
    dim, value : int
        Columns it has room for.

    Returns
    -------
    int
        Bytes: of the next queries, too, for as many warpgroups as there is room.
    """

    def boxes(rows: int, columns: int) -> int:
        return rows * 128 * -(-columns // 64)

    queries = boxes(HOPPER_GROUP_ROWS, dim)
    pairs = tile.stages * (boxes(tile.block_k, dim) + boxes(tile.block_k, value))
    left = SHARED_LIMIT[90] * 1024 - HOPPER_STATIC - pairs
    groups = tile.block_q // HOPPER_GROUP_ROWS
    return pairs + max(groups, min(2 * groups, left // queries)) * queries


def choose(kernel: str, problem: Problem, facts: Facts) -> Choice:
    """Choose the variant of one kernel.

    Parameters
    ----------
    kernel : str
        Name of a tiled kernel.
    problem : Problem
        What is asked.
    facts : Facts
        Of its arrays and its device.

    Returns
    -------
    Choice
        The first row of the table that has room; the textbook kernel where none has.
    """
    dtype, size = problem.dtype.name, problem.dtype.itemsize
    options = {**_options(problem, facts.bias), "span": facts.span, "vector": facts.vector}
    bias_size = itemsize_of(facts.bias) if facts.bias_vector else 0
    if max(problem.D, problem.Dv) <= LARGEST:
        dim, value = room(problem.D), room(problem.Dv)
        for tile in candidates(kernel, size, max(dim, value)):
            shared = shared_bytes(kernel, tile, dim, value, size, bias_size)
            # A bias must not cost a block that the multiprocessor is to hold besides.
            blocks = tile.residents if bias_size else 1
            limit = (facts.shared_limit + RESERVED) // blocks - RESERVED
            fits = shared + _static_bytes(kernel, tile, size) <= limit
            if fits and _divides(kernel, tile, dim, value):
                key = KernelKey(kernel, dtype, dim, value, *tile[:6], **options)
                key = replace(key, bias_vector=facts.bias_vector)
                return Choice(key, shared, tile.tuned and not tile.spills, _said_of(tile))
    key = KernelKey(PLAIN[kernel], dtype, warps_m=ROW_WARPS, **options)
    why = f"no tile has room for head dimensions {problem.D} and {problem.Dv}: textbook, row by row"
    return Choice(key, 0, False, why)


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
    statistics = 2 * tile.block_q * max(size, 4)  # of numbers as sums are kept
    return (q + k + out + v if tile.stages > 1 else max(q + k, out + v)) + statistics + bias


def _static_bytes(kernel: str, tile: TileSize, size: int) -> int:
    """Bound what a kernel has besides: statistics, marks of rows, and what warps exchange."""
    if kernel == "backward_bias":
        return 0
    number, passes = max(size, 4), 2  # each of the passes has its own
    used = passes * (tile.block_q + tile.block_k) + 128
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


def _options(problem: Problem, bias: str) -> dict[str, Any]:
    uses = problem.uses
    terms = bool(bias) or not uses.isdisjoint({"softcap", "alibi_slopes"})
    return {
        "bias": bias,
        "softcap": "softcap" in uses,
        "alibi": "alibi_slopes" in uses,
        "mask": "mask" in uses,
        "block_mask": "block_mask" in uses,
        "dropout": problem.dropout_p > 0,
        "fold": not terms and problem.scale > 0,
    }


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
