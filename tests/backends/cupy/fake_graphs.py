"""What makes graphs, in the driver and in CuPy's ``runtime``: for no GPU."""

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tileattn.backends.cupy import graph, streams

Attributes = list[tuple[int, int]]
Work = Callable[[int, Attributes], None]  # on the stream of a handle

GRAPH, CONTEXT = 55, 77  # handles
_EDGES: dict[tuple[int, ...], Attributes] = {
    (0, 0, 0, 0, 0, 0, 0, 0): [],
    (1, 0, 1, 0, 0, 0, 0, 0): [(6, 1)],  # what programmatic stream serialization is in a graph
}


class Node:
    """A node of a graph: what it does, and the attributes that its edge stands for."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.told: Attributes = []


class Graphs:
    """Graphs whose nodes do on a machine without a GPU what single launches do there."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._nodes: list[Node] = []
        self._uploaded: dict[int, int] = {}  # graph: stream

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import cupy

        making: dict[str, Callable[..., Any]] = {
            "cuGraphCreate": self._create,
            "cuGraphAddKernelNode": self._add_kernel,
            "cuGraphAddMemsetNode": self._add_memset,
            "cuGraphAddDependencies_v2": self._add_edge,
            "graphInstantiate": self._instantiate,
            "graphUpload": self._upload,
            "graphExecDestroy": self._gpu.destroyed.append,
        }
        made = {name: self._asked(name, function) for name, function in making.items()}
        made |= {
            "cuThreadExchangeStreamCaptureMode": self._exchange,
            "cuCtxGetCurrent": self._get_context,
            "cuGraphDestroy": self._destroy,
            "graphLaunch": self._launch,
        }
        driver = SimpleNamespace(**made)
        for module in (graph, streams):
            monkeypatch.setattr(module, "driver_by", lambda _: driver)
        for name, function in made.items():
            if name.startswith("graph"):
                monkeypatch.setattr(cupy.cuda.runtime, name, function)

    def _asked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function fail where it is to find no memory."""
        from cupy.cuda.runtime import CUDARuntimeError

        def found(*given: Any) -> Any:
            assert self._gpu.mode == 2  # nothing is refused for captures of others
            if name not in self._gpu.no_memory:
                return function(*given) or 0
            if name.startswith("graph"):
                raise CUDARuntimeError(2)
            return 2

        return found

    def _exchange(self, mode: Any) -> None:
        self._gpu.mode, mode._obj.value = mode._obj.value, self._gpu.mode

    def _get_context(self, context: Any) -> int:
        context._obj.value = CONTEXT
        return 0

    def _create(self, made: Any, flags: int) -> None:
        assert flags == 0
        self._nodes = []
        made._obj.value = GRAPH

    def _destroy(self, made: Any) -> None:
        assert made.value == GRAPH

    def _add(self, work: Work, node: Any, made: Any, before: Any, count: Any) -> None:
        assert (made.value, before, count.value) == (GRAPH, None, 0)
        self._nodes.append(Node(work))
        node._obj.value = len(self._nodes)

    def _add_kernel(self, *given: Any) -> None:
        *common, params = given
        asked = struct.unpack("Q7I4xQQ", ctypes.string_at(ctypes.addressof(params._obj), 56))
        function, *sizes, shared, parameters, extra = asked
        assert extra == 0
        self._add(self._gpu.launch_of(function, sizes, shared, parameters), *common)

    def _add_memset(self, *given: Any) -> None:
        *common, params, context = given
        asked = struct.unpack("QQIIQQ", ctypes.string_at(ctypes.addressof(params._obj), 40))
        address, _pitch, value, size, width, height = asked
        assert (size, height, context.value) == (1, 1, CONTEXT)
        self._add(lambda stream, _told: self._gpu.clear(address, value, width, stream), *common)

    def _add_edge(self, made: Any, before: Any, node: Any, edge: Any, count: Any) -> None:
        assert (made.value, count.value) == (GRAPH, 1)
        # Each depends on the node before it.
        assert (before._obj.value, node._obj.value) == (len(self._nodes) - 1, len(self._nodes))
        self._nodes[-1].told = _EDGES[tuple(edge)]

    def _instantiate(self, made: int) -> int:
        assert made == GRAPH
        self._gpu.graphs.append(self._nodes)
        return len(self._gpu.graphs)

    def _upload(self, handle: int, stream: int) -> None:
        assert handle == len(self._gpu.graphs)
        self._uploaded[handle] = stream

    def _launch(self, handle: int, stream: int) -> None:
        assert self._uploaded.pop(handle, stream) == stream  # that of the first launch
        for node in self._gpu.graphs[handle - 1]:
            node.work(stream, node.told)
