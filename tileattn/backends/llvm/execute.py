"""Pack the parameters of a kernel and launch it on threads with scratch memory."""

import ctypes
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tileattn.backends import threads
from tileattn.backends.addresses import address_of
from tileattn.backends.llvm.arrays import Array
from tileattn.backends.llvm.tasks import Division, Grid
from tileattn.call.problem import Problem
from tileattn.errors import BackendUnavailableError
from tileattn.kernels.llvm.compile import Function, Module, functions
from tileattn.kernels.llvm.params import ARRAYS, BIAS_DTYPES, COUNTER, Layout, strides_of, template
from tileattn.kernels.llvm.sizes import scratch_bytes
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.user_functions import Functions

_END = 1 << 62  # past all tasks
_FAR = 1 << 61  # keys to the end of an open side of the window
_ALIGNMENT = 64  # bytes of a cache line, and of the widest vector
_KEPT = 1 << 24  # bytes; a thread frees larger scratch memory after a call

_SLOT = {name: slot for slot, name in enumerate(ARRAYS)}
_COUNTER = COUNTER // 8
_Block = ctypes.c_int64 * (_COUNTER + 1)


class Executable:
    """The functions of a module, with all parameters packed except the addresses.

    Later calls have arrays with the layouts of ``arrays``.
    """

    def __init__(
        self, name: str, target: Target, P: Problem, arrays: Mapping[str, Array],
        division: Division, own: Functions,
    ) -> None:  # fmt: skip
        layout = Layout(packed=P.sequences is not None, paged=P.page is not None)
        more: dict[str, Any] = {"learned": len(own.learned), "paged": layout.paged}
        tiles = scratch_bytes(name, target, P.dtype, P.accum_dtype, P.D, P.Dv, **more)
        self._scratch_bytes = tiles + division.own_bytes
        self._workspace = division.workspace
        fields = division.values | _numbers(P)
        for key, array in {**arrays, **self._workspace()}.items():
            fields |= strides_of(key, array)
        if "bias" in arrays:
            fields["bias_dtype"] = BIAS_DTYPES.index(arrays["bias"].dtype.name)
        module = Module(name, target, P.dtype.name, P.accum_dtype.name, own, layout)
        self._launches = tuple(
            (function, template(fields | {"tasks": grid.tasks, "quota": grid.quota}), grid)
            for function, grid in zip(_functions(module), division.grids, strict=True)
            if grid.tasks
        )

    def run(self, arrays: Mapping[str, Array], aux: Sequence[Array] = ()) -> None:
        """Run the functions in order."""
        pointers = [0] * len(_SLOT)
        for name, array in arrays.items():
            pointers[_SLOT[name]] = address_of(array)
        self.start(pointers, (arrays, aux))

    def start(self, pointers: list[int], arrays: Any) -> None:
        """Run the functions, given the addresses at the start of the parameter block.

        Threads know only addresses, so ``arrays`` are held until the end.
        """
        workspace = self._workspace()
        places = [(_SLOT[name], address_of(array)) for name, array in workspace.items()]
        for function, values, grid in self._launches:
            block: Any = _Block.from_buffer_copy(values)
            block[: len(pointers)] = pointers
            for slot, address in places:
                block[slot] = address
            if grid.threads == 1:
                self._work(function, block, grid.tasks)
            else:
                self._share(function, block, grid, (arrays, workspace))

    def _share(self, function: Function, block: Any, grid: Grid, arrays: Any) -> None:
        """Let this and other threads take tasks until none is left.

        No task waits for a task that has not started: tasks that add to dQ first are taken first.
        After an interrupt the other threads may still run, and hold the arrays.
        """

        def work(_: Any = arrays) -> None:
            self._work(function, block, grid.tasks)

        def stop() -> None:
            block[_COUNTER] = _END

        threads.together(work, min(threads.worker_count(), grid.threads), stop)

    def _work(self, function: Function, block: Any, tasks: int) -> None:
        """Take tasks until none is left."""
        idle = _idle.buffers
        scratch = idle.pop() if idle else _Scratch(0)
        if scratch.size < self._scratch_bytes:
            scratch = _Scratch(self._scratch_bytes)
        at = ctypes.addressof(block)
        while block[_COUNTER] < tasks:
            function(at, at + COUNTER, scratch.address)
        if scratch.size <= _KEPT:
            idle.append(scratch)


@functools.cache
def _functions(module: Module) -> tuple[Function, ...]:
    """Return the functions of a module; no interrupt stops LLVM in the middle."""
    return threads.uninterrupted(functools.partial(_compiled, module))


def _compiled(module: Module) -> tuple[Function, ...]:
    try:
        return functions(module)
    except (AttributeError, OSError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"backend 'llvm' cannot run here: LLVM does not compile its kernels ({error}); use "
            "backend='numpy', or TILEATTN_BACKEND=numpy for all calls"
        ) from error


def _numbers(P: Problem) -> dict[str, Any]:
    """Return the parameters that are numbers."""
    left, right = (_FAR if side is None else min(side, _FAR) for side in P.window)
    names = ("B", "Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv", "scale")
    fields: dict[str, Any] = {name: getattr(P, name) for name in names}
    fields["page"] = P.page or 0
    fields |= {"left": left, "right": right, "dropout_scale": 1.0}
    fraction, exponent = math.frexp(P.scale)
    fields |= {"scale_power": math.ldexp(1.0, exponent - 1), "scale_rest": 2 * fraction}
    if P.softcap is not None:
        ends = np.finfo(P.accum_dtype)
        fields["softcap"] = min(max(P.softcap, float(ends.tiny)), float(ends.max * ends.eps))
    if P.dropout_p:
        fields["dropout_scale"] = 1 / (1 - P.dropout_p)
        fields["threshold"] = int(P.dropout_p * 2**32)
        fields["seed_high"], fields["seed_low"] = divmod(P.seed, 1 << 32)
    return fields


class _Scratch:
    """Aligned memory for the tiles of one worker."""

    def __init__(self, size: int) -> None:
        self._memory = np.empty(size + _ALIGNMENT, np.uint8)
        self.size = size
        start = address_of(self._memory)
        self.address = start + -start % _ALIGNMENT


class _Idle(threading.local):
    """Unused scratch memory of the current thread, kept from call to call."""

    def __init__(self) -> None:
        self.buffers: list[_Scratch] = []


_idle = _Idle()
