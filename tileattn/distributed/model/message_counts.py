"""Messages and bytes that ranks send in each schedule, counted without sending them.

The counts exclude what all ranks gather
(arguments and sums of shared gradients), and the second forward pass of ``backward`` if scores are
large.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.layout import Layout, layout_across
from tileattn.distributed.model.workload import Workload
from tileattn.distributed.schedules.schedule import GATHER, RING, ULYSSES, Schedule
from tileattn.distributed.visibility import reach

Array = NDArray[Any]
MessageCounts = NDArray[
    Any
]  # shape (2, P): messages and bytes that each of P ranks sends in a pass


class PassCounts(NamedTuple):
    """Messages of a pass before its matmuls, during them, and after them.

    All messages of an all-to-all count as before the matmuls, also those that return results.
    """

    before: MessageCounts
    during: MessageCounts
    after: MessageCounts


def counts_of(work: Workload, schedule: Schedule, groups: Sequence[int]) -> list[PassCounts]:
    """Count the messages of both passes; ``groups`` are their numbers of head groups."""
    return _COUNTS[schedule.name](work, schedule.group_size, groups)


def _count_ring(work: Workload, n: int, groups: Sequence[int]) -> list[PassCounts]:
    """Count a ring over groups of n ranks, which exchange heads."""
    none = np.zeros((2, work.ranks))
    both = zip(exchanged(work, n, groups), passed_on(work, n, groups), strict=True)
    return [PassCounts(heads, keys, none) for heads, keys in both]


def _count_gather(work: Workload, _: int, groups: Sequence[int]) -> list[PassCounts]:
    """Count an all-gather: each head group sends its keys, and its gradients after the matmuls."""
    none, (keys, gradients) = np.zeros((2, work.ranks)), gathered(work)
    times = [np.array([[count], [1]]) for count in groups]  # as many bytes, in more messages
    forward, backward = (keys * x for x in times)
    return [PassCounts(none, forward, none), PassCounts(none, backward, gradients * times[1])]


def exchanged(work: Workload, n: int, groups: Sequence[int]) -> list[MessageCounts]:
    """Count the all-to-all messages inside groups of n ranks, for both passes.

    ``groups`` are the numbers of head groups of the passes.
    """
    P, item, wide = work.problem, work.problem.dtype.itemsize, work.problem.accum_dtype.itemsize
    # Bytes per token that one rank sends another.
    q, out = (P.B * P.Hq // n * columns * item for columns in (P.D, P.Dv))
    k, v = (P.B * P.Hkv // n * columns * item for columns in (P.D, P.Dv))
    lse = P.B * P.Hq // n * wide
    of_heads, shared = list[tuple[int, bool]](), list[tuple[int, bool]]()
    for x in work.rows:
        each = x.batch * x.keys * x.itemsize
        if x.heads == 1:
            shared.append((each, x.gradient))
        else:
            of_heads.append((x.heads // n * each, x.gradient))
    rows, once = [size for size, _ in of_heads], [size for size, _ in shared]
    dbias, dshared = ([size for size, x in sizes if x] for sizes in (of_heads, shared))
    # Arrays with queries, with keys, and shared by heads: sent to heads, and back to tokens.
    passes: tuple[tuple[list[int], ...], ...] = (
        ([q, *rows], [k, v], once, [out, lse], [], []),
        ([q, out, out, lse, *rows], [k, v], once, [q, *dbias], [k, v], dshared),
    )
    own = [lengths_of(x) for x in (work.q_layout, work.k_layout)]
    others = [np.repeat(x.reshape(-1, n).sum(axis=1), n) - x for x in own]
    (q_own, k_own), (q_others, k_others) = [(n - 1) * x for x in own], others
    tokens = q_own, k_own, q_own, q_others, k_others, q_others
    found = []
    for count, sizes in zip(groups, passes, strict=True):
        times = count, min(count, max(1, P.Hkv // n)), 1
        messages = sum(m * len(x) for m, x in zip((*times, *times), sizes, strict=True))
        nbytes = sum((x * sum(y) for x, y in zip(tokens, sizes, strict=True)), np.zeros(work.ranks))
        found.append(np.stack([np.full(work.ranks, (n - 1.0) * messages), nbytes]))
    return found


def passed_on(work: Workload, n: int, groups: Sequence[int]) -> list[MessageCounts]:
    """Count the messages of a ring over groups of n ranks, for both passes."""
    queries, keys = (layout_across(x, n) for x in (work.q_layout, work.k_layout))
    P, size = work.problem, keys.ranks
    steps = np.array(reach(work.visibility.attending(queries, keys)))
    some = (steps > 0).astype(np.float64)
    elements = lengths_of(keys) * (P.B * P.Hkv // n * (P.D + P.Dv))
    last = (np.arange(size) + steps) % size  # returns the gradients
    item, wide = P.dtype.itemsize, P.accum_dtype.itemsize
    found = []
    for sizes in (np.ones(size), elements):
        of_keys = _sums_on_the_way(steps, sizes)
        returned = np.bincount(last, some * sizes, size)
        found.append((of_keys, of_keys - some * sizes + returned))
    (parts, back), (of_keys, gradients) = found
    forward = np.stack([2 * parts * groups[0], of_keys * item])
    backward = np.stack([2 * (parts + back) * groups[1], of_keys * item + gradients * wide])
    return [np.repeat(sent, n, axis=1) for sent in (forward, backward)]


def _sums_on_the_way(steps: Array, sizes: Array) -> Array:
    """Sum the sizes of the parts that each rank of a ring sends, including its own."""
    ranks = np.arange(len(steps))
    changes = np.zeros(2 * len(steps))
    np.add.at(changes, ranks, sizes)
    np.add.at(changes, ranks + steps, -sizes)
    under_way: Array = changes.cumsum().reshape(2, -1).sum(axis=0)  # rank 0 follows the last rank
    return under_way


def gathered(work: Workload) -> tuple[MessageCounts, MessageCounts]:
    """Count the messages of an all-gather with one head group, and of the gradients sent back."""
    P, size = work.problem, work.ranks
    elements = lengths_of(work.k_layout) * (P.B * P.Hkv * (P.D + P.Dv))
    sent, back = np.zeros((2, 2, size))
    for rank, others in enumerate(work.visibility.attending(work.q_layout, work.k_layout)):
        others[rank] = False
        number = np.count_nonzero(others)
        sent[:, rank] = 2 * number, number * elements[rank] * P.dtype.itemsize
        back += others * np.array([[2], [elements[rank] * P.accum_dtype.itemsize]])
    return sent, back


def lengths_of(layout: Layout) -> Array:
    """Count the tokens of each rank."""
    return np.array([layout.length_of(rank) for rank in range(layout.ranks)], np.float64)


_COUNTS = {RING.name: _count_ring, ULYSSES.name: _count_ring, GATHER.name: _count_gather}
