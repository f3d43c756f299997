"""Buffers that a caller provides: where a result goes, and a workspace."""

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
    """Raise ValueError if an array that is to be written is read-only or shares memory.

    Its elements may overlap neither one another nor an input; those of ``inputs`` that are no
    arrays are passed over. Arrays too intricate to tell count as overlapping.
    """
    if not getattr(x.flags, "writeable", True):
        raise ValueError(f"{called(name)} is read-only; a writable array is accepted")
    if _overlaps_itself(x):
        raise ValueError(f"{called(name)} has elements that overlap; a plain array is accepted")
    for other, y in inputs.items():
        if _share(x, y):
            raise ValueError(
                f"{called(name)} overlaps {called(other)}; an array with memory of its own is "
                "accepted"
            )


def placed(result: Attention, out: Any | None) -> Attention:
    """Write the output to ``out``, if there is one: in one go, after all else has succeeded."""
    if out is None:
        return result
    out[...] = result.out
    return Attention(out, result.lse)


def ensure_workspace(backend: Backend, x: Any, inputs: Mapping[str, Any]) -> None:
    """Raise if ``backward`` cannot take an array as its workspace, whatever its size."""
    from tileattn.kernels.cuda.plan.workspace import ALIGNED  # which nobody else on the CPU needs

    ensure_owned(backend, "workspace", x)
    check_dtype("workspace", x, (np.dtype(np.uint8),))
    if x.ndim != 1:
        raise ValueError(f"workspace has shape {x.shape}; one axis is accepted")
    if not x.flags.c_contiguous:
        raise ValueError(
            f"workspace has strides {x.strides}; bytes that are neighbours are accepted"
        )
    ensure_writable("workspace", x, inputs)
    beyond = _address(x) % ALIGNED
    if beyond:
        raise ValueError(
            f"workspace starts {beyond} bytes past a multiple of {ALIGNED}; a start at a multiple "
            f"is accepted (workspace[{ALIGNED - beyond}:] has one)"
        )
    if not getattr(backend.backward, "takes_workspace", False):
        raise UnsupportedError(f"backend {backend.name!r} takes no workspace; leave it out (None)")


def _address(x: Any) -> int:
    """Address of the first element; 0 where there is none, or only its own backend finds it."""
    if not getattr(x, "size", 0):
        return 0
    if isinstance(x, np.ndarray):
        return address_of(x)
    return int(getattr(getattr(x, "data", None), "ptr", 0))


def _share(x: Any, y: Any) -> bool:
    """Whether two arguments share memory; on a machine, host and devices have one address space."""
    at, there = _address(x), _address(y)
    if not at or not there:
        return False
    (lo, hi), (first, past) = byte_bounds(x), byte_bounds(y)
    apart = at + hi <= there + first or there + past <= at + lo
    return not apart and _overlap(_placed(x, at), _placed(y, there))


def _placed(x: Any, address: int) -> Any:
    """Give a NumPy array of the same addresses, for a test that touches no memory."""
    if isinstance(x, np.ndarray):
        return x
    described = {"shape": x.shape, "strides": x.strides, "typestr": f"|V{x.itemsize}"}
    placed = {"data": (address, False), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=described | placed))


def _overlaps_itself(x: Any) -> bool:
    """Whether elements of an array share memory; no, where each axis steps over those within it."""
    reach = x.itemsize
    for step, n in sorted((abs(s), n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if step < reach:
            break
        reach += (n - 1) * step
    else:
        return False
    # Of two elements that overlap, one has the lower index along some axis: 0 without loss of
    # generality. The addresses are made up.
    like = np.lib.stride_tricks.as_strided(np.empty(1, f"V{x.itemsize}"), x.shape, x.strides)
    return any(_overlap(*np.split(like, [1], axis)) for axis in range(like.ndim))


def _overlap(a: Any, b: Any) -> bool:
    """Whether two arrays share memory; arrays too intricate to tell count as sharing."""
    effort: Any = 10_000  # under 5 ms; slices of one packed array take a microsecond
    try:
        return np.shares_memory(a, b, max_work=effort)
    except np.exceptions.TooHardError:
        return True
