"""Ranks in groups: the messages and the tokens of a group, and of those with one place in each.

The first n ranks are a group, the next n another, and so on: neighbours are most often on one host,
and the exchange inside a group is what nothing overlaps.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tileattn.distributed.comm.protocol import Array, Communicator, Transfer


class Subset:
    """Some ranks of a communicator, which have numbers from 0 among themselves.

    Each rank is in one subset, and all ranks gather at the same points of the program. Two subsets
    that one rank is in at a time have no other rank in common, so that tags need not differ.

    Parameters
    ----------
    parent : Communicator
        All ranks.
    ranks : sequence of int
        Those of this rank's subset, in their order.
    """

    def __init__(self, parent: Communicator, ranks: Sequence[int]) -> None:
        self._parent, self._ranks = parent, ranks
        self.rank, self.size = ranks.index(parent.rank), len(ranks)

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Begin to send."""
        return self._parent.send(x, self._ranks[to], tag)

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Begin to receive."""
        return self._parent.receive(x, self._ranks[source], tag)

    def together(self) -> AbstractContextManager[None]:
        """Begin messages at once."""
        return self._parent.together()

    def gather(self, x: Any) -> list[Any]:
        """Gather on all ranks; keep what those of the subset have given."""
        found = self._parent.gather(x)
        return [found[rank] for rank in self._ranks]


def inside(comm: Communicator, n: int) -> Subset:
    """Give the group of this rank."""
    first = comm.rank // n * n
    return Subset(comm, range(first, first + n))


def across(comm: Communicator, n: int) -> Subset:
    """Give the ranks that have this one's place in their groups, in the order of the groups."""
    return Subset(comm, range(comm.rank % n, comm.size, n))
