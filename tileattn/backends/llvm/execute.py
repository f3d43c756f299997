"""Runs the kernels for CPUs: packs their parameters, and lends each thread scratch memory."""

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tileattn.backends import threads
from tileattn.backends.llvm import dot
from tileattn.backends.llvm.arrays import Array
from tileattn.errors import BackendUnavailableError
from tileattn.kernels.llvm.compile import Function, functions
from tileattn.kernels.llvm.params import BIAS_DTYPES, DOT_ARRAYS, of_array, packed
from tileattn.kernels.llvm.target import Target, scratch_bytes
from tileattn.problem import Problem

_SERIAL_WORK = 1 << 22  # multiply-adds up to which starting a thread costs more than it brings
_READ = 3  # multiply-adds that an element of K or V counts as: threads share the bandwidth
_QUOTA = 1 << 31  # multiply-adds, a few hundredths of a second, after which a kernel may be left
_END = 1 << 62  # beyond all tasks
_FAR = 1 << 61  # further than positions may be from one another
_ALIGNMENT = 64


def multiply_adds(P: Problem) -> int:
    """Count the multiply-adds of a forward pass without masks."""
    return P.B * P.Hq * P.Nq * P.Nk * (P.D + P.Dv)


def forward_work(P: Problem, kernel: str = "forward") -> int:
    """Count the multiply-adds of a forward kernel, or what takes as long."""
    reads = P.B * P.Hkv * P.Nk * (P.D + P.Dv) if kernel == "decode" else 0
    return multiply_adds(P) + _READ * reads


def is_parallel(work: int) -> bool:
    """Whether so many multiply-adds are enough work for threads."""
    return work > _SERIAL_WORK


def run(
    name: str,
    target: Target,
    P: Problem,
    arrays: dict[str, Array],
    values: dict[str, int],
    grids: Sequence[tuple[int, int]],
) -> bool:
    """Run the functions of a module one after the other, each with so many tasks and multiply-adds.

    The arrays are held by the caller until all is done; the threads know their addresses alone.
    False if the target does not compute numbers such as these; then no result is written.
    """
    dtypes = P.dtype, P.accum_dtype
    if target.dot:
        arrays = arrays | dot.workspace(P, name)
        blocks = sum(dot.blocks(P, operand) for operand in DOT_ARRAYS if operand in arrays)
        grids = (blocks, multiply_adds(P)), *grids
    needed = scratch_bytes(name, target, *dtypes, P.D, P.Dv)
    fields = values | _numbers(P)
    for key, array in arrays.items():
        fields |= of_array(key, array)
    if "bias" in arrays:
        fields["bias_dtype"] = BIAS_DTYPES.index(arrays["bias"].dtype.name)
    compiled = _functions(name, target, *map(_name_of, dtypes))
    for function, (tasks, work) in zip(compiled, grids, strict=True):
        if tasks:
            share = {"tasks": tasks, "quota": max(1, tasks * _QUOTA // max(1, work))}
            params = np.frombuffer(packed(fields | share), np.uint8)
            count = min(threads.worker_count(), tasks) if is_parallel(work) else 1
            _share(function, params, tasks, count, needed, arrays)
    return not (target.dot and arrays["unusual"][0])


def _share(
    function: Function, params: Array, tasks: int, count: int, needed: int, arrays: Any
) -> None:
    """Let so many threads, of which this is one, take tasks until there are none.

    No thread waits for one that does not run: who adds to dQ first has taken its task first. After
    an interrupt the others may still be at theirs, and keep the arrays.
    """
    counter = np.zeros(1, np.int64)

    def work(_: Any = arrays) -> None:
        with _borrowed_scratch(needed) as scratch:
            while counter[0] < tasks:
                function(params.ctypes.data, counter.ctypes.data, scratch)

    threads.together(work, count, stop=lambda: counter.fill(_END))


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Give the name of a dtype, which NumPy would put together each time."""
    return dtype.name


@functools.cache
def _functions(*key: Any) -> tuple[Function, ...]:
    """Return the functions of a module; compiled where no interrupt leaves LLVM in the middle."""
    return threads.uninterrupted(functools.partial(_compiled, *key))


def _compiled(*key: Any) -> tuple[Function, ...]:
    try:
        return functions(*key)
    except (AttributeError, OSError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"backend 'llvm' cannot run here: LLVM does not compile its kernels ({error}); use "
            "backend='numpy', or TILEATTN_BACKEND=numpy for all calls"
        ) from error


def _numbers(P: Problem) -> dict[str, Any]:
    """Give the parameters that are no arrays."""
    left, right = (_FAR if side is None else min(side, _FAR) for side in P.window)
    names = ("B", "Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv", "scale")
    fields: dict[str, Any] = {name: getattr(P, name) for name in names}
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


class _Idle(threading.local):
    """Scratch memory that no call of the current thread uses now."""

    def __init__(self) -> None:
        self.buffers: list[Array] = []


_idle = _Idle()


@contextmanager
def _borrowed_scratch(size: int) -> Iterator[int]:
    """Lend scratch memory, kept by the thread from call to call; give its address."""
    idle = _idle.buffers
    buffer = idle.pop() if idle else np.empty(0, np.uint8)
    if len(buffer) < size + _ALIGNMENT:
        buffer = np.empty(size + _ALIGNMENT, np.uint8)
    address = buffer.ctypes.data
    yield int(address + -address % _ALIGNMENT)
    idle.append(buffer)
