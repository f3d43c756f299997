"""Hopper's own kernels: which calls they serve, with what tiles, and how much memory they take."""

from collections.abc import Callable
from dataclasses import replace

from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.config.select import (
    SHARED_LIMIT,
    Choice,
    Facts,
    choose,
    options_of,
    room,
    said_of,
)
from tileattn.kernels.config.tiles import LARGEST, TileSize, candidates
from tileattn.problem import Problem

HOPPER = "forward_sm90"
HOPPER_BACKWARD, HOPPER_WIDE = "backward_sm90", "backward_wide_sm90"
HOPPER_FINISH = "finish_sm90"
HOPPER_BACKWARDS = (HOPPER_BACKWARD, HOPPER_WIDE)
# Columns that kernels of the backward pass have room for: wide ones where either needs it.
HOPPER_ROOMS = {HOPPER_BACKWARD: (64, 128), HOPPER_WIDE: (128, 192, 256)}
HOPPER_ADDERS = 2  # threads that add to dq
HOPPER_PIECE = 64 * 32 * 4  # bytes of dq that each of them adds at a time
HOPPER_GROUP_ROWS = 64  # queries of a warpgroup
HOPPER_LOADERS = 4  # warps: registers are handed from one warpgroup to another
HOPPER_FEW_KEYS = 512
HOPPER_NARROW, HOPPER_WASTE = 128, 1.02  # keys of a tile, and padded keys over keys
HOPPER_LOW = 128  # queries of a tile under a block mask
HOPPER_STATIC = 2048  # at most, bytes of shared memory besides the tiles

_Clause = tuple[str, Callable[[Problem, Facts], bool]]

# What leaves a call to the portable kernel: the first clause that holds is the reason.
_NOT_HOPPER: tuple[_Clause, ...] = (
    ("the GPU is not of compute capability 9.0", lambda _, facts: facts.arch != "sm_90a"),
    ("dtype is neither float16 nor bfloat16", lambda P, _: P.dtype.itemsize != 2),
    (f"a head dimension is above {LARGEST}", lambda P, _: max(P.D, P.Dv) > LARGEST),
    ("bias is in use", lambda P, _: "bias" in P.uses),
    ("mask is in use", lambda P, _: "mask" in P.uses),
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
        "an array has an axis that is broadcast, reversed or of too long strides",
        lambda _, facts: not facts.boxes,
    ),
)
_NOT_HOPPER_BACKWARD: tuple[_Clause, ...] = (
    *_NOT_HOPPER,
    ("block_mask is in use", lambda P, _: "block_mask" in P.uses),
    ("q and k have columns that are no multiple of 8", lambda P, _: P.D % 8 > 0),
)


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
    portable = _portable("forward", _NOT_HOPPER, problem, facts)
    if portable is not None:
        return portable
    return hopper_forward(problem, hopper_tile(problem))


def hopper_forward(problem: Problem, tile: TileSize) -> Choice:
    """Give Hopper's own kernel of the forward pass with these tiles."""
    dim, value = room(problem.D), room(problem.Dv)
    return _hopper(HOPPER, problem, dim, value, tile, hopper_bytes(tile, dim, value))


def choose_backward(problem: Problem, facts: Facts) -> Choice:
    """Choose the kernel of the backward pass over keys, and its variant.

    Parameters
    ----------
    problem : Problem
        What is asked.
    facts : Facts
        Of its arrays, dout among them, and its device.

    Returns
    -------
    Choice
        Hopper's own kernel where it serves the call; else what `choose` finds, and why.
    """
    P = problem
    portable = _portable("backward_keys", _NOT_HOPPER_BACKWARD, P, facts)
    if portable is not None:
        return portable
    kernel = next(name for name in HOPPER_BACKWARDS if max(P.D, P.Dv) <= HOPPER_ROOMS[name][-1])
    dim, value = (next(n for n in HOPPER_ROOMS[kernel] if x <= n) for x in (P.D, P.Dv))
    tiles = candidates(kernel, P.dtype.itemsize, max(dim, value))
    tile = tiles[0 if P.uses.isdisjoint({"softcap", "alibi_slopes"}) else -1]
    return _hopper(kernel, P, dim, value, tile, walk_bytes(tile, dim, value))


def _portable(
    kernel: str, clauses: tuple[_Clause, ...], problem: Problem, facts: Facts
) -> Choice | None:
    """Choose the portable kernel where a clause holds, which says why."""
    why = next((why for why, holds in clauses if holds(problem, facts)), None)
    if why is None:
        return None
    choice = choose(kernel, problem, facts)
    return choice._replace(why=f"the portable kernel, because {why}; {choice.why}")


def _hopper(kernel: str, P: Problem, dim: int, value: int, tile: TileSize, shared: int) -> Choice:
    sizes = dim, value, *tile[:6]
    options = options_of(P, "")
    key = KernelKey(kernel, P.dtype.name, *sizes, loaders=HOPPER_LOADERS, shared=shared, **options)
    why = f"tensor maps and products of warpgroups, {said_of(tile)}"
    return Choice(key, shared, tile.tuned and not tile.spills, why)


def hopper_tile(problem: Problem) -> TileSize:
    """Pick the tiles of Hopper's own kernel, of those that fit.

    Where few keys are cut by a diagonal, small tiles waste less of what it hides (measured). Wide
    ones are faster where nothing is cut, scores are plain, and keys fill the last one (measured);
    with terms their registers spill. Under a block mask tiles have no more queries than its blocks
    mostly have.
    """
    P = problem
    dim, value = room(P.D), room(P.Dv)
    masked = "block_mask" in P.uses
    plain = P.uses.isdisjoint({"softcap", "alibi_slopes"}) and not masked
    uncut = P.window == (None, None) and plain

    def suits(tile: TileSize) -> bool:
        if hopper_bytes(tile, dim, value) + HOPPER_STATIC > SHARED_LIMIT[90] * 1024:
            return False
        if masked and tile.block_q > HOPPER_LOW:
            return False
        keys = -(-P.Nk // tile.block_k) * tile.block_k
        return tile.block_k <= HOPPER_NARROW or (uncut and keys <= HOPPER_WASTE * P.Nk)

    tiles = list(filter(suits, candidates(HOPPER, P.dtype.itemsize, max(dim, value))))
    few = not masked and P.Nk <= HOPPER_FEW_KEYS and P.window[1] is not None
    return tiles[-1 if few else 0]


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
    queries = _boxes(HOPPER_GROUP_ROWS, dim)
    pairs = tile.stages * (_boxes(tile.block_k, dim) + _boxes(tile.block_k, value))
    left = SHARED_LIMIT[90] * 1024 - HOPPER_STATIC - pairs
    groups = tile.block_q // HOPPER_GROUP_ROWS
    return pairs + max(groups, min(2 * groups, left // queries)) * queries


def repairing(choice: Choice, marks: int) -> Choice:
    """Give the NaN-safe kernel for what one of Hopper's own backward kernels leaves.

    Parameters
    ----------
    choice : Choice
        The kernel that leaves it.
    marks : int
        Of the heads that are left.

    Returns
    -------
    Choice
        The same kernel with fewer stages: there is to be room for the keys once more.
    """
    key = choice.key
    tile = TileSize(key.block_q, key.block_k, key.warps_m, stages=1)
    shared = walk_bytes(tile, key.head_dim, key.value_dim, repairs=True)
    key = replace(key, stages=1, shared=shared, repairs=marks)
    return choice._replace(key=key, shared=shared)


def walk_bytes(tile: TileSize, dim: int, value: int, *, repairs: bool = False) -> int:
    """Count the dynamic shared memory of Hopper's own backward kernels: ``src/bwd_smem_sm90.cuh``.

    Parameters
    ----------
    tile : TileSize
        Its tiles.
    dim, value : int
        Columns it has room for.
    repairs : bool
        Whether the kernel repairs.

    Returns
    -------
    int
        Bytes: of keys and values; queries, one stage more than gradients of the output; two tiles
        of gradients at the scores; and three pieces of dq for each thread that adds them. Of wide
        heads: two stages of queries, two such pieces, and a tile of probabilities. To repair: the
        keys once more, and of wide heads one stage of queries.
    """
    rows, keys, stages = tile.block_q, tile.block_k, tile.stages
    wide = max(dim, value) > HOPPER_ROOMS[HOPPER_BACKWARD][-1]
    kept = (2 if repairs else 1) * _boxes(keys, dim) + _boxes(keys, value)
    queries = stages + 1 if not wide else 1 if repairs else 2
    rings = queries * _boxes(rows, dim) + stages * _boxes(rows, value)
    sums = (2 if wide else 3) * HOPPER_ADDERS * HOPPER_PIECE
    return kept + rings + 2 * _boxes(rows, keys) + sums + (rows * keys * 4 if wide else 0)


def _boxes(rows: int, columns: int) -> int:
    return rows * 128 * -(-columns // 64)
