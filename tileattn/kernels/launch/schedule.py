"""Which block of queries goes to which multiprocessor, and in what order: decided on the host.

A persistent kernel deals the blocks out in turn. Where they differ in length, some multiprocessors
then get up to a fifth more than the mean; a table of turns evens that out.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.mask import SlidingWindow
from tileattn.algorithm.tiles import cut
from tileattn.kernels.config.hopper import HOPPER, HOPPER_BACKWARDS
from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.launch.block_sparse import visits_before
from tileattn.kernels.launch.steps import Step
from tileattn.problem import Operands, Problem

TILE, START = 10, 12  # what a tile of keys costs, and what to begin and end a block does (measured)
ABREAST = 1024  # keys of a head that are worked on at a time, if dq is summed in order (measured)
MOST_TURNS = 64  # on average: with more, dealing in turn is even enough, and tables take long

Array = NDArray[Any]


class Order(NamedTuple):
    """In what order a pass takes its blocks.

    Parameters
    ----------
    parts : int
        Parts of the heads that are worked on one after the other: at least 1, at most B Hkv.
    table : array of int32, shape (turns + 1, grid), or None
        What each block of threads of a persistent kernel takes in its turn, by its number in the
        order of ``BlockCoord``; the number of all behind the last. None where dealing out in turn
        is as good.
    in_order : bool
        Whether blocks of keys add to dq one after the other.
    """

    parts: int
    table: Array | None = None
    in_order: bool = False


def order_of(problem: Problem, operands: Operands, steps: tuple[Step, ...], cache: int) -> Order:
    """Decide about the order of a pass.

    Parameters
    ----------
    problem : Problem
        What is asked.
    operands : Operands
        Of which lengths and offsets are looked at, where they are on the host.
    steps : tuple of Step
        What the pass starts.
    cache : int
        Bytes of the GPU's second-level cache.

    Returns
    -------
    Order
        Parts, and a table where the pass has one.

    Notes
    -----
    The backward pass comes back to four times the bytes of keys and values (their gradients, and
    the sums of dq). Hopper's own kernels come back to queries, gradients of the output and sums for
    each block of keys: heads for which half a cache has room are worked on together; but if they
    keep the GPU busy for less than one turn, as those of many query heads may, as many as are two.
    If in order each block waits for the one before. That keeps them together, and the fewer of a
    head there are at a time, the shorter it waits.
    """
    P = problem
    for step in steps:
        if step.key.kernel in HOPPER_BACKWARDS:
            each = P.group * P.Nq * ((P.D + P.Dv) * P.dtype.itemsize + P.D * P.accum_dtype.itemsize)
            blocks, size = -(-P.Nk // step.key.block_k), cache // 2 // each
            if size * blocks < step.blocks:
                size = -(-2 * step.blocks // blocks)
            if step.in_order:
                abreast = step.blocks * step.key.block_k // ABREAST
                size = min(size, abreast) if P.window[1] is None else abreast
            size = min(size, step.blocks)
            return Order(-(-P.B * P.Hkv // max(1, size)), in_order=step.in_order)
    kernels = {step.key.kernel for step in steps}
    parts = parts_of(P, 2 * cache if "forward" in kernels else cache // 2)
    if HOPPER not in kernels:
        return Order(parts)
    (step,) = steps
    return Order(parts, _table(P, operands, step.key, parts, step.blocks))


def parts_of(problem: Problem, room: int) -> int:
    """Count the parts of the heads that a GPU works on one after the other.

    Under a causal mask blocks differ in length. The long ones of all heads of a part go first, so
    that the GPU is busy to the end: of as many heads as find room for keys and values.

    Parameters
    ----------
    problem : Problem
        What is asked.
    room : int
        Bytes that keys and values of a part may fill.

    Returns
    -------
    int
        At least 1, at most B Hkv.
    """
    P = problem
    left, right = P.window
    heads = max(1, P.B * P.Hkv)
    if left is not None or right is None:
        return heads
    each = P.Nk * (P.D + P.Dv) * P.dtype.itemsize
    return -(-heads // max(1, room // max(1, each)))


def _table(P: Problem, x: Operands, key: KernelKey, parts: int, grid: int) -> Array | None:
    blocks, heads = -(-P.Nq // key.block_q), P.B * P.Hq
    works = blocks * heads
    # One block a head, as in decoding, is little work, and lengths may differ on every call.
    if blocks == 1 or not grid < works <= MOST_TURNS * grid:
        return None
    costs = _costs(P, x, key)
    if costs.min() == costs.max():
        return None
    block, head, part = turns(blocks, heads, parts)
    alike = head % P.Hq if costs.shape[1] > 1 else 0
    cost = costs[head // P.Hq, alike, block if P.window[1] is None else blocks - 1 - block]
    # Within a part, and among parts, the long ones go first; what is equal stays in order.
    longest = np.zeros(heads, np.int64)
    np.maximum.at(longest, part, cost)
    order = np.lexsort((-cost, part, -longest[part]))
    return deal(order, cost[order], grid)


def turns(blocks: int, heads: int, parts: int) -> tuple[Array, Array, Array]:
    """List what ``BlockCoord`` in ``src/blocks.cuh`` makes of each number, in the same arithmetic.

    Parameters
    ----------
    blocks, heads : int
        Blocks of each head, and heads.
    parts : int
        Parts of the heads.

    Returns
    -------
    block, head, part : array of int64, shape (blocks * heads,)
        Of each number; a part is named by its first head.
    """
    index = np.arange(blocks * heads)
    size, more = divmod(heads, parts)
    longer = more * (size + 1)
    straight = index // blocks  # the head, if each went by itself
    members = np.where(straight < longer, size + 1, size)
    start = np.where(straight < longer, 0, longer)
    first = start + (straight - start) // members * members
    turn = index - first * blocks
    return turn // members, first + turn % members, first


def _costs(P: Problem, x: Operands, key: KernelKey) -> Array:
    """Give the cost of each block of queries, shape (B, Hq or 1, blocks): its tiles, and itself."""
    # What is on the GPU is not waited for: a wrong guess costs time only.
    lengths = x.kv_lengths if type(x.kv_lengths) is np.ndarray else np.full(P.B, P.Nk)
    offsets = x.q_offset if type(x.q_offset) is np.ndarray else lengths - P.Nq
    places = list(zip(lengths.tolist(), offsets.tolist(), strict=True))

    def tiles(length: int, offset: int) -> list[tuple[int, int]]:
        window = SlidingWindow(P.Nq, length, offset, *P.window)
        ranges = (window.key_range(q0, q1) for q0, q1 in cut(P.Nq, key.block_q))
        return [(lo // key.block_k, -(-hi // key.block_k)) for lo, hi in ranges]

    each = {place: tiles(*place) for place in set(places)}
    first, past = np.moveaxis(np.array([each[place] for place in places]), -1, 0)[..., None, :]
    return TILE * _visited(x, key, first, past) + START


def _visited(x: Operands, key: KernelKey, first: Array, past: Array) -> Array:
    """Count the tiles from first to past - 1 that the block mask does not skip."""
    if x.block_mask is None:
        return past - first
    before = visits_before(x.block_mask, (key.block_q, key.block_k))
    before = np.broadcast_to(before, (len(first), *before.shape[1:]))[:, :, : first.shape[-1]]

    def up_to(tile: Array) -> Array:
        places = np.broadcast_to(tile[..., None], (*before.shape[:3], 1))
        return np.take_along_axis(before, places, axis=-1)[..., 0]

    return up_to(past) - up_to(first)


def deal(order: Array, cost: Array, grid: int) -> Array:
    """Deal works out as if each block of threads took the next one when it is free.

    Parameters
    ----------
    order : array of int, shape (works,)
        The works, by their numbers from 0 on, in the order in which they begin.
    cost : array of int, shape (works,)
        How long each of them takes.
    grid : int
        Blocks of threads.

    Returns
    -------
    array of int32, shape (turns + 1, grid)
        A column for each block of threads, filled up with the number of all works, which ends it.

    References
    ----------
    Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969).
    """
    columns: list[list[int]] = [[] for _ in range(grid)]
    # Time and block of threads in one integer, which a heap compares faster than a pair.
    free = list(range(grid))
    for work, time in zip(order.tolist(), (grid * cost).tolist(), strict=True):
        soonest = free[0]
        columns[soonest % grid].append(work)
        heapq.heapreplace(free, soonest + time)
    table = np.full((max(map(len, columns)) + 1, grid), len(order), np.int32)
    for n, column in enumerate(columns):
        table[: len(column), n] = column
    return table
