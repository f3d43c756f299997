"""Heads in groups that a rank works on one after the other: buffers are those of one group."""

from collections.abc import Sequence
from typing import NamedTuple


class Heads(NamedTuple):
    """Heads of queries, and the heads of keys that they read, among those of a rank."""

    queries: slice
    keys: slice


def counts(Hq: int, Hkv: int) -> Sequence[int]:
    """List the numbers of groups of equal size, the least first.

    A group has some heads of keys and all queries that read them, or some of those of one.
    """
    shared = Hq // Hkv if Hkv else 1
    whole = [n for n in range(1, Hkv + 1) if Hkv % n == 0] or [1]
    return [*whole, *(Hkv * n for n in range(2, shared + 1) if shared % n == 0)]


def head_groups(Hq: int, Hkv: int, count: int) -> list[Heads]:
    """Give the groups in their order; those with the same keys are neighbours."""
    heads, keys = Hq // count, max(1, Hkv // count) if Hkv else 0
    starts = [n * Hkv // count for n in range(count)]
    return [
        Heads(slice(n * heads, (n + 1) * heads), slice(start, start + keys))
        for n, start in enumerate(starts)
    ]
