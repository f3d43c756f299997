"""`Program`: the kernels of a kind, started for numbers that were not seen before."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from struct import Struct
from typing import Any

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
from tileattn.kernels.cuda.plan.straight_line import Paths, pinned
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
        # By direction, device, and units of strides.
        self._paths: dict[tuple[bool | None, int, bool], tuple[Numbers, Paths]] = {}

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
            for in_bytes in (False, True):
                self._paths.setdefault((deterministic, device, in_bytes), (numbers, Paths()))
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
        known = self._paths.get((deterministic, device, memory.in_bytes))
        if known is None:
            return None
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
            planned = self._planned(read, given, deterministic, device, paths)
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
        facts = _facts(call.problem, gpu)
        program: Program | None = self._known.get((deterministic, device, facts))
        found = None if program is None else program.decided(call)
        if program is None or found is None:
            return None
        if len(paths.ends) < MAX_PATHS and program.has_paths:

            def decided(*noted: Any) -> tuple[Any, ...] | None:
                call = read(noted)
                if call is None or tuple(map(pinned, _facts(call.problem, gpu))) != facts:
                    return None
                found = program.decided(call)
                return found and found[0]

            program.has_paths = paths.add(decided, numbers, (program, found[1]))
        return found[0], program, found[1]


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

    has_paths = True  # False: planning needs more than arithmetic

    def __init__(self, plan: LaunchPlan, names: Sequence[str], kernels: KindKernels) -> None:
        self._filler, self._names = Filler(plan, names), names
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
        P, places, arrays = call
        results = results_of(P, is_forward="dout" not in arrays)
        arrays = arrays | results
        filled = self._filler.fill(P, places, [arrays[name] for name in self._names])
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
        template, zeros = (
            _NULL + self._pack(*numbers[cells]),
            (at + first_zero, nbytes - first_zero),
        )
        block.fill(
            template,
            numbers[grids],
            zip(slots, pointers, strict=True),
            numbers[maps],
            zeros,
            values,
        )
        block.launch(memory.stream().ptr)
        spare.append(block)
