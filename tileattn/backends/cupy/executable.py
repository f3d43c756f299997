"""`Executable`: a plan with loaded kernels, which starts them on the addresses of each call."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tileattn.backends.cupy.driver_launch import (
    VALUES,
    LaunchBlock,
    PlannedLaunch,
    can_overlap,
)
from tileattn.backends.cupy.graph import SINCE, Graph
from tileattn.backends.cupy.improvement import Improvement
from tileattn.backends.cupy.streams import Uploaded, uploaded
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.load import Kernel, load_all
from tileattn.kernels.cuda.plan.params import slots, template
from tileattn.kernels.cuda.plan.plan import STORE, WORD, LaunchPlan


class KindKernels:
    """The loaded kernels of one kind of pass on CuPy's current device, and spare launch blocks.

    The plans of a kind share keys of kernels, which are told apart by identity: comparing keys
    takes longer than a launch.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, tuple[KernelKey, Kernel, bool]] = {}
        self._spare: dict[Any, list[LaunchBlock]] = {}

    def load(self, launches: Sequence[KernelLaunch], stores: int = 0) -> None:
        """Load the kernels of launches, and let them use their shared memory."""
        loaded = self._loaded
        new = [x for x in launches if id(x.key) not in loaded]
        keys = [x.key for x in new] + [STORE] * (stores > 0 and id(STORE) not in loaded)
        for key, kernel in zip(keys, load_all(keys) if keys else (), strict=True):
            loaded[id(key)] = key, kernel, can_overlap(kernel)
        for launch in new:
            if launch.shared_bytes:
                loaded[id(launch.key)][1].allow_shared(launch.shared_bytes)

    @staticmethod
    def parts(address: int, data: bytes) -> list[tuple[int, bytes]]:
        """Divide data that starts at an address among launches that store it, in whole words."""
        words = data + bytes(-len(data) % WORD)
        size = VALUES * WORD
        return [(address + n, words[n : n + size]) for n in range(0, len(words), size)]

    def spare(self, nbytes: int, launches: Sequence[KernelLaunch], stores: int) -> Any:
        """Return the unused launch blocks of these launches; callers take one, and put it back.

        Threads that run the same launches at the same time each take a block of their own: pop and
        append are atomic.
        """
        key = nbytes, stores, *map(id, [x.key for x in launches])
        return self._spare.setdefault(key, [])

    def block(self, nbytes: int, launches: Sequence[KernelLaunch], stores: int) -> LaunchBlock:
        """Make a launch block."""
        loaded = [self._loaded[id(x.key)] for x in launches]
        planned = [
            PlannedLaunch(x, kernel, overlaps and n + stores > 0)
            for n, (x, (_, kernel, overlaps)) in enumerate(zip(launches, loaded, strict=True))
        ]
        store = [self._loaded[id(STORE)][1]] * stores if stores else []
        return LaunchBlock(nbytes, planned, store)


class Executable:
    """A plan whose kernels are loaded and whose constants are on CuPy's current device.

    ``names`` are the arrays whose addresses each call brings; ``nbytes`` is the size of the
    workspace. ``upload`` copies constants to the GPU. ``improvement`` looks for a faster executable
    of the same calls.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        names: Sequence[str],
        kernels: KindKernels | None = None,
        upload: Callable[[Any], Any] = uploaded,
    ) -> None:
        from cupy.cuda import runtime

        self.plan = plan
        self.nbytes = plan.workspace.nbytes
        self.improvement: Improvement | None = None
        self._faster: Executable | None = None
        self._zeros = self.nbytes - plan.workspace.zeros
        starts = plan.workspace.starts
        self._values = [
            part
            for name, x in plan.carried.items()
            for part in KindKernels.parts(starts[name], x.data)
        ]
        self._kernels = kernels or KindKernels()
        self._kernels.load(plan.launches, len(self._values))
        self._grids = [launch.grid for launch in plan.launches]
        self._maps = [
            n for made in plan.tensor_maps.values() for x in made for n in (*x.sizes, *x.strides)
        ]
        places = slots(plan.aux, len(plan.cells))
        self._template = template(plan.fields, plan.aux, plan.cells)
        self.uploads: Uploaded | None = None
        if plan.constants:
            self.uploads = Uploaded((x.array() for x in plan.constants.values()), upload)
            cells = np.frombuffer(self._template, np.uint64).copy()
            for name, x in zip(plan.constants, self.uploads.arrays, strict=True):
                cells[places[name]] = x.data.ptr
            self._template = cells.tobytes()
        self.names = tuple([name for name in names if name in places])
        parts = {name: start for name, start in starts.items() if name in places}
        self._starts = list(parts.values())
        # If an array has a copy in the workspace, the copy's address counts: it comes later.
        self._slots = [places[name] for name in (*self.names, *parts)]
        self._spare = self._kernels.spare(len(self._template), plan.launches, len(self._values))
        self._has_graphs = runtime.driverGetVersion() >= SINCE

    def latest(self, stream: Any) -> "Executable":
        """Return the fastest executable for a repeated call."""
        improvement = self.improvement  # another thread may set it to None
        if improvement is not None:
            found = improvement.poll(stream)
            # Callers have allocated workspace for the first executable.
            if found is not None and found.nbytes <= self.nbytes:
                self._faster = found
            if found is not None or improvement.has_failed:
                self.improvement = None
        return self._faster or self

    @property
    def is_settled(self) -> bool:
        """True if no faster executable is expected."""
        return self.improvement is None

    def start(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        """Start the kernels on a CuPy stream, given the address of each of ``names``.

        No address is kept.
        """
        try:
            block = self._spare.pop()
        except IndexError:
            block = self._block()
        self._fill(block, addresses, workspace)
        try:
            block.launch(stream.ptr)
        finally:
            if self.uploads is not None:
                self.uploads.was_read(stream)
        self._spare.append(block)

    def bind(self, addresses: Sequence[int], workspace: int, stream: Any) -> "Bound":
        """Prepare to start the kernels repeatedly on these addresses, on any stream."""
        block = self._block()
        self._fill(block, addresses, workspace)
        graph = None
        if self._has_graphs:
            with suppress(RuntimeError):  # for example without memory
                graph = Graph(block, stream.ptr)
        return Bound(self, block, graph)

    def _block(self) -> LaunchBlock:
        return self._kernels.block(len(self._template), self.plan.launches, len(self._values))

    def _fill(self, block: LaunchBlock, addresses: Sequence[int], workspace: int) -> None:
        plan = self.plan
        pointers = [*addresses, *[workspace + start for start in self._starts]]
        zeros = workspace + plan.workspace.zeros, self._zeros
        values = [(workspace + start, words) for start, words in self._values]
        cells = zip(self._slots, pointers, strict=True)
        block.fill(self._template, self._grids, cells, self._maps, zeros, values)


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
