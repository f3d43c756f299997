"""Lengths and offsets of a call that the host knows: which parameters they become."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.problem import Problem
from tileattn.call.sequences import FAR
from tileattn.kernels.cuda.plan.filler import ENDS, PLACES, Place
from tileattn.kernels.cuda.plan.plan import MAX_CARRIED, WORD


class HostIntegers(NamedTuple):
    """An option that the host knows: one integer, or one for each sequence."""

    low: Any
    high: Any
    count: Any  # of the sequences; None for one integer
    values: Sequence[int] = ()

    @classmethod
    def of(cls, x: Any) -> "HostIntegers | None":
        """Describe an option; None if it is unusual, or wrong."""
        if type(x) is np.ndarray and x.ndim == 1 and x.dtype.kind == "i":
            x = x.tolist()
        if type(x) is int:
            return cls(x, x, None)
        plain = (type(x) is list or type(x) is tuple) and x and {*map(type, x)} == {int}
        return cls(min(x), max(x), len(x), x) if plain else None


def packed_places(ends: Mapping[str, HostIntegers]) -> dict[str, HostIntegers] | None:
    """Add the lengths of packed sequences, and where their queries are; None if these are wrong."""
    given = [x for x in (ends.get(name) for name in ENDS) if x is not None]
    queries, keys = given[0], given[-1]  # one array may hold for both
    if queries.count != keys.count or queries.count < 2:
        return None
    if any([*x.values] != sorted(x.values) for x in given):
        return None
    lengths, counts = ([b - a for a, b in pairwise(x.values)] for x in (keys, queries))
    offsets = [n - m for n, m in zip(lengths, counts, strict=True)]
    own = [HostIntegers(min(x), max(x), len(x), x) for x in (lengths, offsets)]
    return dict(zip((*PLACES, *ENDS), (*own, queries, keys), strict=True))


def checked_places(
    P: Problem, integers: Sequence[str], given: Mapping[str, HostIntegers]
) -> list[Place | None] | None:
    """Return lengths and offsets as a `Filler` takes them; None if they need more checks."""
    lengths: Place | None = Place(P.Nk)
    offsets: Place | None = None
    if P.is_packed:
        if not given:
            return [None, None]
        for name, tokens in zip(ENDS, (P.Nq, P.Nk), strict=True):
            low, high, count, _ = given[name]
            if low != 0 or high != tokens or count * WORD > MAX_CARRIED:
                return None
        return [_place(*given[name][:3]) for name in PLACES]
    if "kv_lengths" in given:
        low, high, count, _ = given["kv_lengths"]
        if low < 0 or high > P.Nk:
            return None
        lengths = _place(low, high, count)
    elif "kv_lengths" in integers:
        lengths = None
    if "q_offset" in given:
        low, high, count, _ = given["q_offset"]
        if low < -FAR or high > FAR:
            return None
        offsets = _place(low, high, count)
    elif lengths is not None and "q_offset" not in integers:
        offsets = Place(lengths.value - P.Nq, lengths.differing)
    if any(x and x.differing * WORD > MAX_CARRIED for x in (lengths, offsets)):
        return None
    return [lengths, offsets]


def _place(low: Any, high: Any, count: Any) -> Place:
    return Place(low) if low == high else Place(low, count)
