"""The registry of backends: explicit, ordered and lazy."""

import importlib
import os
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from tileattn.backends.protocol import Backend
from tileattn.call.options import DESCALES, shapes_of
from tileattn.call.prepared import CALLS
from tileattn.call.problem import Problem
from tileattn.errors import BackendUnavailableError, UnsupportedError
from tileattn.messages import must_be
from tileattn.validation import conversion

_BUILT_IN = {
    "numpy": "tileattn.backends.numpy.backend:NumpyBackend",
    "llvm": "tileattn.backends.llvm.backend:LlvmBackend",
    "cupy": "tileattn.backends.cupy.backend:CupyBackend",
}
_FASTER = "llvm"  # takes the arrays of another backend, too, and comes first
_loaded: dict[str, Backend] = {}


def names() -> list[str]:
    """Names of all backends, the built-in ones first."""
    return [*_BUILT_IN, *(name for name in _loaded if name not in _BUILT_IN)]


def get(name: str) -> Backend:
    """Return a backend by name, loading it where it is not loaded yet; it may be unavailable."""
    if name not in _loaded:
        if name not in _BUILT_IN:
            raise ValueError(must_be("backend", f"one of {', '.join(['auto', *names()])}", name))
        module, attribute = _BUILT_IN[name].split(":")
        _loaded[name] = getattr(importlib.import_module(module), attribute)()
    return _loaded[name]


def load(path: str) -> Backend:
    """Import and register a backend, given as ``"module:attribute"``: an instance or its class."""
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ImportError(f"module {module} has no attribute {attribute!r}") from None
    backend: Backend = found() if isinstance(found, type) else found
    register_backend(backend)
    return backend


def check_name(name: Any) -> None:
    """Raise TypeError or ValueError if a call cannot ask for a backend by this name."""
    if not isinstance(name, str):
        raise TypeError(must_be("backend", "a name or 'auto'", name))
    if name != "auto":
        get(name)


def register_backend(backend: Backend) -> None:
    """Make a backend known by its name; a later one of the same name replaces an earlier one.

    Parameters
    ----------
    backend : Backend
        An object with the members of ``tileattn.backends.protocol.Backend``.

    Raises
    ------
    TypeError
        If a member is missing.
    ValueError
        If the name is ``"auto"`` or not a lower-case word.

    Examples
    --------
    >>> import tileattn
    >>> from tileattn.backends.numpy.backend import NumpyBackend
    >>> class Mine(NumpyBackend):
    ...     name = "mine"
    >>> tileattn.register_backend(Mine())
    >>> "mine" in tileattn.available_backends()
    True
    """
    if isinstance(backend, type):
        raise TypeError(f"backend must be an instance; got the class {backend.__name__}")
    if not isinstance(backend, Backend):
        members = [m for m in dir(Backend) if not m.startswith("_")] + ["name"]
        missing = sorted({m for m in members if not hasattr(backend, m)})
        raise TypeError(
            f"backend must be a Backend; {type(backend).__name__} lacks {', '.join(missing)}"
        )
    if not isinstance(backend.name, str) or not backend.name.isidentifier():
        raise ValueError(must_be("backend.name", "an identifier", backend.name))
    if backend.name == "auto" or backend.name != backend.name.lower():
        raise ValueError(must_be("backend.name", "in lower case, and not 'auto'", backend.name))
    _loaded[backend.name] = backend
    CALLS.clear()


def available_backends() -> dict[str, str | None]:
    """List the backends.

    Returns
    -------
    dict of str to (str or None)
        For each name, None where the backend can run here, or the sentence that says why not.

    Examples
    --------
    >>> import tileattn
    >>> tileattn.available_backends()["numpy"] is None
    True
    """
    return {name: get(name).unavailable() for name in names()}


def candidates(name: str, arrays: dict[str, Any]) -> list[Backend]:
    """Find the backends for a call: they own all arrays, and can run here; the preferred one first.

    A name leaves one. ``"auto"`` looks at ``TILEATTN_BACKEND`` and then at the arrays; None entries
    are passed over.
    """
    check_name(name)
    name = asked_for(name)
    given = {key: x for key, x in arrays.items() if x is not None}
    owners = _owners(_preferred() if name == "auto" else [get(name)], given.values())
    if not owners:
        backend = _owner(given) if name == "auto" else get(name)
        for key, x in given.items():
            ensure_owned(backend, key, x)
    able = [backend for backend in owners if backend.unavailable() is None]
    if not able:
        raise BackendUnavailableError(_unavailable(owners[0]))
    return able


def supporting(able: Sequence[Backend], problem: Problem) -> Backend:
    """Choose the first backend that supports a problem."""
    reasons = []
    for backend in able:
        reason = _unsupported(backend, problem)
        if reason is None:
            return backend
        reasons.append(reason)
    others = [n for n in names() if get(n).unavailable() is None and not get(n).why_not(problem)]
    remedy = f"use backend={others[0]!r}" if others else "no registered backend does"
    raise UnsupportedError(f"{reasons[0]}; {remedy}")


def why(name: str, chosen: Backend, problem: Problem, q: Any) -> list[str]:
    """Say who asked for the backend of a call, or why those that are preferred do not run it."""
    asked = asked_for(name)
    if asked != "auto":
        return [f"{'backend' if name == asked else 'TILEATTN_BACKEND'}={asked!r} asks for it"]
    before = takewhile(lambda backend: backend is not chosen, _owners(_preferred(), [q]))
    return [_unavailable(backend) or _unsupported(backend, problem) or "" for backend in before]


def ensure_owned(backend: Backend, key: str, x: Any) -> None:
    """Raise TypeError if an argument is no array of a backend."""
    if not backend.owns(x):
        what = "a number or " if key in DESCALES else ""
        what += _array_of(backend.name) + shapes_of(key)
        raise TypeError(must_be(key, what, x, _remedy(key, x)))


def ensure_one_owner(arrays: dict[str, Any], integers: dict[str, Any]) -> Backend:
    """Find who owns all arrays of a call; raise TypeError if they are of two libraries.

    Integers may also be on the host, whoever owns the arrays.
    """
    backend = _owner(arrays)
    for key, x in arrays.items():
        ensure_owned(backend, key, x)
    for key, x in integers.items():
        if hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic):
            ensure_owned(backend, key, x)
    return backend


def asked_for(name: str) -> str:
    """Look up ``TILEATTN_BACKEND`` where a call leaves the choice; raise ValueError if unknown."""
    chosen = os.environ.get("TILEATTN_BACKEND") if name == "auto" else None
    if chosen and chosen not in (known := ("auto", *names())):
        raise ValueError(f"TILEATTN_BACKEND must be one of {', '.join(known)}; got {chosen!r}")
    return chosen or name


def _preferred() -> list[Backend]:
    """Return all backends in the order in which ``"auto"`` asks them."""
    return [get(name) for name in sorted(names(), key=lambda name: name != _FASTER)]


def _owners(backends: Iterable[Backend], arrays: Iterable[Any]) -> list[Backend]:
    """Return the backends that own all arrays."""
    given = list(arrays)
    return [backend for backend in backends if all(map(backend.owns, given))]


def _unavailable(backend: Backend) -> str | None:
    reason = backend.unavailable()
    return None if reason is None else f"backend {backend.name!r} cannot run here: {reason}"


def _unsupported(backend: Backend, problem: Problem) -> str | None:
    reason = backend.why_not(problem)
    return None if reason is None else f"backend {backend.name!r} does not support this: {reason}"


def _owner(arrays: dict[str, Any]) -> Backend:
    """Return the first backend that owns the first array."""
    key, x = next(iter(arrays.items()))
    for name in names():
        if get(name).owns(x):
            return get(name)
    others = (n for n in names() if n not in _BUILT_IN)
    what = "a NumPy or CuPy array" + "".join(f", or {_array_of(name)}" for name in others)
    raise TypeError(must_be(key, what, x, conversion(key, x)))


def _array_of(name: str) -> str:
    """Describe the arrays of a backend."""
    library = {"numpy": "NumPy", "llvm": "NumPy", "cupy": "CuPy"}.get(name)
    return f"an array of backend {name!r}" if library is None else f"a {library} array"


def _remedy(key: str, x: Any) -> str:
    """Say how to make an array; a number stands for one of each head where heads have numbers."""
    if isinstance(x, int | float) and "(Hq,)" in shapes_of(key):
        return f"numpy.full(Hq, {x!r}) has it for every head"
    return conversion(key, x)
