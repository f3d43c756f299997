"""Calls that ranks with a GPU have compared: another of the same kind is not compared again.

To compare arguments the host waits for its GPU and for the other ranks. On a CPU it waits for them
anyway, and there calls are compared each time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.parse import four_axes
from tileattn.distributed.arrays import is_on_gpu
from tileattn.distributed.call import Call
from tileattn.distributed.comm.failures import CheckedComm
from tileattn.distributed.schedules.passes import Passes

_MOST = 256  # kinds of calls


class Known(NamedTuple):
    """What ranks have agreed on.

    Parameters
    ----------
    call : Call
        Its arrays are those of an earlier call, or None.
    passes : Passes
        Those of the schedule.
    names : frozenset of str
        Which gradients are asked for.
    """

    call: Call
    passes: Passes
    names: frozenset[str] = frozenset()


def kind_of(
    comm: CheckedComm, arrays: Sequence[Any], others: Any, options: Mapping[str, Any]
) -> Any:
    """Name the kind of a call: shapes of arrays, and values of options that are on the host.

    None where there is no name, or each call is compared.
    """
    if comm.agreed is None:
        return None
    shapes = [(getattr(x, "shape", x), str(getattr(x, "dtype", type(x)))) for x in arrays]
    kind = _frozen((shapes, others, tuple(sorted(options.items()))))
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def recall(comm: CheckedComm, kind: Any) -> Known | None:
    """Find a call of this kind that the ranks have compared."""
    found: Known | None = (comm.agreed or {}).get(kind)
    return found


def remember(comm: CheckedComm, kind: Any, known: Known) -> None:
    """Remember a call, without its arrays; where there are many, forget the oldest."""
    agreed = comm.agreed
    if agreed is None or kind is None:
        return
    x = known.call.operands
    empty = dict.fromkeys(("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks"))
    agreed[kind] = known._replace(
        call=replace(known.call, operands=x._replace(**empty, aux=()), options={})
    )
    if len(agreed) > _MOST:
        del agreed[next(iter(agreed))]


def with_arrays(call: Call, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Call:
    """Give a remembered call the arrays of this one."""
    arrays = {"q": four_axes(q), "k": four_axes(k), "v": four_axes(v)}
    for name in ("bias", "mask"):
        if options.get(name) is not None:
            arrays[name] = four_axes(options[name])
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        arrays["alibi_slopes"] = slopes if slopes.ndim == 2 else slopes[None]
    arrays["sinks"] = options.get("sinks")
    return replace(call, operands=call.operands._replace(**arrays), options=options)


def _frozen(x: Any) -> Any:
    """Make an argument that can be compared and hashed."""
    if is_on_gpu(x):
        return "array", x.shape, x.dtype.name
    if isinstance(x, np.ndarray):
        return "values", x.shape, x.dtype.name, x.tobytes()
    if isinstance(x, tuple | list):
        return tuple(map(_frozen, x))
    return x if x is None or isinstance(x, str) else (type(x), x)
