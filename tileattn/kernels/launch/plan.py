"""The launches of a call: made once, run for all calls that differ in addresses only."""

import ctypes
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tileattn.kernels.build.load import Kernel, load_all
from tileattn.kernels.launch.params import POINTERS, template
from tileattn.kernels.launch.steps import Step
from tileattn.kernels.launch.streams import outlive_readers, stream_name
from tileattn.kernels.launch.tma import Maps
from tileattn.kernels.launch.workspace import Layout

_SLOT = {name: slot for slot, name in enumerate(POINTERS)}


class Plan:
    """Kernels that are loaded, with all that a launch is given but the addresses of the arrays.

    Parameters
    ----------
    values : mapping
        Fields of the parameter block, without addresses.
    names : iterable of str
        The arrays whose addresses differ from call to call.
    fixed : mapping of str to cupy array
        Arrays that the plan owns.
    steps : iterable of Step
        What is launched, in order; kernels are compiled and loaded here.
    aligned : int
        Bytes at whose multiples the arrays of rows must start.
    arrays : mapping of str to cupy array
        Of the first call: those that tensor maps are made of have the same sizes and strides in all
        calls. They are not kept.
    layout : Layout
        Of the memory that the kernels need besides.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        names: Iterable[str],
        fixed: Mapping[str, Any],
        steps: Iterable[Step],
        aligned: int,
        arrays: Mapping[str, Any],
        layout: Layout,
    ) -> None:
        self.aligned = aligned
        self.layout = layout
        self._fixed = fixed
        self._stream = stream_name() if fixed else (0, 0)
        addresses = {name: x.data.ptr for name, x in fixed.items()}
        self._template = template({**values, **addresses})
        self._slots = tuple((name, _SLOT[name]) for name in dict.fromkeys((*names, *layout.starts)))
        last = max(slot for _, slot in self._slots)
        self._pointers = [addresses.get(name, 0) for name in POINTERS[: last + 1]]
        order = tuple(steps)
        kernels = load_all([step.key for step in order])
        boxes = {step.boxes for step in order if step.boxes}
        maps = {names: Maps(names, arrays) for names in boxes}
        self._launches = tuple(map(_launch, order, kernels, itertools.repeat(maps)))
        self._spare: list[tuple[Any, Any]] = []

    def run(self, addresses: Mapping[str, int]) -> None:
        """Start the kernels on CuPy's current stream.

        Parameters
        ----------
        addresses : mapping of str to int
            Of the arrays named to the constructor.
        """
        pointers = self._pointers.copy()
        for name, slot in self._slots:
            pointers[slot] = addresses[name]
        self.start(pointers)

    def start(self, pointers: Sequence[int]) -> None:
        """Start the kernels, as `run` does.

        Parameters
        ----------
        pointers : sequence of int
            What the parameter block begins with: addresses in the order of its fields.
        """
        if self._fixed:
            outlive_readers(self, self._stream)
        # A launch copies the block, so it is free for the next call afterwards. Threads that run
        # the same plan at the same time each take a block of their own: pop and append are atomic.
        try:
            block = self._spare.pop()
        except IndexError:
            block = self._block()
        cells, argument = block
        cells[: len(pointers)] = pointers
        arguments = (argument,)
        for function, grid, threads, shared, maps in self._launches:
            if maps is None:
                function(grid, threads, arguments, shared)
            else:
                _held, boxes = maps[maps.pick(pointers)]
                function(grid, threads, (argument, boxes), shared)
        self._spare.append(block)

    def _block(self) -> tuple[Any, Any]:
        """Copy the parameter block, as 64-bit cells and as the argument that CuPy launches with."""
        from cupy.cuda.function import CPointer

        cells = (ctypes.c_uint64 * (len(self._template) // 8)).from_buffer_copy(self._template)
        return cells, CPointer(ctypes.addressof(cells))


def _launch(
    step: Step, kernel: Kernel, maps: Mapping[Any, Maps]
) -> tuple[Any, tuple[int], tuple[int], int, Maps | None]:
    if step.shared:
        kernel.allow_shared(step.shared)
    boxes = maps.get(step.boxes)
    return kernel.function, (step.blocks,), (step.key.threads,), step.shared, boxes
