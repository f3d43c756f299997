"""The launches of a plan as one: a CUDA graph for addresses that come back.

Each launch costs the host microseconds, and a graph of many hardly more than one of them. Pools of
memory give the same addresses again and again, so a loop soon finds all of its graphs.
"""

from collections.abc import Callable
from typing import Any

FEWEST = 3  # kernels that are worth one
MAX_ENTRIES = 128  # sets of addresses that a plan remembers


class LaunchGraphs(dict[tuple[int, ...], Any]):
    """The graphs of a plan's launches by all addresses that they are given.

    The first time nothing is kept but the addresses, None in place of a graph. When there are many
    entries all are dropped; the driver frees a graph that still runs when it has ended. Single
    steps are safe among threads, and no two launch the same graph: each has results of its own.
    """

    def launch(self, addresses: tuple[int, ...], start: Callable[[int], None], stream: Any) -> None:
        """Start kernels on a stream that is not captured; ``start`` takes the handle of one."""
        if addresses not in self:
            if len(self) >= MAX_ENTRIES:
                self.clear()
            self[addresses] = None
            start(stream.ptr)
            return
        graph = self.get(addresses)
        if graph is None:
            self[addresses] = graph = _captured(start)
        graph.launch(stream)


def _captured(start: Callable[[int], None]) -> Any:
    """Take down a graph on a stream of its own: the default one cannot be captured."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    try:
        start(stream.ptr)
    finally:
        graph = stream.end_capture()
    return graph
