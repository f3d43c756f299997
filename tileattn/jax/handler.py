"""The function that compiled programs call: it runs one of Python on their arrays."""

import atexit
import ctypes
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from tileattn.jax import cuda
from tileattn.jax.xla_ffi import HANDLER, Frame

PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
"""Where programs can call, by JAX's names; and XLA's."""

Spec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype."""


@dataclass(frozen=True, eq=False)
class Call:
    """A function of arrays, and the shapes and dtypes of what it takes and gives."""

    function: Callable[..., Sequence[Any]]
    arguments: tuple[Spec, ...]
    results: tuple[Spec, ...]


# Compiled programs know calls by numbers. JAX may keep programs for other processes, in which these
# numbers must mean nothing.
_numbers = count(secrets.randbits(62))
_calls: WeakValueDictionary[int, Call] = WeakValueDictionary()
# A program may still run after its last reference is gone.
_latest: deque[Call] = deque(maxlen=1024)

_NAP, _QUIET = 0.01, 2  # at exit: seconds between two looks, and looks that find no call running
_DEADLINE = 30.0  # seconds: a call that hangs, as one that waits for a dead rank, never ends
_running = set[object]()


def number_of(call: Call) -> int:
    """Return a number for a call, which stays valid while the call lives."""
    number = next(_numbers)
    _calls[number] = call
    _latest.append(call)
    return number


@cache
def target(platform: str) -> str:
    """Register the handler for a platform; return its name."""
    name, run = "tileattn_call", _HANDLERS[platform]
    jax.ffi.register_ffi_target(
        name, jax.ffi.pycapsule(run), platform=PLATFORMS[platform], api_version=1
    )
    atexit.register(_finish, platform)  # so that it runs before JAX clears its clients
    return name


def _finish(platform: str) -> None:
    """Wait for the programs of a platform before the interpreter ends.

    A thread of XLA's that calls Python while the interpreter ends is ended by Python. XLA's client
    would wait for this thread for good as it is deleted. Programs whose results nobody has cannot
    be waited for, so the client of the CPU is never deleted, and no client whose calls still run
    after a deadline.
    """
    try:
        arrays, devices = jax.live_arrays(platform), jax.local_devices(backend=platform)
    except RuntimeError:  # programs were compiled for devices that are not here
        return
    for x in arrays:
        with suppress(Exception):  # of a program that has failed, or an array that is deleted
            x.block_until_ready()
    quiet, end = 0, time.monotonic() + _DEADLINE
    while quiet < _QUIET and time.monotonic() < end:
        time.sleep(_NAP)
        quiet = 0 if _running else quiet + 1
    if platform == "cpu" or _running:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(devices[0].client))


def _on_host(call: Call, frame: Frame) -> None:
    """Run a call on NumPy arrays."""
    arguments = map(_host_array, frame.arguments, call.arguments)
    results = map(_host_array, frame.results, call.results)
    for result, found in zip(results, call.function(*arguments), strict=True):
        np.copyto(result, found)


def _host_array(address: int, spec: Spec) -> Any:
    """View memory of the host as an array."""
    shape, dtype = spec
    if 0 in shape:
        return np.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory: Any = (ctypes.c_byte * nbytes).from_address(address)
    return np.ndarray(shape, dtype, memory)


def _on_cuda(call: Call, frame: Frame) -> None:
    """Run a call on CuPy arrays."""
    with cuda.Memory(frame) as memory:
        arguments = map(memory.array, frame.arguments, call.arguments)
        results = [*map(memory.array, frame.results, call.results)]
        memory.offer(results)
        found = call.function(*arguments)
        memory.place(found, results)


def _handler(run: Callable[[Call, Frame], None]) -> Any:
    """Make a handler; nothing may leave it but an error of XLA's."""

    def handle(pointer: Any) -> int | None:
        frame, call = Frame(pointer.contents), object()
        _running.add(call)
        try:
            if not frame.answers_metadata():
                run(_calls[frame.handle], frame)
        except BaseException as error:
            return frame.error(error)
        finally:
            _running.discard(call)
        return None

    return HANDLER(handle)


_HANDLERS = {"cpu": _handler(_on_host), "cuda": _handler(_on_cuda)}
