"""Load the modules of a kind, pack the parameters of a call and launch it on threads."""

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
from tileattn.call.problem import Problem
from tileattn.dtypes import NAMED, accum_dtype
from tileattn.errors import BackendUnavailableError
from tileattn.expressions.nodes import Node
from tileattn.kernels.llvm.compile import Function, Module, functions
from tileattn.kernels.llvm.params import (
    COUNTER,
    WORDS,
    Block,
    Layout,
    put_numbers,
)
from tileattn.kernels.llvm.sizes import scratch_bytes
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.user_functions import Functions

_END = 1 << 62  # past all tasks
_FAR = 1 << 61  # keys to the end of an open side of the window
_ALIGNMENT = 64  # bytes of a cache line, and of the widest vector
_KEPT = 1 << 24  # bytes; a thread frees larger scratch memory after a call
_MOST_MODULES = 1024  # modules that are kept loaded, of a few kB each

_TASKS, _QUOTA, _COUNTER = WORDS["tasks"], WORDS["quota"], COUNTER // 8


class LoadedModule:
    """The functions of a module, and the scratch memory of a worker in bytes."""

    def __init__(self, module: Module, D: int, Dv: int) -> None:
        dtype, accum = (NAMED[name] for name in (module.dtype, module.accum_dtype))
        self.functions = _functions(module)
        self.scratch_bytes = scratch_bytes(
            *(module.name, module.target, dtype, accum, D, Dv),
            learned=len(module.own.learned),
            paged=module.layout.paged,
            quantised=module.layout.kv_dtype is not None,
        )


def memory_layout(P: Problem) -> Layout:
    """Return the layout of a call, which is compiled without code for options that it lacks."""
    changed = P.changes_scores or P.has_pair_mask or P.has_dropout or P.has_sinks
    kv_dtype = None if P.kv_dtype is None else P.kv_dtype.name
    paged_descales = tuple(sorted(P.token_descales)) if P.is_paged else ()
    return Layout(P.is_packed, P.is_paged, changed, kv_dtype, paged_descales)


@functools.lru_cache(maxsize=_MOST_MODULES)
def load(
    name: str, target: Target, dtype: np.dtype[Any], D: int, Dv: int, layout: Layout,
    score_mod: Node | None, mask_mod: Node | None,
    aux: tuple[tuple[np.dtype[Any], int], ...] = (), learning: bool = False,
) -> LoadedModule:  # fmt: skip
    """Load a module. Calls of one kind share the arguments, and so the module."""
    facts = tuple((x.name, axes) for x, axes in aux)
    own = Functions(score_mod, mask_mod, facts, learning)
    return LoadedModule(
        Module(name, target, dtype.name, accum_dtype(dtype).name, own, layout), D, Dv
    )


class Executable:
    """The functions of a module, and the parameter block of a call.

    Parameters
    ----------
    module : LoadedModule
        Its functions.
    grids : sequence of `tileattn.backends.llvm.tasks.Grid`
        The tasks of each function.
    workspace : sequence of (int, int, int)
        Of each `tileattn.backends.llvm.tasks.Part`: the word of its address, then its numbers.
    own_bytes : int
        Bytes that a worker needs beside its tiles.
    block : tileattn.kernels.llvm.params.Block
        The parameters.
    """

    def __init__(
        self,
        module: LoadedModule,
        grids: Sequence[Sequence[int]],
        workspace: Sequence[Sequence[int]],
        own_bytes: int,
        block: Any,
    ) -> None:
        self._launches = tuple(zip(module.functions, grids, strict=True))
        self._scratch_bytes = module.scratch_bytes + own_bytes
        self._workspace, self._block = workspace, block

    def run(
        self,
        arrays: Any,
        addresses: Sequence[int] = (),
        others: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Run the functions in order.

        Parameters
        ----------
        arrays : object
            The arrays, which are held until the end: threads know only addresses.
        addresses : sequence of int
            Other addresses for the first arrays of the block, of the same layouts.
        others : sequence of (int, int)
            Words of other arrays, and their addresses.
        """
        block: Any = Block.from_buffer_copy(self._block)
        block[: len(addresses)] = addresses
        for word, address in others:
            block[word] = address
        held = [arrays]
        for word, nbytes, uninitialised in self._workspace:
            x = _allocated(nbytes, uninitialised)
            block[word] = address_of(x)
            held.append(x)
        for function, grid in self._launches:
            tasks, threads_at_most, quota = grid
            block[_TASKS], block[_QUOTA], block[_COUNTER] = tasks, quota, 0
            if threads_at_most == 1:
                self._work(function, block, tasks)
            else:
                self._share(function, block, tasks, threads_at_most, held)

    def _share(
        self, function: Function, block: Any, tasks: int, threads_at_most: int, arrays: Any
    ) -> None:
        """Let this and other threads take tasks until none is left.

        No task waits for a task that has not started: tasks that add to dQ first are taken first.
        After an interrupt the other threads may still run, and hold the arrays.
        """

        def work(_: Any = arrays) -> None:
            self._work(function, block, tasks)

        def stop() -> None:
            block[_COUNTER] = _END

        threads.together(work, min(threads.worker_count(), threads_at_most), stop)

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


def sizes_of(P: Problem) -> tuple[int, ...]:
    """Return the first numbers of a block, which are integers."""
    left, right = P.window
    return (
        *(P.B, P.Hq, P.Hkv, P.group, P.Nq, P.Nk, P.D, P.Dv),
        *(_FAR if left is None else min(left, _FAR), _FAR if right is None else min(right, _FAR)),
        P.page or 0,
    )


def scalars_of(
    accum_dtype: np.dtype[Any], scale: float, softcap: float | None, dropout_p: float, seed: int
) -> tuple[float, ...]:
    """Return the numbers of a block that follow from the options that are one number."""
    fraction, exponent = math.frexp(scale)
    cap = 0.0
    if softcap is not None:
        ends = np.finfo(accum_dtype)
        cap = min(max(softcap, float(ends.tiny)), float(ends.max * ends.eps))
    return (
        *(int(dropout_p * 2**32), *divmod(seed, 1 << 32)),
        *(scale, math.ldexp(1.0, exponent - 1), 2 * fraction, cap, 1 / (1 - dropout_p)),
    )


def new_block(
    sizes: Sequence[int],
    scalars: Sequence[float],
    of_pass: Sequence[int],
    others: Mapping[str, int],
) -> Any:
    """Make a parameter block.

    Parameters
    ----------
    sizes, scalars, of_pass : sequence of number
        As from `sizes_of`, from `scalars_of` and from ``Division.fields``.
    others : mapping of str to int
        Other fields, such as addresses of arrays.
    """
    block = Block()
    put_numbers(block, sizes, scalars, of_pass)
    for name, value in others.items():
        block[WORDS[name]] = value
    return block


def _allocated(nbytes: int, uninitialised: int) -> Array:
    """Allocate an array of the workspace, see `tileattn.backends.llvm.tasks.Part`."""
    if not uninitialised:
        return np.zeros(nbytes, np.uint8)
    x = np.empty(nbytes, np.uint8)
    if uninitialised < nbytes:
        x[uninitialised:] = 0
    return x


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
