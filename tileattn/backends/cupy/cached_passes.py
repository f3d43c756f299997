"""Passes of repeated calls, launched from the addresses of their arrays.

Nearly all host time of a short call is Python; this path has the least of it. Memory pools return
the same addresses again and again, so a loop soon finds all of its launches bound to them.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import count
from operator import attrgetter, itemgetter, or_
from typing import Any
from weakref import finalize

import numpy as np

from tileattn.backends.addresses import Overlap
from tileattn.backends.cupy.describe import refuse_device
from tileattn.backends.cupy.executable import Bound, Executable
from tileattn.backends.cupy.streams import is_capturing
from tileattn.call.options import PAIR_ARRAYS, Options
from tileattn.call.sequences import given_for
from tileattn.kernels.cuda.plan.layout import MAX_ALIGNMENT, ROWS, ArrayLayout, alignment_of
from tileattn.kernels.cuda.plan.workspace import ALIGNED
from tileattn.results import Attention, Gradients

_PART = "_init"  # compiled part of the constructor of a CuPy array
_address = attrgetter("data.ptr")

MOST = 512  # sets of addresses of all passes; a graph takes 100 KiB of GPU memory

# By pass number and addresses, least recently launched first: launches bound to these addresses, or
# an executable that ran once on them.
_met: OrderedDict[tuple[int, ...], Bound | Executable] = OrderedDict()
_numbers = count()

# Bytes. Results of up to this size share one allocation, which lives as long as any of them. Larger
# passes keep the GPU busy for longer than the host needs for several allocations.
ONE_ALLOCATION_MAX_BYTES = 1 << 20


class SeparateAllocations(partial[Any]):
    """An allocator of another library, which needs a separate allocation for each result.

    PyTorch takes arrays in one allocation for views of each other, and XLA has a buffer for each.
    """


class Pass:
    """One pass of the calls of one signature: its executables, by what may still differ.

    Parameters
    ----------
    inputs, results : sequence of str
        The arrays that it reads, q, k and v first, and the arrays that it writes. Addresses have
        this order.
    """

    # True if addresses are enough: the caller provides all arrays, and none is copied.
    is_direct = False

    def __init__(self, inputs: Sequence[str], results: Sequence[str]) -> None:
        self.inputs = inputs
        names = list(enumerate((*inputs, *results)))
        self._rows = itemgetter(*(n for n, name in names if name in ROWS))
        self._pairs = [n for n, name in names if name in PAIR_ARRAYS]
        self.executables: dict[Any, Executable] = {}  # by `key`
        self.nbytes = 0  # workspace that is enough for all executables
        self._number = next(_numbers)
        finalize(self, _forget, self._number)

    def key(self, addresses: Sequence[int], device: int) -> tuple[int, ...]:
        """Return what a plan depends on: device, alignments, and whether v may be a view of k."""
        bits = reduce(or_, self._rows(addresses), MAX_ALIGNMENT)
        key = device, addresses[1] == addresses[2], bits & -bits
        if self._pairs:
            return *key, *(alignment_of(addresses[n]) for n in self._pairs)
        return key

    def keep(self, key: Any, executable: Executable) -> None:
        """Keep an executable for calls of a key."""
        self.executables[key] = executable
        self.nbytes = max(self.nbytes, executable.nbytes)

    def launch(
        self,
        addresses: Sequence[int],
        workspace: int,
        device: int,
        stream: Any,
        executable: Executable | None = None,
    ) -> bool:
        """Start the kernels on a CuPy stream; return False if no earlier call was like this one.

        ``executable`` runs such a first call, if given. Nothing else differs from call to call:
        tensor maps follow from the addresses. Single steps are safe among threads: a thread takes a
        bound launch out of the table while it launches it.
        """
        key = self._number, device, workspace, *addresses
        found = _met.pop(key, None)
        if isinstance(found, Bound):
            found.launch(stream)
            _met[key] = found
            return True
        if executable is None:
            known: Executable | None = found or self.executables.get(self.key(addresses, device))
            if known is None:
                return False
            executable = known.latest(stream)
        if found is not None and executable.is_settled and not is_capturing(stream):
            bound = executable.bind(addresses, workspace, stream)
            bound.launch(stream)
            _met[key] = bound
            return True
        executable.start(addresses, workspace, stream)
        if found is None and len(_met) >= MOST:
            _met.popitem(last=False)
        _met[key] = executable
        return True

    def run(
        self,
        executable: Executable,
        addresses: Mapping[str, int],
        arrays: Mapping[str, Any],
        device: int,
        workspace: Any = None,
    ) -> None:
        """Run an executable on CuPy's current stream and device, with copies and workspace.

        ``addresses`` has the arrays that the executable names. A workspace replaces CuPy's pool;
        ValueError if it is too small, or on another device.
        """
        import cupy

        plan, nbytes = executable.plan, executable.nbytes
        if workspace is not None:
            _ensure_fits(workspace, nbytes, device)
            memory = workspace.data
        else:
            memory = cupy.cuda.alloc(nbytes) if nbytes else None

        def copies(of: Mapping[str, ArrayLayout]) -> list[tuple[Any, Any]]:
            """Pair each contiguous copy with the caller's array."""
            starts = plan.workspace.starts
            return [
                (cupy.ndarray(x.shape, np.dtype(x.dtype), memory + starts[name]), arrays[name])
                for name, x in of.items()
            ]

        copies_in, copies_out = copies(plan.copies_in), copies(plan.copies_out)
        for copy, x in copies_in:
            cupy.copyto(copy, x, casting="unsafe")
        at = memory.ptr if memory is not None else 0
        given = [addresses[name] for name in executable.names]
        self.launch(given, at, device, cupy.cuda.get_current_stream(), executable)
        for copy, x in copies_out:
            cupy.copyto(x, copy, casting="unsafe")


def _forget(number: int) -> None:
    for key in [key for key in list(_met) if key[0] == number]:
        _met.pop(key, None)


def _ensure_fits(workspace: Any, nbytes: int, device: int) -> None:
    """Raise ValueError if a workspace is on another device, or too small."""
    if workspace.data.device_id != device:
        refuse_device("workspace", workspace.data.device_id, device)
    if workspace.nbytes < nbytes:
        raise ValueError(
            f"workspace has {workspace.nbytes:,} bytes; this call needs {nbytes:,} or more "
            "(explain(q, k, v, **options).workspace_bytes are enough where lse, and the rows "
            "of dout and out, are contiguous)"
        )


class ArrayPass:
    """A pass on CuPy arrays, in memory of CuPy's allocator.

    Parameters
    ----------
    known : Pass
        The pass; it is direct.
    inputs, results : mapping of str to array
        The arrays of an earlier call.
    ndim : int
        Number of axes of the caller's q.
    kind : type
        What the call returns: a tuple of the results, followed by ``None``.
    """

    def __init__(
        self,
        known: Pass,
        inputs: Mapping[str, Any],
        results: Mapping[str, Any],
        ndim: int,
        kind: type[Attention] | type[Gradients],
    ) -> None:
        import cupy

        self._known = known
        self._others = [n for n in inputs if n not in ROWS and n not in ("lse", "dlse")]
        parts, end = [], 0
        for x in results.values():
            parts.append((x.shape[4 - ndim :], x.dtype, end))
            end += -(-x.nbytes // ALIGNED) * ALIGNED
        self._bytes, self._is_one_allocation = end, end <= ONE_ALLOCATION_MAX_BYTES
        self._make, self._make_others = maker(parts), maker(parts[1:])
        self._overlaps = Overlap(next(iter(results.values())), inputs.values())
        self._returned = partial(tuple.__new__, kind)
        self._absent = [None] * (len(kind._fields) - len(results))
        self._device, self._allocator = cupy.cuda.runtime.getDevice, cupy.cuda.get_allocator
        self._stream = cupy.cuda.get_current_stream

    def __call__(self, rows: Sequence[Any], options: Options, out: Any | None = None) -> Any:
        """Run the pass on CuPy's current stream; None if no earlier call was like this one.

        ``out`` takes the place of the first result.
        """
        if self._others:
            rows = (*rows, *(given_for(name, options) for name in self._others))
        device, addresses = self._device(), []
        for x in rows if out is None else (*rows, out):
            memory = x.data
            if memory.device_id != device:
                return None
            addresses.append(memory.ptr)
        alloc = self._allocator()
        nbytes, at = self._known.nbytes, 0  # of the workspace, which is freed in stream order
        if out is not None:
            *others, place = addresses
            if self._overlaps(place, others):
                return None
            made = self._make_others(None)
            results = [out, *made]
        elif not self._is_one_allocation or type(alloc) is SeparateAllocations:
            made = results = self._make(None)
        elif nbytes <= self._bytes:
            memory = alloc(self._bytes + nbytes)
            at, nbytes = memory.ptr + self._bytes, 0
            made = results = self._make(memory)
        else:
            made = results = self._make(alloc(self._bytes))
        addresses.extend(map(_address, made))
        if nbytes:
            memory = alloc(nbytes)
            at = memory.ptr
        if not self._known.launch(addresses, at, device, self._stream()):
            return None
        return self._returned(results + self._absent)


def maker(parts: Sequence[tuple[Any, np.dtype[Any], int]]) -> Callable[[Any], list[Any]]:
    """Return an allocator of uninitialised contiguous arrays of some shapes and dtypes.

    It takes the memory in which the arrays start at some offsets, or None for memory of their own.
    It is the constructor of CuPy's class without its Python part, a third of its time, or the whole
    constructor if CuPy has no such part. ``cupy.empty`` takes longer.
    """
    import cupy

    kind, init = cupy.ndarray, _own_part()
    if init is None:
        return lambda memory: [kind(x, dtype, memory and memory + n) for x, dtype, n in parts]
    new = kind.__base__.__new__
    # CuPy looks up the types of NumPy's own dtypes fastest.
    found = [(x, dtype.type if dtype.isbuiltin == 1 else dtype, n) for x, dtype, n in parts]

    def make(memory: Any) -> list[Any]:
        made = []
        for shape, dtype, start in found:
            x = new(kind)
            init(x, shape, dtype, memory and memory + start)
            made.append(x)
        return made

    return make


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an uninitialised contiguous array with memory of its own."""
    import cupy

    init = _own_part()
    if init is None:
        return cupy.ndarray(shape, dtype)
    x = cupy.ndarray.__base__.__new__(cupy.ndarray)
    init(x, shape, dtype, None)
    return x


@cache
def _own_part() -> Callable[..., None] | None:
    """Find the compiled part of CuPy's constructor, and check that it works as expected."""
    import cupy

    kind, init = cupy.ndarray, getattr(cupy.ndarray, _PART, None)
    if init is None:
        return None
    try:
        x = kind.__base__.__new__(kind)
        init(x, (2, 3), np.float32, None)
        found = x.shape, x.strides, x.dtype
    except (TypeError, AttributeError):
        return None
    made: Callable[..., None] = init
    return made if found == ((2, 3), (12, 4), np.float32) else None
