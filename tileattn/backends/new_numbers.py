"""Calls on the host with numbers that were not seen before: validated and planned by arithmetic.

The path of a call through validation and planning is compiled once: see
`tileattn.call.straight_line`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tileattn.backends.described import Described, HostIntegers, Lengths, Offsets, steps
from tileattn.call.parse import CallKind, Scalars, at_scalars, constants_of
from tileattn.call.problem import Operands, Problem
from tileattn.call.sequences import FAR, given_for
from tileattn.call.straight_line import Paths, pinned
from tileattn.errors import UnsupportedError

MAX_PATHS = 32  # compiled for one direction of a kind

# Options that bring numbers only: a function whose kind is known brings those it captures.
_OTHERS = frozenset(
    {"causal", "window", "scale", "softcap", "dropout_p", "seed", "score_mod", "mask_mod"}
    | {"invariant"}
)
_PACKED = frozenset({"cu_seqlens_q", "cu_seqlens_k"})
_PLACES = _PACKED | {"kv_lengths", "q_offset"}

_INTEGER, _WORD = np.dtype(np.int64), 8


class NewCall(NamedTuple):
    """A call of a known kind.

    Parameters
    ----------
    kind : CallKind
        Its kind.
    rows : sequence of array
        q, k and v, and in the backward pass dout, out and lse.
    options : Mapping
        Its options.
    scalars : Scalars
        Those that are numbers.
    places : mapping of str to (HostIntegers or Offsets)
        Its lengths and offsets, by option.
    """

    kind: CallKind
    rows: Sequence[Any]
    options: Mapping[str, Any]
    scalars: Scalars
    places: Mapping[str, Any]

    @property
    def packed(self) -> dict[str, Sequence[int]]:
        """Offsets of packed sequences, of q and of k, by option; empty without."""
        places = self.places
        if _PACKED.isdisjoint(places):
            return {}
        return {name: given_for(name, places).values for name in ("cu_seqlens_q", "cu_seqlens_k")}

    @property
    def lengths_and_offsets(self) -> tuple[Sequence[int], Sequence[int]]:
        """Keys of each sequence, and position of its first query."""
        (q, k, *_), places = self.rows, self.places
        queries: Sequence[int]
        lengths: Sequence[int]
        if not places:
            Nk, entries = k.shape[-2], q.shape[0] if q.ndim == 4 else 1
            return [Nk] * entries, [Nk - q.shape[-2]] * entries
        if _PACKED.isdisjoint(places):
            entries = q.shape[0] if q.ndim == 4 else 1
            queries, lengths = [q.shape[-2]] * entries, [k.shape[-2]] * entries
        else:
            queries, lengths = map(steps, self.packed.values())
        lengths = _each(places.get("kv_lengths"), lengths)
        offsets = [n - m for n, m in zip(lengths, queries, strict=True)]
        return lengths, _each(places.get("q_offset"), offsets)

    @property
    def constants(self) -> tuple[int, ...]:
        """Cells of the numbers that functions capture."""
        kind = self.kind
        if kind.score_mod is None and kind.mask_mod is None:
            return ()
        return constants_of(self.options)


class NewNumbers:
    """Runs calls of one kind with numbers that were not seen before."""

    def __init__(self) -> None:
        # By direction: True for the forward pass.
        self._paths = {True: Paths(), False: Paths()}
        self._can_compile = True

    def plan(
        self, P: Problem, x: Operands, lengths: Lengths, others: Sequence[Described]
    ) -> tuple[Sequence[Any], Any] | None:
        """Plan a valid call by arithmetic and comparisons; None if that is not enough.

        Parameters
        ----------
        P : Problem
            Its problem.
        x : Operands
            Its operands; arrays are `Described`, with four axes.
        lengths : Lengths
            Its lengths.
        others : sequence of Described
            dout, out and lse in the backward pass.

        Returns
        -------
        numbers : sequence of number
            What the numbers of the call decide.
        rest : object
            What else `start` needs. Calls on one path share it.
        """
        raise NotImplementedError

    def start(self, call: NewCall, numbers: Sequence[Any], rest: Any) -> Any:
        """Run a call with the results of `plan`; return None if that is not possible."""
        raise NotImplementedError

    def run(
        self,
        kind: CallKind,
        rows: Sequence[Any],
        options: Mapping[str, Any],
        *,
        is_forward: bool,
    ) -> Any:
        """Run a pass; return None if it needs full validation or planning.

        ``rows`` are q, k and v, and in the backward pass dout, out and lse.
        """
        places = _places(options)
        if places is None or len(rows) not in (3, 6):
            return None
        call = NewCall(kind, rows, options, Scalars.of(options), places)
        numbers: list[Any] = []
        for x in rows:
            numbers += x.shape
            numbers += x.strides
        for side in call.scalars.window:
            if side is not None:
                numbers.append(side)
        for place in places.values():
            numbers += [n for n in place[:-1] if n is not None]
        paths = self._paths[is_forward]
        found = paths.find(*numbers)
        if found is not None:
            return self.start(call, found, paths.ends[found[-1]])
        try:
            planned = self._planned(call, numbers)
        except (TypeError, ValueError, UnsupportedError):
            return None  # full validation raises it
        if planned is None:
            return None
        if self._can_compile and len(paths.ends) < MAX_PATHS:

            def decided(*noted: Any) -> Sequence[Any] | None:
                planned = self._planned(call, noted)
                return planned and planned[0]

            given = {f"n{n}": x for n, x in enumerate(numbers)}
            self._can_compile = paths.add(decided, given, planned[1])
        return self.start(call, *planned)

    def _planned(self, call: NewCall, numbers: Sequence[Any]) -> tuple[Sequence[Any], Any] | None:
        """Validate and plan a call with the listed numbers; None if that is not possible."""
        kind, _, options, scalars, places = call
        rest = iter(numbers)
        described = []
        for n, x in enumerate(call.rows):
            shape = tuple([next(rest) for _ in range(x.ndim)])
            if n < 3:  # head dimensions decide about kernels
                shape = *shape[:-1], pinned(shape[-1])
            described.append(Described(shape, tuple([next(rest) for _ in shape]), x.dtype))
        left, right = (side if side is None else next(rest) for side in scalars.window)
        known = {
            name: type(x)(*[n if n is None else next(rest) for n in x[:-1]])
            for name, x in places.items()
        }
        q, k, v = described[:3]
        entries = q.shape[0] if q.ndim == 4 else 1
        integers = {
            name: Described((entries if x.count is None else x.count,), (_WORD,), _INTEGER)
            for name, x in known.items()
        }
        scalars = scalars._replace(window=(left, right))
        P, x = at_scalars(kind, q, k, v, {**options, **integers}, scalars)
        others = [a.reshape((1,) * (4 - P.ndim) + a.shape) for a in described[3:]]
        shape, lengths = (P.B, P.Hq, P.Nq, P.Dv), _lengths(P, known)
        if others and [a.shape for a in others] != [shape, shape, shape[:-1]]:
            return None
        return None if lengths is None else self.plan(P, x, lengths, others)


def _places(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Describe the lengths and offsets of a call; None if it needs full validation."""
    found: dict[str, Any] = {}
    for name, x in options.items():
        if name in _PLACES:
            if x is not None:
                found[name] = known = (Offsets if name in _PACKED else HostIntegers).of(x)
                if known is None:
                    return None
        elif name not in _OTHERS:
            return None
    return None if "kv_lengths" in found and not _PACKED.isdisjoint(found) else found


def _lengths(P: Problem, known: Mapping[str, Any]) -> Lengths | None:
    """Return the lengths of the sequences; None if they are wrong."""
    fewest, most, keys, longest = P.Nq, P.Nq, P.Nk, P.Nk
    if P.is_packed:
        queries, of_keys = (given_for(name, known) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        for x, tokens in ((queries, P.Nq), (of_keys, P.Nk)):
            if x.first != 0 or x.last != tokens or x.low < 0:
                return None
        fewest, most, keys, longest = queries.low, queries.high, of_keys.high, of_keys.high
    if "kv_lengths" in known:
        low, longest, *_ = known["kv_lengths"]
        if low < 0 or longest > P.Nk:
            return None
    if "q_offset" in known:
        low, high, *_ = known["q_offset"]
        if low < -FAR or high > FAR:
            return None
    return Lengths(fewest, most, keys, longest)


def _each(place: HostIntegers | None, otherwise: Sequence[int]) -> Sequence[int]:
    """Return one integer for each sequence."""
    if place is None:
        return otherwise
    return place.values or [place.low] * len(otherwise)
