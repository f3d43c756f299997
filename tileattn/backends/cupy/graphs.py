"""The launches of a call as one: a CUDA graph for addresses that come back.

Each launch costs the host microseconds, and a graph of many hardly more than one of them. Pools of
memory give the same addresses again and again, so a loop soon finds all of its graphs.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import finalize

from tileattn.backends.cupy.graph import Graph

FEWEST = 2  # kernels that are worth one
MOST = 256  # sets of addresses, of all plans together: a graph takes 100 KiB of the GPU

# By the number of a plan and addresses, in the order of the last launches: the graph, True if these
# have been met once, and False if no graph could be made.
_met: OrderedDict[tuple[int, ...], Any] = OrderedDict()
_numbers = count()


class LaunchGraphs:
    """The graphs of a plan, by all that differs among its calls; they are dropped with it.

    The first time nothing is kept but the addresses. Single steps are safe among threads: who
    launches a graph takes it out meanwhile.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        finalize(self, _forget, self._number)

    def launch(
        self,
        addresses: Sequence[int],
        workspace: int,
        stream: int,
        start: Callable[[Sequence[int], int, int], None],
        make: Callable[[Sequence[int], int, int], Graph],
    ) -> None:
        """Start kernels on the stream of a handle, which is not captured.

        Of the rest, ``start`` starts them one by one, and ``make`` makes a graph of them.
        """
        key = self._number, workspace, *addresses
        graph = _met.pop(key, None)
        if graph is True:
            try:
                graph = make(addresses, workspace, stream)
            except RuntimeError:  # without memory, for one
                graph = False
        if graph:
            graph.launch(stream)
        else:
            start(addresses, workspace, stream)
        _met[key] = True if graph is None else graph
        if len(_met) > MOST:
            _met.popitem(last=False)


def _forget(number: int) -> None:
    for key in [key for key in list(_met) if key[0] == number]:
        _met.pop(key, None)
