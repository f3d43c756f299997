"""The input arrays of a call, in the layout that the kernels read."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.function_mask import BLOCK, extrema
from tileattn.backends.addresses import address_of
from tileattn.call.options import DESCALES, PAIR_ARRAYS
from tileattn.call.problem import ARRAY_OPTIONS, Operands, Problem
from tileattn.call.sequences import Places
from tileattn.expressions.parameters import kernel_cells
from tileattn.expressions.quadtree import kinds_by_intervals
from tileattn.kernels.cuda.plan.block_sparse import once, partial_blocks
from tileattn.kernels.llvm.params import EMPTY, FULL, UNKNOWN

Array = NDArray[Any]

# Kinds of the blocks of a mask_mod are found for these; else one unknown block covers everything.
_MOST_BLOCKS = 1 << 24
_MIN_WORK = 1 << 23  # multiply-adds, 0.2 ms on a core; finding kinds takes 0.1 ms

_STRIDED = {*PAIR_ARRAYS, *DESCALES}  # options whose arrays are read in place, with any strides


def as_inputs(P: Problem, x: Operands) -> dict[str, Array]:
    """Return the arrays that both passes read, by the name of their field."""
    arrays = {"q": contiguous(x.q), "k": contiguous(x.k), "v": contiguous(x.v), **settings(P, x)}
    for name in (*ARRAY_OPTIONS, *DESCALES):
        array = getattr(x, name)
        if array is None:
            continue
        if name in _STRIDED:
            arrays[name] = array if array.flags.aligned else array.copy()
        else:
            arrays[name] = contiguous(np.asarray(array, P.accum_dtype))
    return arrays


def settings(P: Problem, x: Operands) -> dict[str, Array]:
    """Return the arrays that are made for a call: integers, kinds of blocks, the table of aux."""
    arrays: dict[str, Array] = {"kv_lengths": x.kv_lengths, "q_offset": x.q_offset}
    if x.packing is not None or x.paging is not None:
        arrays |= {name: contiguous(a) for name, a in Places.of(x).integers.items()}
    if P.has_dropout_origin:
        arrays["origin"] = x.origin
    arrays |= _blocks(P, x)
    if x.aux or P.constants:
        arrays["aux"] = aux_table(P, x.aux)
    return arrays


def aux_table(P: Problem, aux: Sequence[Array], more: Sequence[int] = ()) -> Array:
    """Tabulate the address of each array, length and stride of each axis; cells; more numbers."""
    numbers: list[int] = []
    for x in aux:
        numbers += [address_of(x), *itertools.chain(*zip(x.shape, x.strides, strict=True))]
    cells = kernel_cells(P.score_mod, P.mask_mod).cells(P.constants)
    return np.array([*numbers, *cells, *more], np.int64)


def block_size(P: Problem, x: Operands) -> tuple[int, int]:
    """Return the queries and keys of a block of the block mask or the mask_mod."""
    if x.block_mask is not None:
        return x.block_mask.block_size
    blocks = P.B * P.Hq * -(-P.Nq // BLOCK) * -(-P.Nk // BLOCK)
    work = P.B * P.Hq * P.Nq * P.Nk * (P.D + P.Dv)
    is_worth = work >= _MIN_WORK and blocks <= _MOST_BLOCKS
    return (BLOCK, BLOCK) if is_worth else (max(1, P.Nq), max(1, P.Nk))


def _blocks(P: Problem, x: Operands) -> dict[str, Array]:
    """Return the kinds of the blocks of the block mask or the mask_mod, combined if both."""
    mask = x.block_mask
    if mask is not None:
        kinds, bits = once(mask, "partial", lambda: partial_blocks(mask))
        if P.mask_mod is not None:
            kinds = np.where(kinds == FULL, np.int32(UNKNOWN), kinds)
        return {"block_kinds": kinds, "block_bits": bits}
    if P.mask_mod is None:
        return {}
    if block_size(P, x) != (BLOCK, BLOCK):
        return {"block_kinds": np.full((1, 1, 1, 1), UNKNOWN, np.int32)}
    shape, known = (P.B, P.Hq, P.Nq, P.Nk), extrema(P.mask_mod, x.aux)
    found = kinds_by_intervals(P.mask_mod, shape, (BLOCK, BLOCK), known, P.constants)
    return {"block_kinds": np.array([EMPTY, UNKNOWN, FULL], np.int32)[found]}


def contiguous(x: Array) -> Array:
    """Return the array, or a copy if it is unaligned or its last axis is not contiguous."""
    if (x.strides[-1] == x.itemsize or x.shape[-1] <= 1) and x.flags.aligned:
        return x
    return x.copy("C")
