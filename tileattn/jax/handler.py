"""The C function that compiled programs call: it runs a Python function on their arrays."""

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
"""Platforms whose programs can call: JAX's name to XLA's name."""

Spec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype."""


@dataclass(frozen=True, eq=False)
class Call:
    """A function of arrays, and the shapes and dtypes of its arguments and results."""

    function: Callable[..., Sequence[Any]]
    arguments: tuple[Spec, ...]
    results: tuple[Spec, ...]


# Compiled programs refer to calls by number. JAX may cache programs on disk for other processes, in
# which these numbers must be invalid: they start at a random number.
_numbers = count(secrets.randbits(62))
_calls: WeakValueDictionary[int, Call] = WeakValueDictionary()
# A program may still run after its last reference is gone.
_latest: deque[Call] = deque(maxlen=1024)

_NAP, _QUIET = 0.01, 2  # at exit: seconds between checks, and checks in a row without a call
_DEADLINE = 30.0  # seconds at exit; a call may hang, for example waiting for a dead rank
_running = set[object]()


def number_of(call: Call) -> int:
    """Give a call a number, which is valid while the call lives."""
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

    Python kills a thread that calls it while the interpreter ends, and XLA's client would then wait
    for that thread forever when it is deleted. A program whose results were dropped cannot be
    waited for. So the CPU client is never deleted, nor is a client whose calls still run after the
    deadline.
    """
    try:
        arrays, devices = jax.live_arrays(platform), jax.local_devices(backend=platform)
    except RuntimeError:  # programs were compiled for devices that this machine lacks
        return
    for x in arrays:
        with suppress(Exception):  # the program has failed, or the array was deleted
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
    """View host memory as an array."""
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
    """Make a handler; it turns every exception into an XLA error."""

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
