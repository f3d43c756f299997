"""Collective operations: sums in rank order, and checks that all ranks agree."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from tileattn.distributed.arrays import is_on_gpu, library
from tileattn.distributed.comm.failures import wait
from tileattn.distributed.comm.protocol import Array, Communicator

Made = TypeVar("Made")
Facts = dict[str, str]

_FEW = 16  # elements of an array in a message; longer arrays are shown by a digest
_LONG = 200  # characters of other values in a message


def sum_in_order(comm: Communicator, x: Array) -> Array:
    """Sum an array over the ranks in rank order: results are bitwise identical on all ranks."""
    first, *others = gathered(comm, x)
    total = first.copy()
    for other in others:
        total += other
    return total


def gathered(comm: Communicator, x: Array) -> list[Array]:
    """Return the arrays of all ranks, which have one shape, in rank order, on every rank."""
    if not is_on_gpu(x):
        return comm.gather(x)
    x = library(x).ascontiguousarray(x)
    every = [x if n == comm.rank else library(x).empty_like(x) for n in range(comm.size)]
    others = [n for n in range(comm.size) if n != comm.rank]
    with comm.together():
        under_way = [comm.receive(every[n], n, 0) for n in others]
        under_way += [comm.send(x, n, 0) for n in others]
    wait(under_way)
    return every


def on_all(comm: Communicator, step: str, make: Callable[[], Made]) -> list[Made]:
    """Call ``make`` on every rank and return all results; if one rank raises, all raise.

    ``step`` is the name of the call, which must be the same on all ranks.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # any error: the other ranks wait for this one
        failure = error
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    found = comm.gather((step, made, message))
    if failure is not None:
        raise failure
    for rank, (_, _, message) in enumerate(found):
        if message is not None:
            raise RuntimeError(f"rank {rank} has failed: {message}")
    same([{"the call": step} for step, _, _ in found])
    return [x for _, x, _ in found]


def same(found: list[Facts]) -> None:
    """Raise ValueError if the values of a name differ between ranks."""
    for name in dict.fromkeys(name for facts in found for name in facts):
        first = found[0].get(name, "None")
        for rank, facts in enumerate(found):
            other = facts.get(name, "None")
            if other != first:
                raise ValueError(
                    f"{name} must be the same on all ranks; got {other} on rank {rank}, "
                    f"and {first} on rank 0"
                )


def shown(x: Any) -> str:
    """Return a text that is equal for equal values only; long values by a digest."""
    if not hasattr(x, "dtype"):
        text = str(x)
        return text if len(text) < _LONG else f"{text[:_LONG]}... with digest {_digest(text)}"
    if is_on_gpu(x):
        x = x.get()
    if x.size <= _FEW:
        return f"{x.dtype} {x.tolist()}"
    return f"{x.dtype} of shape {x.shape} with digest {_digest(np.ascontiguousarray(x))}"


def _digest(x: Any) -> str:
    data = x.encode() if isinstance(x, str) else x.tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
