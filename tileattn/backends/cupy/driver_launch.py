"""Kernels of a plan, launched in order by the driver's ``cuLaunchKernelEx``.

CuPy launches kernels without attributes. One attribute lets a kernel start while the one before it
ends: programmatic dependent launch. Every kernel of a plan but the first has it;
``src/griddep.cuh`` says why that is safe. The first waits for all earlier work of the stream.
"""

import ctypes
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tileattn.backends.cupy.driver import driver_by
from tileattn.backends.cupy.tensor_maps import EncodedMaps
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.jit.load import Kernel

# Values of the enumerations in cuda.h.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_INVALID_CONTEXT = 201

_WAITING = 90  # compute capability times ten; from it on, kernels wait for the one before
_CAPTURED = 12_030  # first CUDA version whose driver captures such launches in graphs


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: an id, then a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("gap", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_OVERLAPPING = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)


class PlannedLaunch(NamedTuple):
    """A launch of a plan, its kernel, and its arguments besides the parameter block."""

    launch: KernelLaunch
    kernel: Kernel
    maps: EncodedMaps | None
    overlaps: bool  # True: it may start while the kernel before it runs


class LaunchBlock:
    """The arguments of a plan's launches, for one thread at a time.

    A launch copies them, so they can be reused afterwards.

    Parameters
    ----------
    template : bytes
        The parameter block.
    launches : sequence of PlannedLaunch
        The caller keeps them alive.
    """

    def __init__(self, template: bytes, launches: Sequence[PlannedLaunch]) -> None:
        from cupy.cuda import runtime

        self._start, self._memset = _driver_function(), runtime.memsetAsync
        self._cells: Any = (ctypes.c_uint64 * (len(template) // 8)).from_buffer_copy(template)
        self._stream = 0
        self.zeros = 0, 0
        self._configs: list[_Config] = []
        self._given: list[tuple[Any, ...]] = []
        self._maps: list[tuple[Any, EncodedMaps]] = []
        for launch, kernel, maps, overlaps in launches:
            grid, threads = max(launch.grid, 1), launch.key.threads  # the driver requires a block
            config = _Config((grid, 1, 1), (threads, 1, 1), launch.shared_bytes)
            if overlaps:
                config.attributes, config.attribute_count = ctypes.pointer(_OVERLAPPING), 1
            parameters = (ctypes.c_void_p * 2)(ctypes.addressof(self._cells))
            # ctypes is faster without a list of argument types.
            function = ctypes.c_void_p(kernel.function.ptr)
            self._configs.append(config)
            self._given.append((ctypes.byref(config), function, parameters, None))
            if maps is not None:
                self._maps.append((parameters, maps))

    def fill(self, pointers: Sequence[int], zeros: tuple[int, int]) -> None:
        """Set the first cells of the parameter block, and the tensor maps of these addresses.

        ``zeros`` is memory to set to zero before the kernels run: its address and size, which may
        be 0.
        """
        self._cells[: len(pointers)] = pointers
        self.zeros = zeros
        self._held = []
        for parameters, maps in self._maps:
            held, parameters[1] = maps[maps.pick(pointers)]
            self._held.append(held)

    def launch(self, stream: int) -> None:
        """Launch all kernels on a stream, given its handle."""
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        address, nbytes = self.zeros
        if nbytes:
            self._memset(address, 0, nbytes, stream)
        for given in self._given:
            status = self._start(*given)
            if status:
                self._handle(status, given)

    def each(self) -> Iterator[tuple[_Config, Any, Any]]:
        """Yield configuration, function and parameters of each launch."""
        for config, (_, function, parameters, _) in zip(self._configs, self._given, strict=True):
            yield config, function, parameters

    def _handle(self, status: int, arguments: tuple[Any, ...]) -> None:
        """Launch again if the thread had no context; else raise CuPy's error."""
        from cupy.cuda import runtime
        from cupy_backends.cuda.api import driver

        if status == _INVALID_CONTEXT:
            runtime.setDevice(runtime.getDevice())
            status = self._start(*arguments)
        driver.check_status(status)


def can_overlap(kernel: Kernel) -> bool:
    """Return True if a kernel may start while the one before it runs."""
    from cupy.cuda import runtime

    number = re.search(r"\d+", kernel.arch)
    waits = number is not None and int(number[0]) >= _WAITING
    return waits and bool(runtime.driverGetVersion() >= _CAPTURED)


@functools.cache
def _driver_function() -> Any:
    # It releases the interpreter's lock: a launch waits if the GPU's queue is full, and the queue
    # may wait for a host function of the caller.
    return driver_by(ctypes.CDLL).cuLaunchKernelEx
