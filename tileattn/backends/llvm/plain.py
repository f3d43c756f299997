"""Plain calls: forward passes that read no array of the caller but q, k and v, and in place."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tileattn.backends.addresses import Overlap, address_of
from tileattn.backends.buffers import placed
from tileattn.backends.llvm.arrays import Array, contiguous, settings
from tileattn.backends.llvm.execute import Executable, load, memory_layout, new_block
from tileattn.backends.llvm.tasks import divide
from tileattn.call.options import INTEGERS, Options, options_with
from tileattn.call.problem import Operands, Problem
from tileattn.kernels.llvm.params import put_forward_rows, put_strides
from tileattn.kernels.llvm.target import Target
from tileattn.results import Attention

_OTHER_ARRAYS = {*options_with(value="array"), "block_mask", "aux"}
_KEPT = 1 << 16  # bytes of lengths, offsets and kinds of blocks that a cached call may keep


def is_plain(P: Problem, x: Operands, out: Array | None) -> bool:
    """Return True if a call is plain, and ``out`` can only overlap q, k and v."""
    if x.packing is not None or x.aux or not P.enabled_options.isdisjoint(_OTHER_ARRAYS):
        return False
    if out is not None and not P.enabled_options.isdisjoint(INTEGERS):
        return False
    return all(contiguous(rows) is rows for rows in x[:3])


class PlainForward:
    """The forward pass of plain calls of one signature; only addresses differ between calls.

    Parameters
    ----------
    P : Problem
        The problem.
    x : Operands
        Arrays of a call; those of another call have the same layouts, and the same integers.
    target : Target
        The CPU.
    few, split_keys : int
        As for `tileattn.backends.llvm.tasks.divide`.
    out : array or None
        An array with the layout of the caller's array for the output.
    """

    def __init__(
        self, P: Problem, x: Operands, target: Target, few: int, split_keys: int, out: Array | None
    ) -> None:
        name = "decode" if P.Nq <= few else "forward"
        self._settings = others = settings(P, x)
        layout = memory_layout(P)
        module = load(name, target, P.dtype, P.D, P.Dv, layout, P.score_mod, P.mask_mod)
        division = divide(name, P, target, x, others, split_keys, few)
        block = new_block(P, division, others)
        put_strides(block, others, packed=False)
        row, number = P.Dv * P.dtype.itemsize, P.accum_dtype.itemsize
        put_forward_rows(
            block,
            *(*x.q.strides[:3], *x.k.strides[:3], *x.v.strides[:3]),
            *(P.Hq * P.Nq * row, P.Nq * row, row),
            *(P.Hq * P.Nq * number, P.Nq * number, number),
        )
        self._run = Executable(module, division, block).run
        self._out, self._lse = (P.out_shape, P.dtype), (P.out_shape[:-1], P.accum_dtype)
        self._beyond = P.dtype.alignment - 1
        self._overlaps = None if out is None else Overlap(out, x[:3])

    @property
    def is_small(self) -> bool:
        """True if it takes little memory."""
        return sum(x.nbytes for x in self._settings.values()) <= _KEPT

    def __call__(
        self,
        rows: Sequence[Array],
        options: Options,  # noqa: ARG002 - without arrays, and so the same in all calls
        out: Array | None,
    ) -> Attention | None:
        """Run the call; return None if an array is unaligned or ``out`` cannot be written."""
        q, k, v = rows
        inputs = address_of(q), address_of(k), address_of(v)
        if out is not None and not self._may_write(out, inputs):
            return None
        found = self.at(inputs, rows)
        return None if found is None else placed(found, out)

    def at(self, addresses: Sequence[int], owners: Any) -> Attention | None:
        """Run the call on q, k and v at these addresses; return None if one is unaligned.

        ``owners`` keep the memory alive.
        """
        at_q, at_k, at_v = addresses
        if (at_q | at_k | at_v) & self._beyond:
            return None
        result, lse = np.empty(*self._out), np.empty(*self._lse)
        all_addresses = [at_q, at_k, at_v, address_of(result), address_of(lse)]
        self._run((owners, result, lse, self), all_addresses)
        return Attention(result, lse)

    def _may_write(self, out: Array, inputs: tuple[int, int, int]) -> bool:
        """Return True if ``out`` is writable and, by addresses, overlaps no input."""
        if self._overlaps is None or not out.flags.writeable:
            return False
        return not self._overlaps(address_of(out), inputs)
