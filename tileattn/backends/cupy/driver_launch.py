"""Kernels of a plan, launched in order by the driver's ``cuLaunchKernelEx``.

CuPy launches kernels without attributes. One attribute lets a kernel start while the one before it
ends: programmatic dependent launch. Every kernel of a plan but the first has it;
``src/griddep.cuh`` says why that is safe. The first waits for all earlier work of the stream.
"""

import ctypes
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
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


VALUES = 448  # words of 8 bytes that one launch stores; parameters have at most 4,096 bytes


class _Values(ctypes.Structure):
    """``Values`` of ``src/store_values.cu``."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("values", ctypes.c_uint64 * VALUES),
    )


_OVERLAPPING = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)


class PlannedLaunch(NamedTuple):
    """A launch of a plan with its kernel."""

    launch: KernelLaunch  # with any grid
    kernel: Kernel
    overlaps: bool  # True: it may start while the kernel before it runs


class LaunchBlock:
    """The arguments of a plan's launches, for one thread at a time.

    A launch copies them, so they can be reused afterwards, also for another plan of the same kind.

    Parameters
    ----------
    nbytes : int
        Size of the parameter block.
    launches : sequence of PlannedLaunch
        The caller keeps them alive.
    stores : sequence of Kernel
        For each of the values that `fill` takes, the kernel that stores them before the launches.
    """

    def __init__(
        self, nbytes: int, launches: Sequence[PlannedLaunch], stores: Sequence[Kernel] = ()
    ) -> None:
        from cupy.cuda import runtime

        self._start, self._memset = _driver_function(), runtime.memsetAsync
        self._cells: Any = (ctypes.c_uint64 * (nbytes // 8))()
        self._at = ctypes.addressof(self._cells)
        self._bytes = memoryview(self._cells).cast("B")
        self._stream = 0
        self.zeros = 0, 0
        self._configs: list[_Config] = []
        self._given: list[tuple[Any, ...]] = []
        self._maps: dict[tuple[tuple[str, int], ...], EncodedMaps] = {}
        self._values: list[Any] = []
        for kernel in stores:
            values = _Values()
            self._values.append(values)
            self._add(
                kernel, kernel.key.threads, 0, (ctypes.c_void_p * 1)(ctypes.addressof(values))
            )
        for launch, kernel, overlaps in launches:
            parameters = (ctypes.c_void_p * 2)(self._at)
            boxes = launch.tensor_maps
            if boxes:
                maps = self._maps.get(boxes)
                if maps is None:
                    maps = self._maps[boxes] = EncodedMaps(boxes, launch.key.mapped_dtype)
                parameters[1] = maps.start
            config = self._add(kernel, launch.key.threads, launch.shared_bytes, parameters)
            if overlaps:
                config.attributes, config.attribute_count = ctypes.pointer(_OVERLAPPING), 1
        self._grids = [config.grid for config in self._configs[len(stores) :]]

    def _add(self, kernel: Kernel, threads: int, shared_bytes: int, parameters: Any) -> _Config:
        """Add a launch of one thread block."""
        config = _Config((1, 1, 1), (threads, 1, 1), shared_bytes)
        # ctypes is faster without a list of argument types.
        function = ctypes.c_void_p(kernel.function.ptr)
        self._configs.append(config)
        self._given.append((ctypes.byref(config), function, parameters, None))
        return config

    def fill(
        self,
        template: bytes,
        grids: Sequence[int],
        pointers: Iterable[tuple[int, int]],
        maps: Sequence[int],
        zeros: tuple[int, int],
        values: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Set the parameter block, the grids, and the tensor maps.

        ``pointers`` are the cells of addresses in the block, by their numbers. ``maps`` are the
        sizes and strides of each tensor map, as for `EncodedMaps`, in the order of launches.
        ``zeros`` is memory to set to zero before the kernels run: its address and size, which may
        be 0. ``values`` are at most `VALUES` words each, and the addresses where they are stored.
        """
        self._bytes[: len(template)] = template
        cells = self._cells
        for slot, address in pointers:
            cells[slot] = address
        self.zeros = zeros
        for sizes, grid in zip(self._grids, grids, strict=True):
            sizes[0] = grid or 1  # the driver requires a block
        first = 0
        for encoded in self._maps.values():
            encoded.encode(maps[first : first + encoded.count], cells)
            first += encoded.count
        for place, (address, words) in zip(self._values, values, strict=True):
            place.to, place.count = address, len(words) // 8
            ctypes.memmove(place.values, words, len(words))

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
