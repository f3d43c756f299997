"""Memory that a caller lends: where a result goes, and what a call may use meanwhile."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from tileattn.backends import ensure_owned
from tileattn.backends.protocol import Backend
from tileattn.errors import UnsupportedError
from tileattn.problem import check_dtype


def ensure_writable(name: str, x: Any, inputs: Mapping[str, Any]) -> None:
    """Raise where an array that is to be written is read-only or shares memory with an input.

    Parameters
    ----------
    name : str
        Argument's name, for the message.
    x : array
        The argument.
    inputs : mapping of str to Any
        The call's other arguments; those that are arrays of the same kind are looked at.

    Raises
    ------
    ValueError
        Where it is read-only, or its elements overlap one another or an input.
    """
    if not getattr(x.flags, "writeable", True):
        raise ValueError(f"{name} is read-only; a writable array is accepted")
    reach = sum((n - 1) * abs(s) for n, s in zip(x.shape, x.strides, strict=True))
    if x.size and reach + x.itemsize < x.size * x.itemsize:
        raise ValueError(f"{name} has elements that overlap; a plain array is accepted")
    shared = _overlap if isinstance(x, np.ndarray) else _overlap_there
    for other, y in inputs.items():
        if type(y) is type(x) and shared(x, y):
            raise ValueError(
                f"{name} overlaps {other}; an array with memory of its own is accepted"
            )


def ensure_workspace(backend: Backend, x: Any, inputs: Mapping[str, Any]) -> None:
    """Raise where ``backward`` cannot take an array as its workspace, whatever its size.

    Parameters
    ----------
    backend : Backend
        Who serves the call.
    x : array
        The argument.
    inputs : mapping of str to Any
        The call's other arguments.

    Raises
    ------
    TypeError
        Where it is no array of the backend, or not of uint8.
    ValueError
        Where its shape, strides or start are not as described, it is read-only, or it overlaps an
        input.
    UnsupportedError
        Where the backend takes none.
    """
    from tileattn.kernels.workspace import ALIGNED  # which nobody else on the CPU needs

    ensure_owned(backend, "workspace", x)
    check_dtype("workspace", x, (np.dtype(np.uint8),))
    if x.ndim != 1:
        raise ValueError(f"workspace has shape {x.shape}; one axis is accepted")
    if not x.flags.c_contiguous:
        raise ValueError(
            f"workspace has strides {x.strides}; bytes that are neighbours are accepted"
        )
    ensure_writable("workspace", x, inputs)
    beyond = _address(x) % ALIGNED if x.size else 0
    if beyond:
        raise ValueError(
            f"workspace starts {beyond} bytes past a multiple of {ALIGNED}; a start at a multiple "
            f"is accepted (workspace[{ALIGNED - beyond}:] has one)"
        )
    if not _takes_workspace(getattr(backend.backward, "__func__", backend.backward)):
        raise UnsupportedError(f"backend {backend.name!r} takes no workspace; leave it out (None)")


@functools.cache
def _takes_workspace(backward: Callable[..., Any]) -> bool:
    try:
        inspect.signature(backward).bind_partial(workspace=None)
    except TypeError:
        return False
    return True


def _address(x: Any) -> int:
    """Address of the first byte; 0 for an array of a library that only its backend knows."""
    if isinstance(x, np.ndarray):
        return x.ctypes.data
    return int(getattr(getattr(x, "data", None), "ptr", 0))


def _overlap_there(a: Any, b: Any) -> bool:
    """Whether two CuPy arrays share memory; most lie in allocations of their own."""
    try:
        one, other = a.data.mem, b.data.mem
        at, there = one.ptr, other.ptr
    except AttributeError:
        return False  # an array of another library, which its backend knows better
    apart = at + one.size <= there or there + other.size <= at
    return not apart and _overlap(_placed(a), _placed(b))


def _placed(x: Any) -> Any:
    """Give a NumPy array of the same addresses on the GPU, for a test that touches no memory."""
    described = {"shape": x.shape, "strides": x.strides, "typestr": f"|V{x.itemsize}"}
    address = {"data": (x.data.ptr, False), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=described | address))


def _overlap(a: Any, b: Any) -> bool:
    """Whether two arrays share memory; arrays too intricate to tell count as sharing."""
    effort: Any = 1000
    try:
        return np.shares_memory(a, b, max_work=effort)
    except np.exceptions.TooHardError:
        return True
