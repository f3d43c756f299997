"""Look a call up among earlier ones; validate it, and choose its backend, as far as it is new."""

from collections.abc import Iterable
from typing import Any

from tileattn.backends import registry
from tileattn.call.descale import descale_arrays
from tileattn.call.options import Options
from tileattn.call.parse import (
    arrays_of,
    at_numbers,
    check_array,
    device_integers,
    kind_of_call,
)
from tileattn.call.prepared import (
    CALLS,
    SEEN_OFTEN,
    KnownKind,
    PreparedCall,
    SeenCall,
    kind_signature,
    new_call,
    signature,
)
from tileattn.call.problem import Operands
from tileattn.call.sequences import Places


def first_run(
    seen: SeenCall | None,
    key: Any,
    rows: tuple[Any, ...],
    backend: str,
    options: Options,
    deterministic: bool | None,
    gradients: Iterable[str] | None = None,
) -> Any:
    """Run a call that was made few times or never, if its kind is known and arithmetic is enough.

    The backward pass computes the ``gradients`` of q, k, v and these; None stands for all. Return
    None if it must be validated and planned.
    """
    if seen is None:
        known: KnownKind | None = CALLS.get(kind_signature(rows, backend, options))
        if known is None:
            return None
    elif seen.count < SEEN_OFTEN:
        known = seen.known
        seen.count += 1
    else:
        return None
    call: PreparedCall | None = known.call
    if call is None or call.backend is not known.able[0]:
        return None  # the preferred backend may support these numbers
    asked = None if gradients is None else tuple(gradients)
    result = call.first(known.kind, rows, options, deterministic, None, asked)
    if result is not None and seen is None:
        CALLS.keep(key, SeenCall(known))
    return result


def validated(
    valid: PreparedCall | SeenCall | None,
    q: Any,
    k: Any,
    v: Any,
    backend: str,
    options: Options,
    extra: dict[str, Any],
) -> tuple[PreparedCall, Operands]:
    """Validate a call and choose its backend, where no call like it is known to be valid."""
    if isinstance(valid, PreparedCall):
        return valid, valid.operands(q, k, v, options)
    rows = (q, k, v, *extra.values())
    key = kind_signature(rows, backend, options)
    known: KnownKind = CALLS.get(key) or _known_kind(q, k, v, backend, options, extra)
    problem, operands = at_numbers(known.kind, q, k, v, options)
    chosen = registry.supporting(known.able, problem)
    for name, x in extra.items():
        check_array(name, x, problem.shape_of(name), problem.dtype_of(name))
    like = known.call
    if like is None or like.backend is not chosen:
        like = new_call(chosen, problem)
        CALLS.keep(key, known._replace(call=like))
    call = like.at(problem)
    call.remember(Places.of(operands), descale_arrays(options))
    CALLS.keep(signature(rows, backend, options), call)
    return call, operands


def _known_kind(
    q: Any, k: Any, v: Any, backend: str, options: Options, extra: dict[str, Any]
) -> KnownKind:
    """Validate what calls of one kind have in common, and find the backends that can run them."""
    arrays = {"q": q, "k": k, "v": v, **extra}
    arrays |= arrays_of(options)
    able = registry.candidates(backend, arrays)
    for name, x in device_integers(options).items():
        registry.ensure_owned(able[0], name, x)
    return KnownKind(able, kind_of_call(q, k, v, options))
