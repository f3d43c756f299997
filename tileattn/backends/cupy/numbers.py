"""The numbers of a call: sizes, strides, addresses, scalars, and lengths that the host knows.

`Numbers` lists them, and reads a call from such a list. So the path of a call through validation
and planning can be compiled: see `tileattn.call.straight_line`.
"""

from array import array
from collections.abc import Callable, Container, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from operator import itemgetter, or_
from typing import Any, NamedTuple

import numpy as np

from tileattn.backends.cupy.host_integers import checked_places, known_places
from tileattn.backends.described import Described
from tileattn.call.options import INTEGERS, options_with
from tileattn.call.parse import CallKind, Scalars, at_scalars
from tileattn.call.prepared import DeviceMemory
from tileattn.call.problem import ARRAY_OPTIONS, Problem
from tileattn.call.sequences import given_for
from tileattn.call.straight_line import pinned
from tileattn.kernels.cuda.plan.filler import ENDS, PAIRS, Place
from tileattn.kernels.cuda.plan.layout import (
    MAX_ALIGNMENT,
    ArrayLayout,
    CallLayout,
    array_layout,
    contiguous,
)
from tileattn.kernels.cuda.plan.plan import WORD
from tileattn.kernels.cuda.plan.tensor_map import MAX_STRIDE
from tileattn.results import Attention, Gradients

# Kernels add positions, FAR of src/mask.cuh and the sizes of a tile in 32 bits.
LONGEST = (1 << 30) - (1 << 16)

_FORWARD, _BACKWARD = ("q", "k", "v"), ("q", "k", "v", "dout", "out", "lse")
LEARNED = options_with(value="array", gradient=True)
"""Options of which a pass may compute the gradient."""

_OUT, _GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")
_DENSE = frozenset({"lse", "alibi_slopes", "sinks", *INTEGERS})  # read without strides
_SCALARS = "scale", "softcap", "left", "right", "dropout_p", "seed"


class Call(NamedTuple):
    """A valid call whose rows kernels can read in place.

    Parameters
    ----------
    problem : Problem
        Its problem.
    places : sequence of Place or None
        Its lengths and offsets, as for `tileattn.kernels.cuda.plan.filler.Filler.fill`.
    arrays : dict of str to Described
        The arrays that it brings, rows with four axes.
    ends : dict of str to int
        Bytes of offsets of packed sequences that the host knows.
    """

    problem: Problem
    places: Sequence[Place | None]
    arrays: dict[str, Any]
    ends: dict[str, Any]

    @property
    def layouts(self) -> dict[str, ArrayLayout]:
        """The layouts of the arrays of pairs, of which kernels depend on alignments."""
        pairs = ((name, self.arrays[name]) for name in PAIRS if name in self.arrays)
        return {name: array_layout(x, x.address) for name, x in pairs}


class Direction(NamedTuple):
    """Which pass runs: forward if ``deterministic`` is None.

    The backward pass computes the gradients of q, k and v, and of the options ``gradients``.
    """

    deterministic: bool | None
    gradients: tuple[str, ...] = ()

    @classmethod
    def of(cls, deterministic: bool | None, wanted: Container[str]) -> "Direction":
        """Return the direction of a pass that computes the gradients of some arrays, by name."""
        backward = deterministic is not None
        return cls(deterministic, tuple([x for x in LEARNED if backward and x in wanted]))

    @property
    def is_forward(self) -> bool:
        return self.deterministic is None

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows that the pass reads."""
        return _FORWARD if self.is_forward else _BACKWARD

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results."""
        if self.is_forward:
            return _OUT
        return *_GRADIENTS, *[f"d{name}" for name in self.gradients]


def brought(layout: CallLayout, direction: Direction) -> tuple[str, ...]:
    """Name the arrays that each call of a kind brings: rows, options, arrays of functions."""
    known = {name for name, _ in layout.arrays}
    named = (*ARRAY_OPTIONS, *INTEGERS, *layout.aux_by_name)
    return *direction.rows, *(name for name in named if name in known)


class Numbers:
    """How the numbers of the calls of one kind are listed, for one direction.

    Parameters
    ----------
    layout : CallLayout
        The layout of one of the calls.
    problem : Problem
        Its problem.
    direction : Direction
        Which pass.
    options : Mapping
        The options of one of the calls.
    """

    def __init__(
        self,
        layout: CallLayout,
        problem: Problem,
        direction: Direction,
        options: Mapping[str, Any],
    ) -> None:
        self._gradients, self._rows = direction.gradients, direction.rows
        self._is_forward = direction.is_forward
        self._dtype, self._accum_dtype = problem.dtype, problem.accum_dtype
        known, names = dict(layout.arrays), brought(layout, direction)
        self._options = [name for name in names if name in ARRAY_OPTIONS]
        self.integers = [name for name in names if name in INTEGERS]
        self.aux = [name for name in names if name in layout.aux_by_name]
        axes = {name: problem.ndim - (name == "lse") for name in self._rows}
        axes |= {name: options[name].ndim for name in self._options}
        self._arrays = [
            (name, axes.get(name, len(known[name].shape)), np.dtype(known[name].dtype))
            for name in names
        ]
        self._dtypes = {name: dtype for name, _, dtype in self._arrays}
        ends = accumulate(2 * ndim + 1 for _, ndim, _ in self._arrays)
        self.addresses: Callable[[Sequence[int]], tuple[int, ...]] = itemgetter(
            *(end - 1 for end in ends)
        )

    def arrays(self, rows: Sequence[Any], options: Mapping[str, Any]) -> Sequence[Any]:
        """Return the arrays of a call in the order in which their numbers are listed."""
        if not (self._options or self.integers or self.aux):
            return rows
        own = [given_for(name, options) for name in (*self._options, *self.integers)]
        return *rows, *own, *options.get("aux", ())

    def places(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Describe the lengths and offsets that the host knows; None if one is unusual."""
        return known_places(options, self.integers)

    @staticmethod
    def others(scalars: Scalars, places: Mapping[str, Any]) -> list[Any]:
        """List the scalars, then the numbers of the lengths and offsets that `places` returns."""
        found = [x for x in _listed(scalars) if x is not None]
        for known in places.values():
            found += [x for x in known[:-1] if x is not None]
        return found

    def names(self, scalars: Scalars, places: Mapping[str, Any]) -> list[str]:
        """Name the numbers of a call, as variables of a program."""
        found = []
        for n, (_, ndim, _) in enumerate(self._arrays):
            found += [f"n{n}_{axis}" for axis in range(ndim)]
            found += [f"s{n}_{axis}" for axis in range(ndim)] + [f"at{n}"]
        found += [name for name, x in zip(_SCALARS, _listed(scalars), strict=True) if x is not None]
        for name, known in places.items():
            numbers = zip(known._fields, known[:-1], strict=False)
            found += [f"{name}_{field}" for field, x in numbers if x is not None]
        return found

    def results(
        self, rows: Sequence[Any], options: Mapping[str, Any], memory: DeviceMemory
    ) -> list[tuple[Any, int]]:
        """Allocate the results, as the caller sees them; also return their addresses."""
        (q, k, v, *_), dtype = rows, self._dtype
        if self._is_forward:
            shape = q.shape[:-1]
            out = memory.empty((*shape, v.shape[-1]), dtype)
            return [out, memory.empty(shape, self._accum_dtype)]
        found = [memory.empty(x.shape, dtype) for x in (q, k, v)]
        for name in self._gradients:
            # Kernels do not write the empty tiles of dbias.
            new = memory.zeros if name == "bias" else memory.empty
            found.append(new(options[name].shape, self._dtypes[name]))
        return found

    def returned(self, results: Sequence[Any]) -> Attention | Gradients:
        """Return the results as a call returns them."""
        if self._is_forward:
            return Attention(*results)
        (dq, dk, dv), learned = results[:3], dict(zip(self._gradients, results[3:], strict=True))
        daux = (None,) * len(self.aux) or None
        return Gradients(dq, dk, dv, learned.get("bias"), learned.get("sinks"), daux)

    @staticmethod
    def carried(places: Mapping[str, Any], rows: Sequence[Any]) -> dict[str, bytes]:
        """Return the lengths and offsets that differ, as 64-bit integers."""
        differing = {n: x.values for n, x in places.items() if x.low != x.high or n in ENDS}
        if "kv_lengths" in differing and "q_offset" not in places:
            queries = rows[0].shape[-2]
            differing["q_offset"] = [n - queries for n in differing["kv_lengths"]]
        return {name: array("q", x).tobytes() for name, x in differing.items()}

    def read(
        self,
        kind: CallKind,
        options: Mapping[str, Any],
        scalars: Scalars,
        places: Mapping[str, Any],
        in_bytes: bool,
        numbers: Sequence[Any],
    ) -> Call | None:
        """Validate the call that some numbers list; None if no program can run it.

        ``options``, ``scalars`` and ``places`` say which numbers there are. Strides are listed in
        bytes or in elements.
        """
        rest = iter(numbers)
        arrays: dict[str, Any] = {}
        for name, ndim, dtype in self._arrays:
            shape = tuple([next(rest) for _ in range(ndim)])
            if name in "qkv":  # head dimensions decide about kernels
                shape = *shape[:-1], pinned(shape[-1])
            unit = 1 if in_bytes else dtype.itemsize
            strides = tuple([next(rest) * unit if unit > 1 else next(rest) for _ in range(ndim)])
            arrays[name] = Described(shape, strides, dtype, next(rest))
        values: list[Any] = [x if x is None else next(rest) for x in _listed(scalars)]
        scale, softcap, left, right, dropout_p, seed = values
        given = {
            name: type(known)(*[x if x is None else next(rest) for x in known[:-1]])
            for name, known in places.items()
        }
        q, k, v = (arrays[name] for name in "qkv")
        stand_ins = {
            name: Described((q.shape[0] if x.count is None else x.count,), (WORD,), np.dtype("i8"))
            for name, x in given.items()
            if name in options
        }
        own = (*self._options, *self.integers)
        on_device = {name: arrays[name] for name in own if name in options}
        aux = {"aux": tuple([arrays[name] for name in self.aux])} if self.aux else {}
        P, x = at_scalars(
            *(kind, q, k, v, {**options, **on_device, **stand_ins, **aux}),
            Scalars(scale, softcap, (left, right), dropout_p, seed),
        )
        arrays |= {name: getattr(x, name) for name in (*"qkv", *self._options)}
        if not self._fits(P, arrays):
            return None
        found = checked_places(P, self.integers, given)
        ends = {name: x.count * WORD for name, x in given.items() if name in ENDS}
        return None if found is None else Call(P, found, arrays, ends)

    def _fits(self, P: Problem, arrays: dict[str, Described]) -> bool:
        """Return True if kernels can read the arrays in place; view rows with all four axes."""
        shape = P.B, P.Hq, P.Nq, P.Dv
        lead = (1,) * (4 - P.ndim)
        for name in self._rows[3:]:
            x = arrays[name]
            arrays[name] = x = x.reshape(lead + x.shape)
            if x.shape != (shape[:-1] if name == "lse" else shape):
                return False
        if not all(x.is_contiguous for name, x in arrays.items() if name in _DENSE):
            return False
        is_regular = P.Nq <= LONGEST and P.Nk <= LONGEST and P.B * P.Hq * P.Nq * P.Nk > 0
        return is_regular and _are_regular(P, [arrays[name] for name in self._rows[:5]])


def _listed(scalars: Scalars) -> tuple[Any, ...]:
    """Return the scalars in the order in which they are listed; those that are None are not."""
    scale, softcap, (left, right), dropout_p, seed = scalars
    return scale, softcap, left, right, dropout_p, seed


def _are_regular(P: Problem, rows: Sequence[Described]) -> bool:
    """Return True if any kernel can read q, k and v, and in the backward pass dout and out.

    Other rows are unaligned, broadcast or reversed, not contiguous, or v is in k.
    """
    itemsize = P.dtype.itemsize
    strides = (P.D | P.Dv) * itemsize  # of results
    for x in rows:
        b, h, n, one = x.strides
        if one != itemsize or b <= 0 or h <= 0 or n <= 0:
            return False
        strides = strides | b | h | n
    is_aligned = not reduce(or_, [x.address for x in rows], strides) & (MAX_ALIGNMENT - 1)
    return is_aligned and strides < MAX_STRIDE and rows[1].address != rows[2].address


def results_of(
    P: Problem, direction: Direction, arrays: Mapping[str, Described]
) -> dict[str, ArrayLayout]:
    """Describe the results of a pass, contiguous, by name."""
    dtype, out = P.dtype.name, (P.B, P.Hq, P.Nq, P.Dv)
    if direction.is_forward:
        of_rows = contiguous(out[:-1], P.accum_dtype.name)
        described = [contiguous(out, dtype), of_rows]
    else:
        shapes = (P.B, P.Hq, P.Nq, P.D), (P.B, P.Hkv, P.Nk, P.D), (P.B, P.Hkv, P.Nk, P.Dv)
        described = [contiguous(shape, dtype) for shape in shapes]
        learned = (arrays[name] for name in direction.gradients)
        described += [contiguous(x.shape, x.dtype.name) for x in learned]
    return dict(zip(direction.results, described, strict=True))
