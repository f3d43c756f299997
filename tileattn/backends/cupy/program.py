"""`Program`: the kernels of a kind, started for numbers that were not seen before."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from tileattn.backends.cupy import describe
from tileattn.backends.cupy.cached_passes import empty
from tileattn.backends.cupy.executable import KindKernels
from tileattn.call.prepared import DeviceMemory
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.size_class import size_class
from tileattn.kernels.cuda.plan.filler import (
    Decided,
    Filler,
    Path,
    Places,
    are_uniform,
    can_fill,
)
from tileattn.kernels.cuda.plan.layout import MAX_ALIGNMENT, ArrayLayout, CallLayout
from tileattn.kernels.cuda.plan.params import POINTERS, slots, template
from tileattn.kernels.cuda.plan.plan import LaunchPlan
from tileattn.kernels.cuda.plan.tensor_map import MAX_STRIDE, sizes_and_strides
from tileattn.lru import Lru
from tileattn.results import Attention, Gradients

MAX_PATHS = 12  # compiled for one kind; a miss costs about a microsecond
MAX_PROGRAMS = 96  # of a kind: by sizes, heads, directions and GPUs
_ROWS = ("q", "k", "v", "dout", "out")  # inputs with rows
_SLOTS = {name: slot for slot, name in enumerate(POINTERS)}


class OwnMemory:
    """The `tileattn.call.prepared.DeviceMemory` of CuPy."""

    def device(self) -> int:
        import cupy

        index: int = cupy.cuda.runtime.getDevice()
        return index

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return empty(shape, dtype)

    def allocate(self, nbytes: int) -> Any:
        import cupy

        return cupy.cuda.alloc(nbytes)

    def stream(self) -> Any:
        import cupy

        return cupy.cuda.get_current_stream()


class Programs:
    """The programs of calls of one kind, by what their numbers decide about kernels."""

    def __init__(self) -> None:
        self._known, self._paths = Lru(MAX_PROGRAMS), Lru(MAX_PROGRAMS)

    def keep(
        self,
        deterministic: bool | None,
        device: int,
        layout: CallLayout,
        plan: LaunchPlan,
        kernels: KindKernels,
    ) -> None:
        """Keep the program of a plan without tables, if there is one."""
        names = [name for name, _ in layout.arrays]
        results = ("out", "lse") if deterministic is None else ("dq", "dk", "dv")
        is_complete = set(results).issubset(names)
        if layout.v_is_k or not (is_complete and can_fill(plan, names)):
            return
        rows = [layout.get(name) for name in _ROWS if name in names]
        addresses = [n * MAX_ALIGNMENT + x.alignment for n, x in enumerate(rows) if x is not None]
        P, gpu = plan.problem, plan.kind.device
        if _are_regular(P, rows, addresses):
            sizes = size_class(P, gpu.tuning, gpu.sm_count)
            key = deterministic, device, *_facts(P), sizes
            self._known.keep(key, Program(plan, names, kernels))

    def run(
        self,
        P: Problem,
        places: Places,
        rows: Sequence[Any],
        integers: Sequence[Any],
        aux: Sequence[Any],
        deterministic: bool | None,
        memory: DeviceMemory,
    ) -> Any:
        """Run a pass by its program; return None if there is none, or an array is elsewhere.

        ``places`` are lengths and offsets on the host, ``rows`` are q, k and v, and in the backward
        pass dout, out and lse; ``integers`` and ``aux`` are on the device.
        """
        device, make = memory.device(), memory.empty
        addresses = []
        for x in (*rows, *integers, *aux):
            data = x.data
            if data.device_id != device:
                return None
            addresses.append(data.ptr)
        lead = 4 - P.ndim
        described = [_with_lead(x, lead) for x in rows] if lead else rows
        if not (P.B * P.Hq * P.Nq * P.Nk and _are_regular(P, described[:5], addresses)):
            return None
        facts = deterministic, device, *_facts(P)
        paths: list[tuple[Path, Program]] = []
        if are_uniform(places):
            key = *facts, places[0] is None, places[1] is None
            kept: list[tuple[Path, Program]] | None = self._paths.get(key)
            if kept is None:
                self._paths.keep(key, paths)
            else:
                paths = kept
        decided: Decided | None = None
        program: Program | None = None
        for n, (path, owner) in enumerate(paths):
            decided = path.decided(P)
            if decided is not None:
                program = owner
                if n:  # paths that are taken often come first
                    paths[n - 1 : n + 1] = paths[n], paths[n - 1]
                break
        else:
            gpu = describe.device_of(device)
            program = self._known.get((*facts, size_class(P, gpu.tuning, gpu.sm_count)))
            if program is None:
                return None
            program.add_path(P, places, paths)
        shape = P.out_shape
        if deterministic is None:
            results = [make(shape, P.dtype), make(shape[:-1], P.accum_dtype)]
        else:
            dout, out, lse = rows[3:]
            fits = dout.shape == out.shape == shape and lse.shape == shape[:-1]
            if not (fits and lse.flags.c_contiguous):
                return None
            results = [make(x.shape, x.dtype) for x in rows[:3]]
        addresses += [x.data.ptr for x in results]
        made = [_with_lead(x, lead) for x in results] if lead else results
        arrays = (*described, *integers, *aux, *made)
        stream = memory.stream()
        if not program.start(P, places, arrays, addresses, memory.allocate, stream, decided):
            return None
        if deterministic is None:
            return Attention(*results)
        dq, dk, dv = results
        return Gradients(dq, dk, dv, None, None, (None,) * len(aux) or None)


def _with_lead(x: Any, lead: int) -> ArrayLayout:
    """Describe an array with axes of length 1 before its own."""
    return ArrayLayout((1,) * lead + x.shape, (MAX_ALIGNMENT,) * lead + x.strides, "")


def _facts(P: Problem) -> tuple[Any, ...]:
    """Return what decides about kernels besides the size class, as in `kind_key`."""
    left, right = P.window
    return P.D, P.Dv, P.group, left is None, right is None


def _are_regular(P: Problem, rows: Sequence[Any], addresses: Sequence[int]) -> bool:
    """Return True if any kernel can read q, k and v, and in the backward pass dout and out.

    Other rows are unaligned, broadcast or reversed, not contiguous, or v is in k.
    """
    itemsize = P.dtype.itemsize
    strides = (P.D | P.Dv) * itemsize  # of results
    for x in rows:
        b, h, n, one = x.strides
        if one != itemsize or b <= 0 or h <= 0 or n <= 0:
            return False
        strides |= b | h | n
    places = addresses[: len(rows)]
    is_aligned = not reduce(or_, places, strides) & (MAX_ALIGNMENT - 1)
    return is_aligned and strides < MAX_STRIDE and places[1] != places[2]


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

    def __init__(self, plan: LaunchPlan, names: Sequence[str], kernels: KindKernels) -> None:
        self._filler, self._has_paths = Filler(plan, names), True
        self._kernels, self._launches = kernels, plan.launches
        places = slots(plan.aux, len(plan.cells))
        self._slots = [places[name] for name in names]
        self._maps = [
            (boxes, [names.index(name) for name, _ in boxes]) for boxes in plan.tensor_maps
        ]
        self._itemsize = plan.problem.dtype.itemsize
        self._nbytes = len(template(plan.fields, plan.aux, plan.cells))
        self._spare = kernels.spare(self._nbytes, plan.launches, 0)

    def add_path(self, P: Problem, places: Places, paths: "list[tuple[Path, Program]]") -> None:
        """Compile the path of a problem, if arithmetic is enough and there are few paths."""
        if self._has_paths and len(paths) < MAX_PATHS:
            path = self._filler.path(P, places)
            if path is not None:
                paths.append((path, self))
            self._has_paths = path is not None or not are_uniform(places)

    def start(
        self,
        P: Problem,
        places: Places,
        arrays: Sequence[Any],
        addresses: Sequence[int],
        allocate: Callable[[int], Any],
        stream: Any,
        decided: Decided | None,
    ) -> bool:
        """Start the kernels on a stream; return False if the numbers need another program.

        ``allocate`` returns memory with the address ``ptr``, which is freed in stream order.
        """
        filled = self._filler.fill(P, places, arrays, decided)
        if filled is None:
            return False
        fixed, grids, (starts, first_zero, nbytes), carried = filled
        memory = allocate(nbytes) if nbytes else None  # until all kernels are started
        at: int = 0 if memory is None else memory.ptr
        cells = [*zip(self._slots, addresses, strict=True)]
        for name, start in starts.items():
            cells.append((_SLOTS[name], at + start))
        values: list[tuple[int, bytes]] = []
        for name, words in carried:
            values += KindKernels.parts(at + starts[name], words)
        size = self._itemsize
        maps = {
            boxes: [sizes_and_strides(arrays[n], size) for n in numbers]
            for boxes, numbers in self._maps
        }
        spare = self._spare
        if values:
            spare = self._kernels.spare(self._nbytes, self._launches, len(values))
        try:
            block = spare.pop()
        except IndexError:
            self._kernels.load(self._launches, len(values))
            block = self._kernels.block(self._nbytes, self._launches, len(values))
        block.fill(fixed, grids, cells, maps, (at + first_zero, nbytes - first_zero), values)
        block.launch(stream.ptr)
        spare.append(block)
        return True
