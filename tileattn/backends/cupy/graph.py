"""A CUDA graph of a plan's kernels, made node by node.

Capturing a stream would be shorter, but breaks other threads: a thread that waits for the device
during the capture gets an error.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tileattn.backends.cupy.driver import driver_by
from tileattn.backends.cupy.driver_launch import LaunchBlock
from tileattn.backends.cupy.streams import unrestricted

SINCE = 12_030  # first CUDA version whose driver has all functions

# CUgraphEdgeData: from which port, to which, and the type of the dependency.
_COMPLETE, _PROGRAMMATIC = (ctypes.c_ubyte * 8)(), (ctypes.c_ubyte * 8)(1, 0, 1)
_NONE, _ONE = (None, ctypes.c_size_t(0)), ctypes.c_size_t(1)


class _Kernel(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v1``."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


class _Memset(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS_v1``."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Graph:
    """A graph that one thread at a time can launch, on any stream.

    It holds a copy of all arguments. The driver frees a running graph when it has ended.

    Parameters
    ----------
    block : LaunchBlock
        What to launch; no other thread may fill it meanwhile.
    stream : int
        Handle of the stream of the first launch, where memory for the graph is allocated.

    Raises
    ------
    RuntimeError
        If there is no memory, or the driver refuses something.
    """

    def __init__(self, block: LaunchBlock, stream: int) -> None:
        from cupy.cuda import runtime

        library, graph = driver_by(ctypes.PyDLL), ctypes.c_void_p()
        runtime.setDevice(runtime.getDevice())  # the driver requires a context in this thread
        self._handle, self._destroy = 0, runtime.graphExecDestroy
        with unrestricted():
            _check(library.cuGraphCreate(ctypes.byref(graph), 0))
            try:
                last: Any = None
                for add, arguments, edge in _nodes(library, block):
                    node = ctypes.c_void_p()
                    _check(add(ctypes.byref(node), graph, *_NONE, *arguments))
                    if last is not None:
                        ends = ctypes.byref(last), ctypes.byref(node)
                        _check(library.cuGraphAddDependencies_v2(graph, *ends, edge, _ONE))
                    last = node
                self._handle = runtime.graphInstantiate(graph.value)
            finally:
                library.cuGraphDestroy(graph)
            runtime.graphUpload(self._handle, stream)
        self.launch: Callable[[int], None] = partial(runtime.graphLaunch, self._handle)

    def __del__(self) -> None:
        # Allowed while another thread captures a stream.
        if self._handle:
            with unrestricted():
                self._destroy(self._handle)


def _nodes(library: Any, block: LaunchBlock) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
    """Yield for each node the function that adds it, its arguments, and the edge before it."""
    address, nbytes = block.zeros
    if nbytes:
        context = ctypes.c_void_p()
        _check(library.cuCtxGetCurrent(ctypes.byref(context)))
        memset = _Memset(address, 0, 0, 1, nbytes, 1)
        yield library.cuGraphAddMemsetNode, (ctypes.byref(memset), context), _COMPLETE
    for config, function, parameters in block.each():
        there = ctypes.addressof(parameters)
        kernel = _Kernel(function, config.grid, config.block, config.shared_bytes, there)
        edge = _PROGRAMMATIC if config.attribute_count else _COMPLETE
        yield library.cuGraphAddKernelNode, (ctypes.byref(kernel),), edge


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver could not make a graph: status {status}")
