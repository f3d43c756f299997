"""The cache of validated calls: a call like an earlier one is one look-up."""

import os
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any
from weakref import ref

import numpy as np

from tileattn.algorithm.block_mask import BlockMask
from tileattn.expressions.state import state_of
from tileattn.problem import Operands, Problem, operands_of
from tileattn.results import Attention, Gradients

MOST = 1024  # entries; a program has few shapes, or so many that none comes back

_VARIABLE = os.environ.encodekey("TILEATTN_BACKEND")
_PLAIN = frozenset({bool, int, float, str, type(None)})


class PreparedCall:
    """The calls of one signature: one problem, and arrays of one layout.

    A backend that has a method ``prepare(problem)`` returns a new one of a subclass, and may keep
    there what it has worked out. If it sets ``cached_launch``, that takes q, k, v and out as
    ``tileattn.forward`` does, and runs the whole call without looking at anything again, or returns
    None where it cannot.
    """

    cached_launch: Callable[[Any, Any, Any, Any], Attention | None] | None = None

    # The same in all calls of the signature; None where they are on the device.
    kv_lengths: Any = None
    q_offset: Any = None

    def __init__(self, backend: Any, problem: Problem) -> None:
        self.backend = backend
        self.problem = problem

    def operands(self, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Operands:
        """View the arrays of a call with all four axes."""
        lengths, offset = self.kv_lengths, self.q_offset
        if lengths is None:
            lengths = options["kv_lengths"].astype(np.int64, copy=False)
        if offset is None:
            offset = options.get("q_offset")
            if offset is None:
                offset = lengths - self.problem.Nq
            else:
                offset = offset.astype(np.int64, copy=False)
        return operands_of(q, k, v, lengths, offset, options=options)

    def forward(self, operands: Operands, out: Any | None) -> Attention:
        result: Attention = self.backend.forward(self.problem, operands, out)
        return result

    def backward(
        self,
        operands: Operands,
        dout: Any,
        attention: Attention,
        dlse: Any | None,
        deterministic: bool,
        workspace: Any | None,
    ) -> Gradients:
        more = {} if workspace is None else {"workspace": workspace}
        result: Gradients = self.backend.backward(
            self.problem, operands, dout, attention, dlse, deterministic, **more
        )
        return result


class CallCache(dict[Any, PreparedCall]):
    """Valid calls by signature, emptied when it is full; single steps are safe among threads."""

    def keep(self, key: Any, call: PreparedCall) -> None:
        if len(self) >= MOST:
            self.clear()
        self[key] = call


CALLS = CallCache()
"""The calls of this process; a new backend may change what is valid, and empties it."""


def prepared_call(backend: Any, problem: Problem, operands: Operands) -> PreparedCall:
    """Make the entry of a call that was found valid."""
    prepare = getattr(backend, "prepare", None)
    call: PreparedCall = PreparedCall(backend, problem) if prepare is None else prepare(problem)
    lengths, offset = operands.kv_lengths, operands.q_offset
    call.kv_lengths = lengths if isinstance(lengths, np.ndarray) else None
    call.q_offset = offset if isinstance(offset, np.ndarray) else None
    return call


def _default() -> Any:
    """Look up ``TILEATTN_BACKEND``.

    If it is absent ``os.environ.get`` takes a microsecond, a seventh of a repeated call.
    """
    try:
        return os.environ._data.get(_VARIABLE)  # type: ignore[attr-defined]  # CPython's own
    except AttributeError:
        return os.environ.get("TILEATTN_BACKEND")


def signature(
    arrays: Iterable[Any], backend: Any, options: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Write down all that the validation of a call looks at, and the layout of its arrays.

    Calls of equal signatures are all valid or all invalid, with arrays of the same layout. None for
    arrays on the host, whose values are looked at, and for unusual arguments. Each pass gives as
    many arrays as it takes, absent ones as None.
    """
    if type(backend) is not str:
        return None
    key: list[Any] = [backend, _default() if backend == "auto" else None]
    for x in arrays:
        kind = type(x)
        if isinstance(x, np.ndarray):
            return None
        try:
            key += (kind, x.dtype, x.shape, x.strides)
        except AttributeError:
            if x is not None:
                return None
            key.append(None)
    if not options:
        return tuple(key)
    for name, x in options.items():
        kind = type(x)
        key += (name, kind)
        if kind in _PLAIN or isinstance(x, np.generic):
            key.append(x)
        elif kind is FunctionType:
            key.append(state_of(x))
            if key[-1] is None:
                return None
        elif name == "aux" and (kind is tuple or kind is list):
            of_aux = signature(x, "", {})
            if of_aux is None:
                return None
            key += (len(x), *of_aux)
        elif kind is tuple or kind is list:
            kinds = tuple(map(type, x))
            if not _PLAIN.issuperset(kinds):
                return None
            key += (kinds, *x)
        elif kind is BlockMask:
            key.append(ref(x))
        elif kind is np.ndarray and x.dtype.kind in "iu":
            key += (x.dtype, x.shape, x.tobytes())
        elif kind is np.ndarray or not getattr(x, "shape", None):
            return None  # a value without axes may be looked at, too
        else:
            key += (x.dtype, x.shape, getattr(x, "strides", None))
    return tuple(key)
