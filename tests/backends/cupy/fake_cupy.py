"""CuPy arrays in host memory, and kernels that only take note of being started: for no GPU."""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_copies import Copies, Planner, Sent, Stream
from tests.backends.cupy.fake_graphs import Graphs, Node, Work
from tileattn.backends.cupy import (
    backend,
    describe,
    driver_launch,
    executable,
    explain,
    tensor_maps,
)
from tileattn.call.prepared import CALLS, SEEN_OFTEN
from tileattn.kernels.cuda.families.hopper import (
    HOPPER,
    HOPPER_BACKWARDS,
    HOPPER_DS,
    HOPPER_WIDE_DQ,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.params import PARAMS
from tileattn.kernels.cuda.tuning import tuning_of

BYTES = 1 << 24

ATTRIBUTES = {
    "MaxSharedMemoryPerBlockOptin": 227 * 1024,
    "L2CacheSize": 50 << 20,
    "MultiProcessorCount": 132,
}


class Encoded(NamedTuple):
    """A tensor map as the driver was asked for it, each tuple from the innermost axis on."""

    address: int
    kind: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    modes: tuple[int, ...]


class Taken:
    """What owns a piece of memory."""

    def __init__(self, gpu: "Machine") -> None:
        self.gpu = gpu


class Machine:
    """What was asked of the GPU that is not there.

    Attributes
    ----------
    launches : list of (KernelKey, int, int, numpy.void)
        Kernel, blocks, dynamic shared memory and parameter block of each launch.
    attributes : list of list of (int, int)
        Id and value of the attributes of each launch.
    refusals : list of int
        What the driver answers the next launches instead of starting them.
    allowed : list of (KernelKey, int)
        Kernels that were let have dynamic shared memory.
    encoded : list of Encoded
        Tensor maps that were made.
    cells_after : int
        How many cells of eight bytes follow the parameter block of each launch.
    tails : list of list of int
        Those cells of each launch.
    maps : list of tuple of Encoded
        What launches were given besides the parameter block, where they were.
    uploads : list of cupy.ndarray
        Copies of arrays on the host, each of which was waited for.
    sent : list of Sent
        Copies of arrays on the host that nothing waits for.
    copying : bool
        Whether these are still to come: they are complete when an event is found to be.
    planner : Planner
        Makes the plans of repeated calls.
    owners : dict of int to weakref.ref
        What owns memory, by its address.
    started : list of str
        The names of all kernels, also of those that store values, in order.
    stored : list of (int, bytes)
        Values that launches have stored, and their addresses.
    zeroed : list of (int, int)
        Addresses and sizes of memory that was set to zero.
    allocated : list of int
        Bytes of each piece of memory that was taken.
    stream : int
        Handle of the current stream.
    streams : list of int
        Handle of the stream of each launch, and of each memory that is set to zero.
    graphs : list of list of Node
        The nodes of graphs that can be launched.
    destroyed : list of int
        Handles of such graphs that were destroyed.
    no_memory : set of str
        Functions by which a graph is made that find no memory.
    mode : int
        The thread's capture mode: 0 is global, 2 relaxed.
    bound : list of int
        Devices that the thread has made current.
    capturing : bool
        Whether the current stream is being captured into a graph: nothing can be copied then.
    busy : set of int
        Handles of streams whose work has not ended.
    device : int
        CuPy's current device.
    arch : str
        What kernels are compiled for.
    driver : int
        Version of CUDA of the driver, as in 12030.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[KernelKey, int, int, Any]] = []
        self.attributes: list[list[tuple[int, int]]] = []
        self.refusals: list[int] = []
        self.allowed: list[tuple[KernelKey, int]] = []
        self.encoded: list[Encoded] = []
        self.cells_after = 0
        self.tails: list[list[int]] = []
        self.maps: list[tuple[Encoded, ...]] = []
        self.uploads: list[Any] = []
        self.sent: list[Sent] = []
        self.copying = False
        self.planner = Planner()
        self.owners: dict[int, Any] = {}
        self.started: list[str] = []
        self.stored: list[tuple[int, bytes]] = []
        self.zeroed: list[tuple[int, int]] = []
        self.allocated: list[int] = []
        self.streams: list[int] = []
        self.capturing = False
        self.busy: set[int] = set()
        self.stream = 0
        self.graphs: list[list[Node]] = []
        self.destroyed: list[int] = []
        self.no_memory: set[str] = set()
        self.mode = 0
        self.bound: list[int] = []
        self.device = 0
        self.arch = "sm_100"
        self.driver = 13000
        self._keys: list[KernelKey] = []  # of loaded kernels, by their handles
        self._memory = np.zeros(BYTES, np.uint8)
        self._start = -self._memory.ctypes.data % 512
        self._used = self._start

    def reusing(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Let each call take the memory that the one before it has taken."""
        first = self._used

        def again() -> Any:
            self._used = first
            return call()

        return again

    def allocate(self, nbytes: int, device: int | None = None) -> Any:
        """Give memory as CuPy's allocators do, at a multiple of 512 bytes; it is never taken back.

        Whatever is left over from earlier is overwritten with NaN.
        """
        from cupy.cuda import memory

        self.allocated.append(nbytes)
        if self._used + nbytes > BYTES:
            self._used = self._start
        place = self._memory[self._used :]
        assert nbytes <= len(place)
        place[:nbytes] = 0xFF
        self._used += -(-max(nbytes, 1) // 512) * 512
        taken = Taken(self)
        self.owners[place.ctypes.data] = ref(taken)
        owner = memory.UnownedMemory(
            place.ctypes.data, max(nbytes, 1), taken, self.device if device is None else device
        )
        return memory.MemoryPointer(owner, 0)

    def device_of(self, ordinal: int) -> Device:
        """Stand in for ``describe.device_of``."""
        limit, l2, sms = (n - ordinal for n in ATTRIBUTES.values())
        return Device("NVIDIA H200", self.arch, sms, limit, l2, tuning_of(self.arch))

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32, device: int = 0) -> Any:
        """Make an array on a device."""
        import cupy

        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * kind.itemsize
        return cupy.ndarray(shape, kind, self.allocate(nbytes, device))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Stand in for ``cupy.zeros``."""
        import cupy

        x = cupy.ndarray(shape, dtype)  # of the current allocator
        ctypes.memset(x.data.ptr, 0, x.nbytes)
        return x

    def upload(self, x: Any, *, blocking: bool) -> Any:
        """Stand in for ``cupy.asarray`` of an array on the host, of a copy that is waited for."""
        assert blocking
        assert not self.capturing, "a stream that is captured cannot be waited for"
        there = self.array(x.shape, x.dtype)
        ctypes.memmove(there.data.ptr, np.ascontiguousarray(x).ctypes.data, x.nbytes)
        self.uploads.append(there)
        return there

    def copy(self, to: Any, x: Any, *, casting: Any) -> None:
        """Stand in for ``cupy.copyto``."""
        np.copyto(at_host(to), at_host(x), casting=casting)

    def clear(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Stand in for ``cudaMemsetAsync``."""
        assert value == 0
        self.streams.append(stream)
        self.zeroed.append((address, nbytes))
        ctypes.memset(address, value, nbytes)

    def load(self, key: KernelKey) -> Any:
        """Stand in for ``kernels.load.load_all``, for each key."""

        def allow(nbytes: int) -> None:
            self.allowed.append((key, nbytes))

        self._keys.append(key)
        return SimpleNamespace(
            key=key,
            arch=self.arch,
            function=SimpleNamespace(ptr=len(self._keys)),
            allow_shared=allow,
            registers=100,
            local_bytes=0,
            shared_bytes=64,
            occupancy=lambda threads, shared: 2,  # noqa: ARG005 - the driver's names
        )

    def start(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        """Stand in for ``cuLaunchKernelEx``."""
        if self.refusals:
            return self.refusals.pop(0)
        words = struct.unpack("7I4xQQI", ctypes.string_at(config, 52))
        *sizes, shared, stream, attributes, count = words
        assert extra is None
        told = [
            struct.unpack("i4xi", ctypes.string_at(attributes + 72 * n, 12)) for n in range(count)
        ]
        self.launch_of(function, sizes, shared, parameters)(stream, told)
        return 0

    def launch_of(self, function: int, sizes: Sequence[int], shared: int, parameters: int) -> Work:
        """Copy all that a launch is given, and return what starts it."""
        key = self._keys[function - 1]
        assert tuple(sizes[1:]) == (1, 1, key.threads, 1, 1)
        assert sizes[0] > 0
        has_maps = key.kernel in (HOPPER, *HOPPER_BACKWARDS, HOPPER_WIDE_DQ, *HOPPER_DS)
        cells, *maps = (ctypes.c_uint64 * (1 + has_maps)).from_address(parameters)
        if key.kernel == "store_values":
            to, count = (ctypes.c_int64 * 2).from_address(cells)
            values = ctypes.string_at(cells + 16, 8 * count)

            def store(_: int, told: list[tuple[int, int]]) -> None:
                assert told == []
                ctypes.memmove(to, values, len(values))
                self.started.append(key.kernel)
                self.stored.append((to, values))

            return store
        params = np.frombuffer(ctypes.string_at(cells, PARAMS.itemsize), PARAMS)[0]
        tail = [*(ctypes.c_int64 * self.cells_after).from_address(cells + PARAMS.itemsize)]
        given = []
        for start in maps:
            names = ("q", "k", "v", "dout")[: 3 if key.kernel == HOPPER else 4]
            numbers = (ctypes.c_uint64 * (16 * len(names))).from_address(start)
            made = tuple(self.encoded[n] for n in numbers[::16])
            assert [x.address for x in made] == [params[name] for name in names]
            given.append(made)

        def launch(stream: int, told: list[tuple[int, int]]) -> None:
            self.started.append(key.kernel)
            self.tails.append(tail)
            self.maps.extend(given)
            self.streams.append(stream)
            self.attributes.append(told)
            self.launches.append((key, sizes[0], shared, params))

        return launch

    def encode(self, *given: int) -> int:
        """Stand in for ``cuTensorMapEncodeTiled``: number the maps, and refuse what it refuses."""
        place, kind, rank, address, at_sizes, at_strides, at_box, at_steps, *modes = given
        long, short = ctypes.c_uint64, ctypes.c_uint32
        sizes, strides = (long * rank).from_address(at_sizes), (long * 3).from_address(at_strides)
        box, steps = (short * rank).from_address(at_box), (short * rank).from_address(at_steps)
        apart = any(step % 16 or not 0 < step < 1 << 40 for step in strides)
        if place % 64 or address % 16 or 0 in sizes or apart or max(box) > 256 or max(steps) > 1:
            return 1
        long.from_address(place).value = len(self.encoded)
        made = Encoded(address, kind, tuple(sizes), tuple(strides), tuple(box), tuple(modes))
        self.encoded.append(made)
        return 0


def settle(gpu: Machine, call: Callable[[], Any]) -> None:
    """Repeat a call until its plan with tables, if it has one, is used by the next call."""
    repeat(gpu, call)
    gpu.planner.work()
    call()


def repeat(gpu: Machine, *calls: Callable[[], Any]) -> None:
    """Repeat calls until each has asked for its plan with tables, if it has one."""
    for _ in range(SEEN_OFTEN + 2):
        for call in calls:
            call()
        if len(gpu.planner.asked) == len(calls):
            break


def asked_by(gpu: Machine, call: Callable[[], Any]) -> tuple[Any, ...]:
    """Give all that a call asks of the GPU; the streams come last."""
    told: tuple[list[Any], ...] = (gpu.launches, gpu.maps, gpu.attributes, gpu.started)
    told += gpu.stored, gpu.zeroed, gpu.streams
    for each in told:
        each.clear()
    call()
    launches = [(*rest, params.tobytes()) for *rest, params in gpu.launches]
    return launches, *map(list, told[1:])


def values_at(address: Any, shape: tuple[int, ...], dtype: Any = np.int64) -> Any:
    """Read a contiguous array at an address of the parameter block, as nested lists."""
    kind = np.dtype(dtype)
    data = ctypes.string_at(int(address), int(np.prod(shape)) * kind.itemsize)
    return np.frombuffer(data, kind).reshape(shape).tolist()


def at_host(x: Any) -> Any:
    """View an array of the machine's as the NumPy array that it is, strides of any sign."""
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)] if x.size else []
    before = -sum(min(step, 0) for step in steps)
    reach = before + sum(max(step, 0) for step in steps) + x.itemsize
    memory = (ctypes.c_uint8 * reach).from_address(x.data.ptr - before)
    return np.ndarray(x.shape, x.dtype, memory, before, x.strides)


def sent(gpu: Machine, x: Any) -> Any:
    """Copy an array, with its strides but for their sizes, to the machine."""
    x = np.asarray(x)
    order = np.argsort([-abs(step) for step in x.strides], kind="stable")
    there = gpu.array(tuple(x.shape[n] for n in order), x.dtype)
    there = there.transpose(tuple(np.argsort(order))) if x.ndim else there
    at_host(there)[...] = x
    return there


class Pointer:
    """Stand in for ``cupy.cuda.function.CPointer``, whose address cannot be read."""

    def __init__(self, address: int) -> None:
        self.address = address


@contextmanager
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Let CuPy and the backend find a GPU.

    Parameters
    ----------
    monkeypatch : pytest.MonkeyPatch
        Takes everything back.

    Yields
    ------
    Machine
        The GPU.
    """
    cupy = pytest.importorskip(
        "cupy", reason="its types are faked: pip install cupy", exc_type=ImportError
    )
    made = Machine()
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: made.device)
    monkeypatch.setattr(cupy, "zeros", made.zeros)
    monkeypatch.setattr(cupy, "asarray", made.upload)
    monkeypatch.setattr(cupy, "copyto", made.copy)
    monkeypatch.setattr(cupy.cuda.runtime, "memsetAsync", made.clear)
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", made.bound.append)
    monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: made.driver)
    pool = cupy.get_default_memory_pool().malloc
    monkeypatch.setattr(
        cupy, "get_default_memory_pool", lambda: SimpleNamespace(malloc=made.allocate)
    )
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: Stream(made, made.stream))
    monkeypatch.setattr(cupy.cuda.function, "CPointer", Pointer)
    for user in (executable, explain):
        monkeypatch.setattr(user, "load_all", lambda keys: [made.load(key) for key in keys])
    monkeypatch.setattr(describe, "device_of", made.device_of)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    arguments = (pointer, number, ctypes.c_uint32, *5 * [pointer], *4 * [number])
    encode = ctypes.CFUNCTYPE(number, *arguments)(made.encode)
    start = ctypes.CFUNCTYPE(number, *4 * [pointer])(made.start)
    monkeypatch.setattr(tensor_maps, "_driver_function", lambda: encode)
    monkeypatch.setattr(driver_launch, "_driver_function", lambda: start)
    Graphs(made).patch(monkeypatch)
    Copies(made).patch(monkeypatch)
    monkeypatch.setattr(backend, "_unavailable", lambda: None)
    CALLS.clear()
    cupy.cuda.set_allocator(made.allocate)
    try:
        yield made
    finally:
        cupy.cuda.set_allocator(pool)
        CALLS.clear()
        made.planner.close()


def launch_together(monkeypatch: pytest.MonkeyPatch, sets: Sequence[tuple[Any, Any, Any]]) -> None:
    """Call the forward pass in a thread for each set; every launch waits for all of the others."""
    together = threading.Barrier(len(sets), timeout=20)
    read = ctypes.string_at

    def late(*given: Any) -> bytes:
        together.wait()
        return read(*given)

    monkeypatch.setattr(ctypes, "string_at", late)
    with ThreadPoolExecutor(len(sets)) as pool:
        list(pool.map(lambda given: tileattn.forward(*given), sets))
