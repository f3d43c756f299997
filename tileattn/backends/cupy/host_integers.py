"""Lengths and offsets of a call that the host knows: which parameters they become."""

from collections.abc import Mapping, Sequence
from typing import Any

from tileattn.backends.described import HostIntegers, Offsets, steps
from tileattn.call.problem import Problem
from tileattn.call.sequences import FAR, given_for
from tileattn.kernels.cuda.plan.filler import ENDS, PLACES, Place
from tileattn.kernels.cuda.plan.plan import MAX_CARRIED, WORD


def known_places(options: Mapping[str, Any], on_device: Sequence[str]) -> dict[str, Any] | None:
    """Describe the lengths and offsets that the host knows; None if one is unusual.

    They are `HostIntegers` and `Offsets`, by option. With offsets of packed sequences come the
    lengths, and where the queries are among the keys.
    """
    found: dict[str, Any] = {}
    for name in (*PLACES, *ENDS):
        x = options.get(name)
        if x is not None and name not in on_device:
            found[name] = known = (Offsets if name in ENDS else HostIntegers).of(x)
            if known is None:
                return None
    if found.keys().isdisjoint(ENDS):
        return found
    if on_device or not found.keys().isdisjoint(PLACES):
        return None
    queries, keys = (given_for(name, found) for name in ENDS)
    if queries.count != keys.count:
        return None
    lengths = steps(keys.values)
    offsets = [n - m for n, m in zip(lengths, steps(queries.values), strict=True)]
    own = [HostIntegers(min(x), max(x), len(x), x) for x in (lengths, offsets)]
    return dict(zip((*PLACES, *ENDS), (*own, queries, keys), strict=True))


def checked_places(
    P: Problem, integers: Sequence[str], given: Mapping[str, Any]
) -> list[Place | None] | None:
    """Return lengths and offsets as a `Filler` takes them; None if they need more checks.

    ``integers`` are the options on the device; ``given`` are from `known_places`.
    """
    lengths: Place | None = Place(P.Nk)
    offsets: Place | None = None
    if P.is_packed:
        if not given:
            return [None, None]
        for name, tokens in zip(ENDS, (P.Nq, P.Nk), strict=True):
            x = given[name]
            if x.first != 0 or x.last != tokens or x.low < 0 or x.count * WORD > MAX_CARRIED:
                return None
        return [_place(given[name]) for name in PLACES]
    if "kv_lengths" in given:
        x = given["kv_lengths"]
        if x.low < 0 or x.high > P.Nk:
            return None
        lengths = _place(x)
    elif "kv_lengths" in integers:
        lengths = None
    if "q_offset" in given:
        x = given["q_offset"]
        if x.low < -FAR or x.high > FAR:
            return None
        offsets = _place(x)
    elif lengths is not None and "q_offset" not in integers:
        offsets = Place(lengths.value - P.Nq, lengths.differing)
    if any(x and x.differing * WORD > MAX_CARRIED for x in (lengths, offsets)):
        return None
    return [lengths, offsets]


def _place(x: HostIntegers) -> Place:
    return Place(x.low) if x.low == x.high else Place(x.low, x.count)
