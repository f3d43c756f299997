"""Plain passes with numbers that were not seen before."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tileattn.algorithm.function_mask import BLOCK
from tileattn.backends.addresses import address_of
from tileattn.backends.described import Described, Lengths
from tileattn.backends.llvm.arrays import block_size
from tileattn.backends.llvm.execute import scalars_of
from tileattn.backends.llvm.plain import PlainBackward, PlainForward, PlainProgram
from tileattn.backends.llvm.plan import flat, plain_plans
from tileattn.backends.new_numbers import NewCall, NewNumbers
from tileattn.call.problem import Operands, Problem
from tileattn.call.scalars import scale_of
from tileattn.expressions.parameters import kernel_cells
from tileattn.kernels.llvm.params import UNKNOWN

_ONE_BLOCK = np.full((1, 1, 1, 1), UNKNOWN, np.int32)  # all pairs ask the mask_mod
_WORD = 8  # bytes of an integer


class PlainNumbers(NewNumbers):
    """Runs plain passes of one kind with numbers that were not seen before.

    Parameters
    ----------
    backend : LlvmBackend
        The backend.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def plan(
        self, P: Problem, x: Operands, lengths: Lengths, others: Sequence[Described]
    ) -> tuple[Sequence[Any], PlainProgram] | None:
        """Plan a pass; None if it is not plain, or kinds of blocks depend on its numbers."""
        if not _are_in_place(P, (*x[:3], *others[:2])) or self._backend.why_not(P) is not None:
            return None
        names = () if P.mask_mod is None else ("block_kinds",)
        if names and block_size(lengths.batch(P), x) == (BLOCK, BLOCK):
            return None
        planned = plain_plans(self._backend, P, x, lengths, others, names)
        return planned and (flat(planned[1]), PlainProgram(P, *planned))

    def start(self, call: NewCall, numbers: Sequence[Any], rest: PlainProgram) -> Any:
        """Run a pass; return None if an array is unaligned, or some row is large."""
        kind, (q, _, v, *backward), _, (scale, softcap, _, dropout_p, seed), _ = call
        scale = scale_of(None, q.shape[-1]) if scale is None else scale
        scalars = scalars_of(rest.accum_dtype, scale, softcap, dropout_p, seed)
        lengths, offsets = call.lengths_and_offsets
        others, constants = call.packed, call.constants
        if constants:
            others["aux"] = kernel_cells(kind.score_mod, kind.mask_mod).cells(constants)
        held, addresses = _memory(lengths, offsets, others)
        if kind.mask_mod is not None:
            addresses["block_kinds"] = address_of(_ONE_BLOCK)
        executables = rest.executables(numbers, scalars, addresses)
        if backward:
            return PlainBackward(rest, executables, held)(call.rows, {}, None)
        shape = *q.shape[:-1], v.shape[-1]
        return PlainForward(rest, executables, shape, held)(call.rows, {}, None)


def _are_in_place(P: Problem, rows: Sequence[Described]) -> bool:
    """Return True if kernels can read some rows in place, wherever they start."""
    if not P.B * P.Hq * P.Nq * P.Nk > 0:
        return False
    for x in rows:
        b, h, n, one = x.strides
        if one != P.dtype.itemsize or (b | h | n) & (P.dtype.alignment - 1):
            return False
    return True


def _memory(
    lengths: Sequence[int], offsets: Sequence[int], others: Mapping[str, Sequence[int]]
) -> tuple[Any, dict[str, int]]:
    """Store integers; return what holds them, and their addresses by field."""
    words, starts = [*lengths, *offsets], {"kv_lengths": 0, "q_offset": _WORD * len(lengths)}
    for name, x in others.items():
        starts[name] = _WORD * len(words)
        words += x
    memory = array("q", words)
    at = memory.buffer_info()[0]
    return memory, {name: at + start for name, start in starts.items()}
