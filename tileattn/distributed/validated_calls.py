"""Cache of calls already validated across ranks; a call with the same signature skips the check.

Only ranks with GPUs use it: to compare arguments, the host waits for its GPU and for the other
ranks. On a CPU ranks wait for one another anyway, so every call is validated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.options import OPTIONS, ROWS
from tileattn.call.parse import four_axes
from tileattn.distributed.arrays import is_on_gpu
from tileattn.distributed.call import SHARED_ARRAYS, Call
from tileattn.distributed.comm.failures import CheckedComm
from tileattn.distributed.schedules.passes import Passes

_CAPACITY = 256  # calls


class ValidatedCall(NamedTuple):
    """A call that all ranks have validated, and both passes of its schedule.

    In the cache the call has no arrays.
    """

    call: Call
    passes: Passes


def signature_of(
    comm: CheckedComm, arrays: Sequence[Any], others: Any, options: Mapping[str, Any]
) -> Any:
    """Return a hashable signature: shapes of arrays, and values of options on the host.

    None if the options are not hashable, or if the communicator keeps no cache.
    """
    if comm.validated is None:
        return None
    shapes = [(getattr(x, "shape", x), str(getattr(x, "dtype", type(x)))) for x in arrays]
    signature = _frozen((shapes, others, tuple(sorted(options.items()))))
    try:
        hash(signature)
    except TypeError:
        return None
    return signature


def recall(comm: CheckedComm, signature: Any) -> ValidatedCall | None:
    """Return the validated call with a signature, if there is one."""
    found: ValidatedCall | None = (comm.validated or {}).get(signature)
    return found


def remember(comm: CheckedComm, signature: Any, known: ValidatedCall) -> None:
    """Add a call, without its arrays, to the cache; drop the oldest call if the cache is full."""
    validated = comm.validated
    if validated is None or signature is None:
        return
    empty = dict.fromkeys((*ROWS, *SHARED_ARRAYS))
    operands = known.call.operands._replace(**empty, aux=())
    validated[signature] = known._replace(call=replace(known.call, operands=operands, options={}))
    if len(validated) > _CAPACITY:
        del validated[next(iter(validated))]


def with_arrays(call: Call, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Call:
    """Return a validated call with the arrays of a new one."""
    arrays = {"q": four_axes(q), "k": four_axes(k), "v": four_axes(v)}
    for name in SHARED_ARRAYS:
        x = options.get(name)
        if x is not None:
            arrays[name] = x[(np.newaxis,) * (len(OPTIONS[name].axes) - x.ndim)]
    return replace(call, operands=call.operands._replace(**arrays), options=options)


def _frozen(x: Any) -> Any:
    """Return a value that compares and hashes like an argument; arrays on a GPU by their shape."""
    if is_on_gpu(x):
        return "array", x.shape, x.dtype.name
    if isinstance(x, np.ndarray):
        return "values", x.shape, x.dtype.name, x.tobytes()
    if isinstance(x, tuple | list):
        return tuple(map(_frozen, x))
    return x if x is None or isinstance(x, str) else (type(x), x)
