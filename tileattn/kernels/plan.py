"""The launches of a call: made once, run for all calls that differ in addresses only."""

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

from tileattn.kernels import compile as compiler
from tileattn.kernels.params import POINTERS, template
from tileattn.kernels.steps import Step

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

    Attributes
    ----------
    dq_columns : int
        Columns of the array ``dq_sum``, of zeros, that the kernels need; 0 where they need none.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        names: Iterable[str],
        fixed: Mapping[str, Any],
        steps: Iterable[Step],
        aligned: int,
    ) -> None:
        steps = tuple(steps)
        self.aligned = aligned
        self.dq_columns = max((step.key.head_dim for step in steps if step.key.add_dq), default=0)
        self._fixed = fixed
        addresses = {name: x.data.ptr for name, x in fixed.items()}
        self._template = template({**values, **addresses})
        self._slots = tuple((name, _SLOT[name]) for name in names)
        self._launches = tuple(map(_launch, steps))
        self._spare: list[tuple[Any, Any]] = []

    def run(self, addresses: Mapping[str, int]) -> None:
        """Start the kernels on CuPy's current stream.

        Parameters
        ----------
        addresses : mapping of str to int
            Of the arrays named to the constructor.
        """
        # A launch copies the block, so it is free for the next call afterwards. Threads that run
        # the same plan at the same time each take a block of their own: pop and append are atomic.
        try:
            block = self._spare.pop()
        except IndexError:
            block = self._block()
        cells, argument = block
        for name, slot in self._slots:
            cells[slot] = addresses[name]
        arguments = (argument,)
        for function, grid, threads, shared in self._launches:
            function(grid, threads, arguments, shared)
        self._spare.append(block)

    def _block(self) -> tuple[Any, Any]:
        """Copy the parameter block, as 64-bit cells and as the argument that CuPy launches with."""
        from cupy.cuda.function import CPointer

        cells = (ctypes.c_uint64 * (len(self._template) // 8)).from_buffer_copy(self._template)
        return cells, CPointer(ctypes.addressof(cells))


def _launch(step: Step) -> tuple[Any, tuple[int], tuple[int], int]:
    kernel = compiler.load(step.key)
    if step.shared:
        kernel.allow_shared(step.shared)
    return kernel.function, (step.blocks,), (step.key.threads,), step.shared
