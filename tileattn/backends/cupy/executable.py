"""`Executable`: a plan with loaded kernels, which starts them on the addresses of each call."""

from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np

from tileattn.backends.cupy.driver_launch import LaunchBlock, PlannedLaunch, can_overlap
from tileattn.backends.cupy.graph import SINCE, Graph
from tileattn.backends.cupy.streams import Uploaded, is_capturing
from tileattn.backends.cupy.tensor_maps import EncodedMaps
from tileattn.kernels.cuda.jit.load import load_all
from tileattn.kernels.cuda.plan.params import slots, template
from tileattn.kernels.cuda.plan.plan import LaunchPlan


class Executable:
    """A plan whose kernels are loaded and whose constants are on CuPy's current device.

    ``names`` are the arrays whose addresses each call brings; ``nbytes`` is the size of the
    workspace. An executable made while a stream is captured is not complete: a capture cannot wait
    for an upload, so it runs without the assignment, with the same results in more time. Later
    calls make another.
    """

    def __init__(self, plan: LaunchPlan, names: Sequence[str]) -> None:
        from cupy.cuda import runtime

        self.is_complete = "assignment" not in plan.constants or not is_capturing()
        if not self.is_complete:
            plan = plan.without_assignment()
        self.plan = plan
        self.nbytes = plan.workspace.nbytes
        self._zeros = self.nbytes - plan.workspace.zeros
        # The kind of the call decides about kernels and slots of addresses, its numbers about the
        # rest: constants and cells of the parameter block.
        self._launches = _loaded(plan)
        places = slots(plan.aux, len(plan.cells))
        constants = plan.constants
        self.uploads = Uploaded(x.array() for x in constants.values()) if constants else None
        cells = np.frombuffer(template(plan.fields, plan.aux, plan.cells), np.uint64).copy()
        for name, x in zip(constants, self.uploads.arrays if self.uploads else (), strict=True):
            cells[places[name]] = x.data.ptr
        self._template = cells.tobytes()
        self.names = tuple(name for name in names if name in places)
        starts = plan.workspace.starts.items() if self.nbytes else ()
        parts = {name: start for name, start in starts if name in places}
        self._starts = tuple(parts.values())
        # A launch writes all cells up to the last address, also the other cells among them.
        brought = [places[name] for name in (*self.names, *parts)]
        between = [slot for slot in range(max(brought)) if slot not in brought]
        self._between = tuple(cells[between].tolist())
        # If an array has a copy in the workspace, the copy's address counts: it comes later.
        sources = {slot: n for n, slot in enumerate((*brought, *between))}
        self._in_order = itemgetter(*(sources[slot] for slot in sorted(sources)))
        self._spare: list[LaunchBlock] = []
        self._has_graphs = runtime.driverGetVersion() >= SINCE

    def start(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        """Start the kernels on a CuPy stream, given the address of each of ``names``.

        No address is kept.
        """
        # Threads that run the same plan at the same time each take a block of their own: pop and
        # append are atomic.
        try:
            block = self._spare.pop()
        except IndexError:
            block = LaunchBlock(self._template, self._launches)
        block.fill(*self._given(addresses, workspace))
        try:
            block.launch(stream.ptr)
        finally:
            if self.uploads is not None:
                self.uploads.was_read(stream)
        self._spare.append(block)

    def bind(self, addresses: Sequence[int], workspace: int, stream: Any) -> "Bound":
        """Prepare to start the kernels repeatedly on these addresses, on any stream."""
        block = LaunchBlock(self._template, self._launches)
        block.fill(*self._given(addresses, workspace))
        graph = None
        if self._has_graphs:
            with suppress(RuntimeError):  # for example without memory
                graph = Graph(block, stream.ptr)
        return Bound(self, block, graph)

    def _given(self, addresses: Sequence[int], workspace: int) -> tuple[Any, tuple[int, int]]:
        """Return the arguments of `LaunchBlock.fill`."""
        parts = [workspace + start for start in self._starts] if workspace else ()
        pointers = self._in_order((*addresses, *parts, *self._between))
        return pointers, (workspace + self.plan.workspace.zeros, self._zeros)


class Bound:
    """The launches of an executable on fixed addresses, for one thread at a time.

    A graph costs the host less than the launch of one kernel.
    """

    def __init__(self, executable: Executable, block: LaunchBlock, graph: Graph | None) -> None:
        self._uploads, self._block, self._graph = executable.uploads, block, graph

    def launch(self, stream: Any) -> None:
        """Start the kernels on a CuPy stream."""
        try:
            if self._graph is None or stream.is_capturing():
                self._block.launch(stream.ptr)
            else:
                self._graph.launch(stream.ptr)
        finally:
            if self._uploads is not None:
                self._uploads.was_read(stream)


def _loaded(plan: LaunchPlan) -> list[PlannedLaunch]:
    """Load the kernels of a plan, and let them use their shared memory."""
    kernels = load_all([launch.key for launch in plan.launches])
    maps = {boxes: EncodedMaps(made) for boxes, made in plan.tensor_maps.items()}
    launches = [
        PlannedLaunch(x, kernel, maps.get(x.tensor_maps), n > 0 and can_overlap(kernel))
        for n, (x, kernel) in enumerate(zip(plan.launches, kernels, strict=True))
    ]
    for launch, kernel, *_ in launches:
        if launch.shared_bytes:
            kernel.allow_shared(launch.shared_bytes)
    return launches
