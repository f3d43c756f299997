"""Gradients of the arrays that a ``score_mod`` reads: which places sum them, in how many copies."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tileattn.algorithm.parameter_gradient import own_axes
from tileattn.algorithm.scores import aux_number, learned_elements
from tileattn.call.problem import Problem
from tileattn.expressions.extrema import RangeExtrema
from tileattn.expressions.intervals import all_bounds, index_range
from tileattn.expressions.nodes import Node, depends_on
from tileattn.expressions.parameters import index_cells
from tileattn.kernels.cuda.families.cuda_text import Learned
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout, Constant, contiguous
from tileattn.kernels.cuda.plan.params import aux_name

MOST_OF_TILE = 1 << 12  # elements that the pairs of a tile may read
_TILE = 64  # queries and keys of such a tile
_ROWS = 128  # queries of a tile of the kernels that sum, upper bound
_LOOKED_AT = 64  # tiles looked at along each axis
_COPIES_BYTES = 1 << 28  # bytes of the copies of an array's sums, if there are several


class LearnedArray(NamedTuple):
    """How one place of a ``score_mod`` sums the gradient of the array that it reads."""

    element: Learned
    heads: int  # batch entries and heads with elements of their own
    copies: int  # of the sums
    array: int
    shape: tuple[int, ...]

    @property
    def own_rows(self) -> bool:
        """True if queries have elements of their own."""
        return "i" in self.element.own


def daux_name(n: int) -> str:
    """Name the gradient of an array."""
    return f"d{aux_name(n)}"


def sums_name(n: int) -> str:
    """Name the copies of the sums of an array."""
    return f"sums of {aux_name(n)}"


def learned_arrays(P: Problem, layout: CallLayout, sm_count: int) -> tuple[LearnedArray, ...]:
    """List the elements whose gradients a backward pass computes.

    Each thread block that shares elements with others has a copy of the sums. There are as many
    copies as thread blocks run at a time, and as memory allows.
    """
    if P.score_mod is None or not P.B * P.Hq * P.Nq * P.Nk:
        return ()
    shapes = [x.shape for x in layout.aux]
    asked = [n for n in range(len(shapes)) if layout.get(daux_name(n)) is not None]
    nodes = [x for x in learned_elements(P.score_mod) if aux_number(x) in asked]
    arrays = tuple(sorted({aux_number(x) for x in nodes}))
    found = []
    for node in nodes:
        n = aux_number(node)
        shape = shapes[n]
        axes = own_axes(node, shape, P)
        own = "".join(name for name in "bhi" if name in axes)
        counts = {"b": P.entries, "h": P.Hq, "i": -(-P.Nq // _ROWS)}
        keys = math.prod(counts[name] for name in own)
        room = _COPIES_BYTES // (8 * max(1, math.prod(shape)))
        copies = max(1, min(sm_count // keys, room, math.prod(counts.values()) // keys))
        heads = math.prod(counts[name] for name in own if name != "i")
        found.append(LearnedArray(Learned(node, own, arrays), heads, copies, n, shape))
    # Places that read the same array add to the same copies.
    most = {n: max(x.copies for x in found if x.array == n) for n in arrays}
    return tuple(x._replace(copies=most[x.array]) for x in found)


def learned_layouts(
    layout: CallLayout, learned: tuple[LearnedArray, ...]
) -> dict[str, ArrayLayout]:
    """Describe gradients and sums, in the order in which the CUDA functions take them."""
    found: dict[str, ArrayLayout] = {}
    for x in sorted(learned, key=lambda x: x.array):
        found[daux_name(x.array)] = contiguous(x.shape, layout.aux[x.array].dtype)
        found[sums_name(x.array)] = contiguous((x.copies, *x.shape), "float64")
    return found


def with_gradients(P: Problem, layout: CallLayout) -> CallLayout:
    """Add the gradients of arrays that a ``score_mod`` reads, if they can be computed."""
    arrays = layout.aux
    shapes = tuple(x.shape for x in arrays)
    if P.score_mod is None or why_not_learned(P, shapes, layout.origin) is not None:
        return layout
    learned = {aux_number(node) for node in learned_elements(P.score_mod)}
    made = {daux_name(n): contiguous(arrays[n].shape, arrays[n].dtype) for n in sorted(learned)}
    return layout.with_arrays(**made)


def why_not_learned(
    P: Problem, shapes: tuple[tuple[int, ...], ...], origin: Constant | None = None
) -> str | None:
    """Return why the gradient of an array cannot be computed; None if it can."""
    if P.score_mod is None or not P.B * P.Hq * P.Nq * P.Nk:
        return None
    for node in learned_elements(P.score_mod):
        n = aux_number(node)
        if max(P.D, P.Dv) > MAX_HEAD_DIM:
            return f"gradients of aux with head dimensions above {MAX_HEAD_DIM}"
        if depends_on(node, "s"):
            return f"the gradient of {aux_name(n)} at an index that depends on the score"
        sizes = P.entries, P.Hq, P.Nq, P.Nk
        cells = index_cells(node, P.constants)
        more = P.accum_dtype, len(shapes), origin, cells
        # Larger sizes reach as many elements or more, and calls share what is found for them.
        larger = map(_power_of_two_above, (shapes[n], sizes))
        if elements_of_tile(node, *larger, *more) <= MOST_OF_TILE:
            continue
        reached = elements_of_tile(node, shapes[n], sizes, *more)
        if reached > MOST_OF_TILE:
            return (
                f"the gradient of {aux_name(n)}: {_TILE} x {_TILE} pairs may reach {reached:,} of "
                f"its elements, and up to {MOST_OF_TILE:,} are summed"
            )
    return None


def _power_of_two_above(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest power of two that is not below each size; 0 for 0."""
    return tuple([1 << (n - 1).bit_length() if n else 0 for n in sizes])


@lru_cache(maxsize=64)
def elements_of_tile(
    node: Node,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: np.dtype[Any],
    arrays: int,
    origin: Constant | None = None,
    constants: tuple[int, ...] = (),
) -> int:
    """Bound the number of elements that the pairs of a tile read.

    It looks at tiles all over the pairs. The last of the arrays is the origin, if there is one.
    ``constants`` are the cells of the parameters.
    """
    inputs: dict[str, Any] = {}
    for axis, (name, n, step) in enumerate(zip("bhij", sizes, (1, 1, _TILE, _TILE), strict=True)):
        tiles = -(-n // step)
        some = np.unique(np.linspace(0, tiles - 1, min(tiles, _LOOKED_AT if step > 1 else 2)))
        first = some.astype(np.int64).reshape(-1, *(1,) * (3 - axis)) * step
        inputs[name] = first, np.minimum(first + step, n) - 1
    aux: list[RangeExtrema | None] = [None] * arrays
    if origin is not None:
        aux[-1] = RangeExtrema(origin.array())
    found = all_bounds(node.inputs, inputs, aux, dtype, constants)
    counts: Any = 1
    for index, n in zip(node.inputs, shape, strict=True):
        low, high = index_range(found[index], n)
        counts = counts * (high - low + 1)
    return int(np.max(counts))
