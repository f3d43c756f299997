"""Runs plans on CuPy's current stream."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from tileattn.backends.cupy.describe import refuse_device
from tileattn.backends.cupy.graph import SINCE, Graph
from tileattn.backends.cupy.graphs import FEWEST, LaunchGraphs
from tileattn.backends.cupy.launches import LaunchBlock, PlannedLaunch, can_overlap
from tileattn.backends.cupy.streams import (
    is_capturing,
    outlive_readers,
    stream_name,
    uploaded,
)
from tileattn.backends.cupy.tensor_maps import EncodedMaps
from tileattn.kernels.jit.load import load_all
from tileattn.kernels.launch.layout import ArrayLayout
from tileattn.kernels.launch.params import slots, template
from tileattn.kernels.launch.plan import LaunchPlan


class Executable:
    """A plan whose kernels are loaded and whose constants are on CuPy's current device.

    ``names`` are the arrays whose addresses each call brings, and ``nbytes`` are the bytes of its
    workspace. Made during a capture, in which nobody can wait for a copy, it is not complete:
    without the schedule results are the same, only later. Calls after the capture must make
    another.
    """

    def __init__(self, plan: LaunchPlan, names: Sequence[str]) -> None:
        from cupy.cuda import get_current_stream, runtime

        self.plan = plan
        constants = dict(plan.constants)
        self.is_complete = "schedule" not in constants or not is_capturing()
        if not self.is_complete:
            del constants["schedule"]
        self._constants = {name: uploaded(x.array()) for name, x in constants.items()}
        self._stream = stream_name() if constants else (0, 0)
        fixed = {name: x.data.ptr for name, x in self._constants.items()}
        places = slots(plan.aux)
        cells = np.frombuffer(template(plan.fields, plan.aux), np.uint64).copy()
        for name, address in fixed.items():
            cells[places[name]] = address
        self._template = cells.tobytes()
        self._names = tuple(name for name in names if name in places)
        needed = plan.workspace
        self.nbytes = needed.nbytes
        starts = needed.starts.items() if needed.nbytes else ()
        parts = {name: start for name, start in starts if name in places}
        self._starts = tuple(parts.values())
        # A launch writes the first cells up to the last address: between those there are others.
        brought = [places[name] for name in (*self._names, *parts)]
        between = [slot for slot in range(max(brought)) if slot not in brought]
        self._between = tuple(cells[between].tolist())
        # Of an array and its copy, which is a part, the last counts.
        sources = {slot: n for n, slot in enumerate((*brought, *between))}
        self._in_order = itemgetter(*(sources[slot] for slot in sorted(sources)))
        self._zeros = needed.nbytes - needed.zeros
        self._memset, self._current_stream = runtime.memsetAsync, get_current_stream
        kernels = load_all([launch.key for launch in plan.launches])
        maps = {boxes: EncodedMaps(made) for boxes, made in plan.tensor_maps.items()}
        self._launches = [
            PlannedLaunch(x, kernel, maps.get(x.tensor_maps), n > 0 and can_overlap(kernel))
            for n, (x, kernel) in enumerate(zip(plan.launches, kernels, strict=True))
        ]
        for launch, kernel, *_ in self._launches:
            if launch.shared_bytes:
                kernel.allow_shared(launch.shared_bytes)
        self._spare: list[LaunchBlock] = []
        several = len(self._launches) >= FEWEST and runtime.driverGetVersion() >= SINCE
        self._graphs = LaunchGraphs() if several else None

    def run(
        self,
        addresses: Mapping[str, int],
        arrays: Mapping[str, Any],
        device: int,
        workspace: Any = None,
    ) -> None:
        """Start the kernels, with all that they need, on CuPy's current device.

        ``addresses`` are those of the arrays named to the constructor; some of the caller's arrays
        may have to be copied. A workspace takes the place of CuPy's pool; ValueError where it is
        too small, or on another device.
        """
        import cupy

        starts, nbytes = self.plan.workspace.starts, self.nbytes
        if workspace is not None:
            _ensure_fits(workspace, nbytes, device)
            memory = workspace.data
        else:
            memory = cupy.cuda.alloc(nbytes) if nbytes else None

        def copies(of: Mapping[str, ArrayLayout]) -> list[tuple[Any, Any]]:
            """Pair each contiguous copy with the caller's array."""
            return [
                (cupy.ndarray(x.shape, np.dtype(x.dtype), memory + starts[name]), arrays[name])
                for name, x in of.items()
            ]

        copies_in, copies_out = copies(self.plan.copies_in), copies(self.plan.copies_out)
        for copy, x in copies_in:
            cupy.copyto(copy, x, casting="unsafe")
        at = memory.ptr if memory is not None else 0
        self.launch([addresses[name] for name in self._names], at)
        for copy, x in copies_out:
            cupy.copyto(x, copy, casting="unsafe")

    def launch(self, addresses: Sequence[int], workspace: int, stream: Any = None) -> None:
        """Start the kernels on arrays that need no copies, given all addresses.

        Those of the arrays are in the order of the names that the constructor was given. By default
        the stream is CuPy's current one.
        """
        stream = stream or self._current_stream()
        if self._constants:
            outlive_readers(self, self._stream, stream)
        # Nothing else differs from call to call: tensor maps are those of the addresses.
        given = addresses, workspace, stream.ptr
        if self._graphs is None or is_capturing(stream):
            self._start(*given)
        else:
            self._graphs.launch(*given, self._start, self._graph)

    def _start(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Start the kernels one by one, on the stream of a handle."""
        if self._zeros:
            self._memset(workspace + self.plan.workspace.zeros, 0, self._zeros, stream)
        # Threads that run the same plan at the same time each take a block of their own: pop and
        # append are atomic.
        try:
            block = self._spare.pop()
        except IndexError:
            block = LaunchBlock(self._template, self._launches)
        block.run(self._pointers(addresses, workspace), stream)
        self._spare.append(block)

    def _graph(self, addresses: Sequence[int], workspace: int, stream: int) -> Graph:
        """Make a graph that does the same, to be launched there first."""
        block = LaunchBlock(self._template, self._launches)
        zeros = workspace + self.plan.workspace.zeros, self._zeros
        return Graph(block, self._pointers(addresses, workspace), zeros, stream)

    def _pointers(self, addresses: Sequence[int], workspace: int) -> tuple[int, ...]:
        """Give the first cells of the parameter block."""
        parts = [workspace + start for start in self._starts] if workspace else ()
        pointers: tuple[int, ...] = self._in_order((*addresses, *parts, *self._between))
        return pointers


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
