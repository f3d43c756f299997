"""The cache of validated calls: one look-up for a call like an earlier one."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol
from weakref import ref

import numpy as np

from tileattn.call.block_mask import BlockMask
from tileattn.call.descale import DESCALE_AXES, holds_descales
from tileattn.call.options import DESCALES, Options
from tileattn.call.parse import CallKind, operands_of
from tileattn.call.problem import Operands, Problem
from tileattn.call.sequences import Places, given_for
from tileattn.expressions.parameters import Expression
from tileattn.lru import Lru
from tileattn.results import Attention, Gradients

# Calls of one signature before it gets a prepared call of its own, which takes as long as about ten
# first runs and makes later ones four times shorter. Few, because a program that repeats a call
# mostly repeats it often.
SEEN_OFTEN = 3
MAX_CALLS = 1536  # entries of the cache; a loop over 1,024 signatures finds all of them

_MAX_VALUES = 1 << 12  # lengths or offsets in a signature, which the cache keeps
_MAX_AXES = 4  # integers of a window or an origin: there the place of each None counts
_PLAIN = frozenset({bool, int, float, str, type(None)})
_VALUES = _PLAIN | {Expression}
_FLAGS = frozenset({bool, str, type(None)})
_layout_of = attrgetter("__class__", "dtype", "shape", "strides")
_kind_of = attrgetter("__class__", "dtype", "ndim")

# ``os.environ.get`` takes a microsecond for an absent variable, a seventh of a repeated call.
# CPython's underlying dictionary takes a tenth of that.
_environment = getattr(os.environ, "_data", None)
default_backend: Callable[[], Any] = (
    partial(os.environ.get, "TILEATTN_BACKEND")
    if _environment is None
    else partial(_environment.get, os.environ.encodekey("TILEATTN_BACKEND"))
)
"""Look up ``TILEATTN_BACKEND``."""


class AddressPass(Protocol):
    """A forward or backward pass that can run on the addresses of arrays."""

    inputs: Sequence[str]  # names of arrays: ``launch`` takes their addresses, then the results'
    nbytes: int  # size of the workspace

    def launch(self, addresses: Sequence[int], workspace: int, device: int, stream: Any) -> bool:
        """Start the pass on a stream; return False if no earlier call was like this one."""


class DeviceMemory(Protocol):
    """Where a library of arrays computes: its current device, and its memory and stream there."""

    in_bytes: bool  # True if `numbers` has strides in bytes; else they count elements

    def device(self) -> int:
        """Return the number of the device."""

    def numbers(self, device: int, arrays: Sequence[Any]) -> list[int] | None:
        """List sizes, strides and address of each array; None if one is on another device."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, int]:
        """Return an uninitialised contiguous array, and its address."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, int]:
        """Return a contiguous array of zeros, and its address."""

    def allocate(self, nbytes: int) -> Any:
        """Return memory with the address ``ptr``, which is freed in stream order."""

    def stream(self) -> Any:
        """Return the current stream, as the library's, with the handle ``ptr``."""


class PreparedCall:
    """Calls of one signature: one problem, and arrays of one layout.

    A backend with a method ``prepare(problem)`` returns an instance of a subclass, which may keep
    results of planning. Functions in ``cached`` run repeated calls without validation: the forward
    pass under None, the backward pass for all gradients under ``deterministic``. They take the rows
    (q, k, v, and in backward dout, out, lse, and dlse if given), the options and ``out``. They
    return None if they cannot run the call.
    """

    # The integer arrays of the signature; None for arrays on a device, which each call passes.
    places = Places(None, None, None, None)
    on_device: tuple[str, ...] = ()
    descales: tuple[str, ...] = ()  # names of the descales that are arrays, not numbers

    def __init__(self, backend: Any, problem: Problem) -> None:
        self.backend = backend
        self.problem = problem
        self.cached: dict[bool | None, Callable[[Sequence[Any], Options, Any], Any]] = {}

    def operands(self, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Operands:
        """View the arrays of a call with all four axes."""
        places = self.places
        if self.on_device:
            brought = {name: given_for(name, options) for name in self.on_device}
            places = places.with_integers(**brought)
        return operands_of(q, k, v, places, options)

    def remember(self, places: Places, descales: Iterable[str] = ()) -> None:
        """Keep the integer arrays that are part of the signature, and the names of descales."""
        self.descales = tuple(descales)
        integers = places.integers.items()
        self.on_device = tuple(name for name, x in integers if not isinstance(x, np.ndarray))
        self.places = places.with_integers(**dict.fromkeys(self.on_device))

    def at(self, problem: Problem) -> "PreparedCall":
        """Return the prepared call of another problem of the same kind.

        A subclass may share with it whatever does not depend on the numbers of a problem.
        """
        return new_call(self.backend, problem)

    def first(
        self,
        _kind: CallKind,
        _rows: Sequence[Any],
        _options: Mapping[str, Any],
        _deterministic: bool | None,
        _memory: DeviceMemory | None = None,
        _gradients: tuple[str, ...] | None = None,
        /,
    ) -> Any:
        """Run a pass of a call whose numbers were not seen before, by arithmetic alone.

        ``rows`` are q, k and v, and in the backward pass dout, out and lse; ``deterministic`` is
        None for the forward pass. Results are in ``memory``, or in memory of the backend's library.
        The backward pass also computes ``gradients`` of options, by name; None stands for all.
        Return None if `at_numbers` and a plan are needed. The instance is the call that others of
        the kind are made like.
        """
        return None

    def forward(self, operands: Operands, out: Any | None) -> Attention:
        result: Attention = self.backend.forward(self.problem, operands, out)
        return result

    def address_pass(
        self, _deterministic: bool | None, _results: Sequence[str]
    ) -> AddressPass | None:
        """Return the pass for these results, if it has run and can run on addresses.

        ``deterministic`` is None for the forward pass.
        """
        return None

    def host_pass(self) -> Callable[[Sequence[int], Any], Attention | None] | None:
        """Return the forward pass on addresses, if it has run and reads only q, k and v.

        It takes the addresses of q, k and v on the host, and the objects that keep their memory
        alive. It returns None if it cannot run at these addresses.
        """
        return None

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


CALLS = Lru(MAX_CALLS)
"""The calls of this process by `signature`, and their kinds by `kind_signature`.

Registering a backend clears it: other calls may become valid.
"""


class KnownKind(NamedTuple):
    """What calls of one kind need not look up again.

    Parameters
    ----------
    able : sequence of Backend
        The backends that own the arrays and can run here, the preferred one first.
    kind : CallKind
        What validation has found.
    call : PreparedCall or None
        A call of the kind that does not run: others are made like it. None before the first one.
    """

    able: Sequence[Any]
    kind: CallKind
    call: PreparedCall | None = None


class SeenCall:
    """A call that has run by `PreparedCall.first`, and how often."""

    __slots__ = ("count", "known")

    def __init__(self, known: KnownKind) -> None:
        self.known, self.count = known, 1


def new_call(backend: Any, problem: Problem) -> PreparedCall:
    """Make the prepared call of a backend."""
    prepare = getattr(backend, "prepare", None)
    call: PreparedCall = PreparedCall(backend, problem) if prepare is None else prepare(problem)
    return call


def signature(
    arrays: Iterable[Any], backend: Any, options: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Return a key of everything that validation reads, and of the layout of the arrays.

    Calls with equal signatures are all valid or all invalid. None for unusual arguments.
    """
    if type(backend) is not str:
        return None
    default = default_backend() if backend == "auto" else None
    try:
        key: list[Any] = [backend, default, *map(_layout_of, arrays)]
        for name, x in options.items():
            key += (name, type(x))
            if not (_append_descale if name in DESCALES else _append)(key, x):
                return None
    except AttributeError:
        return None  # something is not an array
    return tuple(key)


def kind_signature(
    arrays: Iterable[Any], backend: Any, options: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Return a key of what `kind_of_call` reads and what decides about backends; None if unusual.

    It has no sizes, strides, numbers or integers: calls with equal keys differ only in these.
    """
    if type(backend) is not str:
        return None
    default = default_backend() if backend == "auto" else None
    try:
        arrays = tuple(map(_kind_of, arrays))
    except AttributeError:
        return None  # something is not an array
    of_options = kind_of_options(options)
    return None if of_options is None else ("kind", backend, default, *arrays, *of_options)


def kind_of_options(options: Mapping[str, Any]) -> list[Any] | None:
    """Return the part of `kind_signature` that describes the options."""
    key: list[Any] = []
    try:
        for name, x in options.items():
            kind = type(x)
            key += (name, kind)
            if kind in _PLAIN:
                # An option of zero is not in use.
                key.append(x if kind in _FLAGS else x != 0)
            elif kind is Expression:
                key.append(x.node)
            elif kind is tuple or kind is list:
                kinds = tuple(map(type, x))
                plain = _PLAIN.issuperset(kinds)
                key += (plain, kinds if len(x) <= _MAX_AXES or not plain else frozenset(kinds))
                if not plain:
                    key += map(_kind_of, x)
            elif kind is not BlockMask:
                key.append(_kind_of(x))
                if not x.ndim and name not in DESCALES:
                    if not isinstance(x, np.ndarray | np.generic):
                        return None  # validation may read the value of such a device array
                    key.append(bool(x))
    except AttributeError:
        return None  # something is not an array
    return key


def _append(key: list[Any], x: Any) -> bool:
    """Add an option to a signature; return False for too many or unusual values."""
    kind = type(x)
    if kind in _VALUES or (isinstance(x, np.generic) and not isinstance(x, np.void)):
        key.append(x)
    elif kind is tuple or kind is list:
        kinds = tuple(map(type, x))
        key.append(kinds)
        if _PLAIN.issuperset(kinds):
            key += x
            return len(x) <= _MAX_VALUES
        # Arrays of aux; validation may read the values of NumPy arrays.
        return all(not isinstance(y, np.ndarray) and _append(key, y) for y in x)
    elif kind is BlockMask:
        key.append(ref(x))
    elif isinstance(x, np.ndarray):
        # Validation reads the values of integers and of arrays without axes.
        values = x.dtype.kind in "iu" or not x.shape
        if values and x.size > _MAX_VALUES:
            return False
        key += (x.dtype, x.shape, x.tobytes() if values else x.strides)
    elif x.shape:
        key += (x.dtype, x.shape, getattr(x, "strides", None))
    else:
        return False  # validation may read the value of a device array without axes
    return True


def _append_descale(key: list[Any], x: Any) -> bool:
    """Add a descale to a signature: of arrays on the host, that their values are valid."""
    if isinstance(x, np.ndarray) and x.shape:
        key += (x.dtype, x.shape, x.strides, x.ndim > DESCALE_AXES or holds_descales(x))
        return True
    if type(x) in _PLAIN or isinstance(x, np.ndarray | np.generic):
        return _append(key, x)
    key += (x.dtype, x.shape, getattr(x, "strides", None))
    return True
