"""`Program`: the kernels of a kind, started for numbers that were not seen before."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from tileattn.backends.cupy import describe
from tileattn.backends.cupy.cached_passes import empty
from tileattn.backends.cupy.described import Call, Numbers, results_of
from tileattn.backends.cupy.executable import KindKernels
from tileattn.backends.cupy.tensor_maps import MAP_NUMBERS
from tileattn.call.parse import CallKind, Scalars, constants_of
from tileattn.call.prepared import DeviceMemory
from tileattn.call.problem import Problem
from tileattn.errors import UnsupportedError
from tileattn.expressions.parameters import kernel_cells
from tileattn.kernels.cuda.families.size_class import size_class
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.filler import Filler, can_fill
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.params import NUMBERS, PACKED, POINTERS, slots, template
from tileattn.kernels.cuda.plan.plan import WORD, LaunchPlan
from tileattn.kernels.cuda.plan.straight_line import Compiled, pinned, straight_line
from tileattn.lru import Lru

MAX_ROUTES = 16  # compiled for one direction of a kind; a miss costs about a microsecond
MAX_PROGRAMS = 96  # of a kind: by sizes, heads, directions and GPUs
_SLOTS = {name: slot for slot, name in enumerate(POINTERS)}
_COUNT = PACKED.size // WORD  # cells before those of functions
_NULL = bytes(WORD * len(POINTERS))


class OwnMemory:
    """The `tileattn.call.prepared.DeviceMemory` of CuPy."""

    in_bytes = True

    def device(self) -> int:
        import cupy

        index: int = cupy.cuda.runtime.getDevice()
        return index

    def numbers(self, device: int, arrays: Sequence[Any]) -> list[int] | None:
        found: list[int] = []
        for x in arrays:
            data = x.data
            if data.device_id != device:
                return None
            found += x.shape
            found += x.strides
            found.append(data.ptr)
        return found

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, int]:
        x = empty(shape, dtype)
        return x, x.data.ptr

    def allocate(self, nbytes: int) -> Any:
        import cupy

        return cupy.cuda.alloc(nbytes)

    def stream(self) -> Any:
        import cupy

        return cupy.cuda.get_current_stream()


class Route(NamedTuple):
    """The path that some calls take through validation and planning, as one function.

    Parameters
    ----------
    compiled : callable
        Takes the numbers of a call. It returns what `Program.flat` returns, or None for a call that
        takes another path.
    program : Program
        What runs these calls.
    parts : tuple of str
        The parts of the workspace.
    """

    compiled: Compiled
    program: "Program"
    parts: tuple[str, ...]


class Programs:
    """The programs of calls of one kind, by what their numbers decide about kernels."""

    def __init__(self) -> None:
        self._known = Lru(MAX_PROGRAMS)
        self._routes: dict[tuple[bool | None, int], tuple[Numbers, list[Route]]] = {}

    def keep(
        self,
        deterministic: bool | None,
        device: int,
        layout: CallLayout,
        plan: LaunchPlan,
        kernels: KindKernels,
    ) -> None:
        """Keep the program of a plan without tables, if there is one."""
        P, names = plan.problem, {name for name, _ in layout.arrays}
        if layout.v_is_k or not can_fill(plan, names):
            return
        numbers = Numbers(layout, P, is_forward=deterministic is None)
        if set(numbers.order) == names:
            self._routes.setdefault((deterministic, device), (numbers, []))
            key = deterministic, device, _facts(P, plan.kind.device)
            self._known.keep(key, Program(plan, numbers.order, kernels))

    def run(
        self,
        kind: CallKind,
        rows: Sequence[Any],
        options: Mapping[str, Any],
        deterministic: bool | None,
        memory: DeviceMemory,
    ) -> Any:
        """Run a pass by its program; return None if there is none, or an array is elsewhere.

        ``rows`` are q, k and v, and in the backward pass dout, out and lse.
        """
        device = memory.device()
        known = self._routes.get((deterministic, device))
        if known is None:
            return None
        described, routes = known
        scalars, places = Scalars.of(options), described.places(options)
        arrays = described.arrays(rows, options)
        numbers = None if places is None else memory.numbers(device, arrays)
        if numbers is None or places is None:
            return None
        at = described.addresses(numbers)
        numbers += described.others(scalars, places)
        found = None
        for n, route in enumerate(routes):
            found = route.compiled(*numbers)
            if found is not None:
                _, program, parts = route
                if n:  # routes that are taken often come first
                    routes[n - 1], routes[n] = route, routes[n - 1]
                break
        if found is None:
            read = partial(described.read, kind, options, scalars, places, memory.in_bytes)
            names = described.names(scalars, places)
            planned = self._planned(
                read, dict(zip(names, numbers, strict=True)), deterministic, device, routes
            )
            if planned is None:
                return None
            found, program, parts = planned
        results = [memory.empty(*x) for x in described.results(rows)]
        own: Sequence[int] = ()
        if program.constants:
            own = kernel_cells(kind.score_mod, kind.mask_mod).cells(constants_of(options))
        carried = described.carried(places, rows) if places else {}
        addresses = [*at, *[address for _, address in results]]
        program.start(found, parts, addresses, own, carried, memory)
        return described.returned([x for x, _ in results])

    def _planned(
        self,
        read: Callable[[Sequence[Any]], Call | None],
        numbers: Mapping[str, Any],
        deterministic: bool | None,
        device: int,
        routes: list[Route],
    ) -> tuple[tuple[Any, ...], "Program", tuple[str, ...]] | None:
        """Find the program of a call and what it decides; compile its route, if there are few."""
        gpu = describe.device_of(device)
        try:
            call = read([*numbers.values()])
        except (TypeError, ValueError, UnsupportedError):
            return None  # full validation raises it
        if call is None:
            return None
        facts = _facts(call.problem, gpu)
        program: Program | None = self._known.get((deterministic, device, facts))
        if program is None:
            return None
        found = program.flat(call)
        if found is None:
            return None
        values, parts = found
        if len(routes) < MAX_ROUTES and program.has_routes:

            def decided(*noted: Any) -> tuple[Any, ...] | None:
                call = read(noted)
                if call is None or tuple(map(pinned, _facts(call.problem, gpu))) != facts:
                    return None
                found = program.flat(call)
                return found and found[0]

            compiled = straight_line(decided, numbers)
            program.has_routes = compiled is not None
            if compiled is not None:
                routes.append(Route(compiled, program, parts))
        return values, program, parts


def _facts(P: Problem, gpu: Device) -> tuple[Any, ...]:
    """Return what the numbers of a problem decide about kernels, as in `kind_key`."""
    left, right = P.window
    sizes = size_class(P, gpu.tuning, gpu.sm_count)
    return P.D, P.Dv, pinned(P.group), left is None, right is None, *sizes


class Program:
    """Starts one pass of a kind for any numbers that `Filler` fills in.

    Parameters
    ----------
    plan : LaunchPlan
        The plan of an earlier call, without tables.
    names : sequence of str
        The arrays that each call brings, by their names in the parameter block.
    kernels : KindKernels
        The loaded kernels of the plan.
    """

    has_routes = True  # False: planning needs more than arithmetic

    def __init__(self, plan: LaunchPlan, names: Sequence[str], kernels: KindKernels) -> None:
        self._filler, self._names = Filler(plan, names), names
        self._kernels, self._launches = kernels, plan.launches
        places = slots(plan.aux, len(plan.cells))
        self._slots = [places[name] for name in names]
        self.constants = range(_COUNT, _COUNT + len(plan.cells))  # cells of captured numbers
        block = template(plan.fields, plan.aux, plan.cells)
        self._nbytes, count = len(block), len(block) // WORD
        self._pack = Struct(NUMBERS.format + "q" * (count - _COUNT)).pack
        self._cells = len(POINTERS) - count  # from the end of what `flat` returns
        self._maps = 2 + len(plan.launches)
        self._starts = self._maps + MAP_NUMBERS * sum(map(len, plan.tensor_maps))
        self._spare = kernels.spare(self._nbytes, plan.launches, 0)

    def flat(self, call: Call) -> tuple[tuple[Any, ...], tuple[str, ...]] | None:
        """Return all numbers that `start` needs, and the names of the parts of the workspace.

        None if the call runs other kernels.
        """
        P, places, arrays = call
        results = results_of(P, is_forward="dout" not in arrays)
        arrays = arrays | results
        filled = self._filler.fill(P, places, [arrays[name] for name in self._names])
        if filled is None:
            return None
        starts, first_zero, nbytes = filled.workspace
        cells = filled.cells[len(POINTERS) :]
        numbers = nbytes, first_zero, *filled.grids, *filled.maps, *starts.values(), *cells
        return numbers, tuple(starts)

    def start(
        self,
        numbers: Sequence[Any],
        parts: Sequence[str],
        addresses: Sequence[int],
        constants: Sequence[int],
        carried: Mapping[str, bytes],
        memory: DeviceMemory,
    ) -> None:
        """Start the kernels on the current stream.

        ``numbers`` and ``parts`` are as from `flat`. ``carried`` are lengths and offsets that the
        call writes to its workspace.
        """
        nbytes, first_zero = numbers[:2]
        held = memory.allocate(nbytes) if nbytes else None  # until all kernels are started
        at: int = 0 if held is None else held.ptr
        starts = dict(zip(parts, numbers[self._starts : self._cells], strict=True))
        cells = [*zip(self._slots, addresses, strict=True)]
        cells += [(_SLOTS[name], at + start) for name, start in starts.items()]
        if constants:
            cells += zip(self.constants, constants, strict=True)
        spare, values = self._spare, []
        if carried:
            for name, words in carried.items():
                values += KindKernels.parts(at + starts[name], words)
            spare = self._kernels.spare(self._nbytes, self._launches, len(values))
        try:
            block = spare.pop()
        except IndexError:
            self._kernels.load(self._launches, len(values))
            block = self._kernels.block(self._nbytes, self._launches, len(values))
        block.fill(
            _NULL + self._pack(*numbers[self._cells :]), numbers[2 : self._maps], cells,
            numbers[self._maps : self._starts], (at + first_zero, nbytes - first_zero), values,
        )  # fmt: skip
        block.launch(memory.stream().ptr)
        spare.append(block)
