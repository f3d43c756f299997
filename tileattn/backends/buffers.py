"""Buffers that a caller provides: ``out`` and ``workspace``."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from tileattn.backends.addresses import address_of, byte_bounds
from tileattn.backends.protocol import Backend
from tileattn.backends.registry import ensure_owned
from tileattn.call.parse import check_dtype
from tileattn.errors import UnsupportedError
from tileattn.messages import called
from tileattn.results import Attention


def ensure_writable(name: str, x: Any, inputs: Mapping[str, Any]) -> None:
    """Raise ValueError if an output array is read-only, or overlaps itself or an input.

    Inputs that are no arrays are ignored. If the exact test is too expensive, arrays count as
    overlapping.
    """
    if not getattr(x.flags, "writeable", True):
        raise ValueError(f"{called(name)} must be writable; got a read-only array")
    if _overlaps_itself(x):
        raise ValueError(f"{called(name)} must not overlap itself; some elements share memory")
    at = _address(x)
    lo, hi = byte_bounds(x) if at else (0, 0)
    for other, y in inputs.items():
        # Host and devices share one address space.
        there = _address(y) if at else 0
        if not there:
            continue
        first, past = byte_bounds(y)
        apart = at + hi <= there + first or there + past <= at + lo
        if not apart and _overlap(_placed(x, at), _placed(y, there)):
            raise ValueError(f"{called(name)} must not overlap {called(other)}")


def placed(result: Attention, out: Any | None) -> Attention:
    """Copy the output to ``out``, if given: at once, after all else has succeeded."""
    if out is None:
        return result
    out[...] = result.out
    return Attention(out, result.lse)


def ensure_workspace(backend: Backend, x: Any, inputs: Mapping[str, Any]) -> None:
    """Raise if an array cannot be the workspace of ``backward``; the size is checked later."""
    from tileattn.kernels.cuda.plan.workspace import ALIGNED  # late: other CPU calls lack it

    ensure_owned(backend, "workspace", x)
    check_dtype("workspace", x, (np.dtype(np.uint8),))
    if x.ndim != 1:
        raise ValueError(f"workspace must have one axis; got shape {x.shape}")
    if not x.flags.c_contiguous:
        raise ValueError(f"workspace must be contiguous; got strides {x.strides}")
    ensure_writable("workspace", x, inputs)
    beyond = _address(x) % ALIGNED
    if beyond:
        raise ValueError(
            f"workspace must start at a multiple of {ALIGNED} bytes; it starts {beyond} bytes past "
            f"one (workspace[{ALIGNED - beyond}:] fits)"
        )
    if not getattr(backend.backward, "takes_workspace", False):
        raise UnsupportedError(f"workspace must be None: backend {backend.name!r} takes none")


def _address(x: Any) -> int:
    """Return the address of the first element; 0 if empty, or unknown outside its backend."""
    if not getattr(x, "size", 0):
        return 0
    if isinstance(x, np.ndarray):
        return address_of(x)
    return int(getattr(getattr(x, "data", None), "ptr", 0))


def _placed(x: Any, address: int) -> Any:
    """Return a NumPy array at the same addresses; the overlap test reads no memory."""
    if isinstance(x, np.ndarray):
        return x
    described = {"shape": x.shape, "strides": x.strides, "typestr": f"|V{x.itemsize}"}
    placed = {"data": (address, False), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=described | placed))


def _overlaps_itself(x: Any) -> bool:
    """Return True if elements overlap; False if each stride exceeds the extent of inner axes."""
    reach = x.itemsize
    for step, n in sorted((abs(s), n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if step < reach:
            break
        reach += (n - 1) * step
    else:
        return False
    # Of two overlapping elements, one has the lower index along some axis; without loss of
    # generality that index is 0. The addresses are made up.
    like = np.lib.stride_tricks.as_strided(np.empty(1, f"V{x.itemsize}"), x.shape, x.strides)
    return any(_overlap(*np.split(like, [1], axis)) for axis in range(like.ndim))


def _overlap(a: Any, b: Any) -> bool:
    """Return True if two arrays overlap; True too if the exact test is too expensive."""
    effort: Any = 10_000  # under 5 ms; slices of one packed array take a microsecond
    try:
        return np.shares_memory(a, b, max_work=effort)
    except np.exceptions.TooHardError:
        return True
