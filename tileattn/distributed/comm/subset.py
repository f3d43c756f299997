"""Subsets of ranks: groups of n consecutive ranks, and the ranks with one place in each group.

Consecutive ranks are usually on one host. The all-to-all inside a group needs the faster links,
because it does not overlap with computation.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tileattn.distributed.comm.protocol import Array, Communicator, Transfer


class Subset:
    """Some ranks of a communicator, renumbered from 0.

    Each rank is in one group and in one ring across groups. The two have no other rank in common,
    so both may use the same tags. All ranks gather at the same points of the program.
    """

    def __init__(self, parent: Communicator, ranks: Sequence[int]) -> None:
        self._parent, self._ranks = parent, ranks
        self.rank, self.size = ranks.index(parent.rank), len(ranks)

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Start to send."""
        return self._parent.send(x, self._ranks[to], tag)

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Start to receive."""
        return self._parent.receive(x, self._ranks[source], tag)

    def together(self) -> AbstractContextManager[None]:
        """Start messages together."""
        return self._parent.together()

    def gather(self, x: Any) -> list[Any]:
        """Gather on all ranks; return the objects of the subset."""
        found = self._parent.gather(x)
        return [found[rank] for rank in self._ranks]


def inside(comm: Communicator, n: int) -> Subset:
    """Return the group of this rank."""
    first = comm.rank // n * n
    return Subset(comm, range(first, first + n))


def across(comm: Communicator, n: int) -> Subset:
    """Return the ranks with this rank's place in their groups, in group order."""
    return Subset(comm, range(comm.rank % n, comm.size, n))
