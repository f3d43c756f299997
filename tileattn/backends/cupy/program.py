"""`Program`: the kernels of a kind, started for numbers that were not seen before."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from struct import Struct
from typing import Any

import numpy as np

from tileattn.backends.cupy import describe
from tileattn.backends.cupy.cached_passes import empty
from tileattn.backends.cupy.executable import KindKernels
from tileattn.backends.cupy.numbers import Call, Direction, Numbers, brought, results_of
from tileattn.backends.cupy.tensor_maps import MAP_NUMBERS
from tileattn.call.parse import CallKind, Scalars, constants_of
from tileattn.call.prepared import DeviceMemory
from tileattn.call.problem import Problem
from tileattn.call.straight_line import Paths, pinned
from tileattn.errors import UnsupportedError
from tileattn.expressions.parameters import kernel_cells
from tileattn.kernels.cuda.families.size_class import size_class
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.filler import Filler, can_fill
from tileattn.kernels.cuda.plan.kind_plan import pair_facts
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout
from tileattn.kernels.cuda.plan.params import NUMBERS, PACKED, POINTERS, slots, template
from tileattn.kernels.cuda.plan.plan import WORD, LaunchPlan
from tileattn.lru import Lru

MAX_PATHS = 32  # compiled for one direction of a kind
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

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, int]:
        import cupy

        x = cupy.zeros(shape, dtype)
        return x, x.data.ptr

    def allocate(self, nbytes: int) -> Any:
        import cupy

        return cupy.cuda.alloc(nbytes)

    def stream(self) -> Any:
        import cupy

        return cupy.cuda.get_current_stream()


class Programs:
    """The programs of calls of one kind, by what their numbers decide about kernels."""

    def __init__(self) -> None:
        self._known = Lru(MAX_PROGRAMS)
        # By direction and device: the layout and the problem of one of the calls.
        self._examples: dict[tuple[Direction, int], tuple[CallLayout, Problem]] = {}
        # By direction, device, and units of strides.
        self._paths: dict[tuple[Direction, int, bool], tuple[Numbers, Paths]] = {}

    def keep(
        self,
        direction: Direction,
        device: int,
        layout: CallLayout,
        plan: LaunchPlan,
        kernels: KindKernels,
    ) -> None:
        """Keep the program of a plan without tables, if there is one."""
        P, arrays = plan.problem, dict(layout.arrays)
        names = *brought(layout, direction), *direction.results
        if layout.v_is_k or {*names} != arrays.keys() or not can_fill(plan, {*names}):
            return
        self._examples.setdefault((direction, device), (layout, P))
        key = direction, device, _facts(P, plan.kind.device, arrays)
        self._known.keep(key, Program(plan, direction, names, kernels))

    def run(
        self,
        kind: CallKind,
        rows: Sequence[Any],
        options: Mapping[str, Any],
        direction: Direction,
        memory: DeviceMemory,
    ) -> Any:
        """Run a pass by its program; return None if there is none, or an array is elsewhere.

        ``rows`` are q, k and v, and in the backward pass dout, out and lse.
        """
        device = memory.device()
        known = self._paths.get((direction, device, memory.in_bytes))
        if known is None:
            example = self._examples.get((direction, device))
            if example is None:
                return None
            known = Numbers(*example, direction, options), Paths()
            self._paths[direction, device, memory.in_bytes] = known
        described, paths = known
        scalars, places = Scalars.of(options), described.places(options)
        numbers = memory.numbers(device, described.arrays(rows, options))
        if numbers is None or places is None:
            return None
        at = described.addresses(numbers)
        numbers += described.others(scalars, places)
        found = paths.find(*numbers)
        if found is not None:
            program, parts = paths.ends[found[-1]]
        else:
            read = partial(described.read, kind, options, scalars, places, memory.in_bytes)
            given = dict(zip(described.names(scalars, places), numbers, strict=True))
            planned = self._planned(read, given, direction, device, paths)
            if planned is None:
                return None
            found, program, parts = planned
        results = described.results(rows, options, memory)
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
        direction: Direction,
        device: int,
        paths: Paths,
    ) -> tuple[tuple[Any, ...], "Program", Mapping[str, int]] | None:
        """Find the program of a call and what it decides; compile its path, if there are few."""
        gpu = describe.device_of(device)
        try:
            call = read([*numbers.values()])
        except (TypeError, ValueError, UnsupportedError):
            return None  # full validation raises it
        if call is None:
            return None
        facts = _facts(call.problem, gpu, call.layouts)
        program: Program | None = self._known.get((direction, device, facts))
        found = None if program is None else program.decided(call)
        if program is None or found is None:
            return None
        if len(paths.ends) < MAX_PATHS and program.has_paths:

            def decided(*noted: Any) -> tuple[Any, ...] | None:
                call = read(noted)
                if call is None or _facts(call.problem, gpu, call.layouts) != facts:
                    return None
                found = program.decided(call)
                return found and found[0]

            program.has_paths = paths.add(decided, numbers, (program, found[1]))
        return found[0], program, found[1]


def _facts(P: Problem, gpu: Device, arrays: Mapping[str, ArrayLayout]) -> tuple[Any, ...]:
    """Return what the numbers of a call decide about kernels, as in `kind_key`."""
    left, right = P.window
    sizes = size_class(P, gpu.tuning, gpu.sm_count)
    pairs = {name: x for name, x in arrays.items() if name != "dbias"}  # as the direction says
    decided = P.D, P.Dv, P.group, left is None, right is None, *sizes
    return tuple(map(pinned, (*decided, *pair_facts(P, pairs).values())))


class Program:
    """Starts one pass of a kind for any numbers that `Filler` fills in.

    Parameters
    ----------
    plan : LaunchPlan
        The plan of an earlier call, without tables.
    direction : Direction
        Which pass.
    names : sequence of str
        The arrays that each call brings, then the results, by their names in the parameter block.
    kernels : KindKernels
        The loaded kernels of the plan.
    """

    has_paths = True  # False: planning needs more than arithmetic

    def __init__(
        self,
        plan: LaunchPlan,
        direction: Direction,
        names: Sequence[str],
        kernels: KindKernels,
    ) -> None:
        self._filler, self._direction, self._names = Filler(plan, names), direction, names
        self._kernels, self._launches = kernels, plan.launches
        places = slots(plan.aux, len(plan.cells))
        self._slots = [places[name] for name in names]
        self.constants = range(_COUNT, _COUNT + len(plan.cells))  # cells of captured numbers
        block = template(plan.fields, plan.aux, plan.cells)
        self._nbytes, count = len(block), len(block) // WORD
        self._pack = Struct(NUMBERS.format + "q" * (count - _COUNT)).pack
        maps = 2 + len(plan.launches)  # where they begin among the numbers of `decided`
        cells = maps + MAP_NUMBERS * sum(map(len, plan.tensor_maps))
        starts = cells + count - len(POINTERS)
        self._parts = slice(2, maps), slice(maps, cells), slice(cells, starts), starts
        self._spare = kernels.spare(self._nbytes, plan.launches, 0)

    def decided(self, call: Call) -> tuple[tuple[Any, ...], Mapping[str, int]] | None:
        """Return all numbers that `start` needs, and the cells of the parts of the workspace.

        None if the call runs other kernels.
        """
        P, places, arrays, ends = call
        arrays = arrays | results_of(P, self._direction, arrays)
        filled = self._filler.fill(P, places, [arrays[name] for name in self._names], ends)
        if filled is None:
            return None
        starts, first_zero, nbytes = filled.workspace
        cells = filled.cells[len(POINTERS) :]
        numbers = nbytes, first_zero, *filled.grids, *filled.maps, *cells, *starts.values()
        return numbers, {name: _SLOTS[name] for name in starts}

    def start(
        self,
        numbers: Sequence[Any],
        parts: Mapping[str, int],
        addresses: Sequence[int],
        constants: Sequence[int],
        carried: Mapping[str, bytes],
        memory: DeviceMemory,
    ) -> None:
        """Start the kernels on the current stream.

        ``numbers`` and ``parts`` are as from `decided`. ``carried`` are lengths and offsets that
        the call writes to its workspace.
        """
        nbytes, first_zero = numbers[:2]
        grids, maps, cells, starts = self._parts
        held = memory.allocate(nbytes) if nbytes else None  # until all kernels are started
        at: int = 0 if held is None else held.ptr
        own = [at + start for start in numbers[starts : starts + len(parts)]]
        slots, pointers = [*self._slots, *parts.values()], [*addresses, *own]
        if constants:
            slots += self.constants
            pointers += constants
        spare, values = self._spare, []
        if carried:
            places = dict(zip(parts, own, strict=True))
            for name, words in carried.items():
                values += KindKernels.parts(places[name], words)
            spare = self._kernels.spare(self._nbytes, self._launches, len(values))
        try:
            block = spare.pop()
        except IndexError:
            self._kernels.load(self._launches, len(values))
            block = self._kernels.block(self._nbytes, self._launches, len(values))
        template = _NULL + self._pack(*numbers[cells])
        addressed = zip(slots, pointers, strict=True)
        zeros = at + first_zero, nbytes - first_zero
        block.fill(template, numbers[grids], addressed, numbers[maps], zeros, values)
        block.launch(memory.stream().ptr)
        spare.append(block)
