"""Plain passes: they read no array of the caller but rows, such as q, k and v, and in place."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tileattn.algorithm.residuals import Residuals
from tileattn.backends.addresses import Overlap, address_of
from tileattn.backends.buffers import placed
from tileattn.backends.llvm.arrays import Array, contiguous, settings
from tileattn.backends.llvm.execute import Executable, load, memory_layout, new_block
from tileattn.backends.llvm.tasks import Division, divide
from tileattn.call.options import INTEGERS, Options, options_with
from tileattn.call.problem import Operands, Problem
from tileattn.kernels.llvm.params import put_first_rows, put_strides
from tileattn.kernels.llvm.sizes import padded
from tileattn.kernels.llvm.target import Target
from tileattn.results import Attention, Gradients

_OTHER_ARRAYS = {*options_with(value="array"), "block_mask", "aux"}
_KEPT = 1 << 16  # bytes of lengths, offsets and kinds of blocks that a cached pass may keep


def is_plain(P: Problem, x: Operands, rows: Sequence[Array]) -> bool:
    """Return True if a pass that reads some rows is plain."""
    if x.aux or not P.enabled_options.isdisjoint(_OTHER_ARRAYS):
        return False
    return all(contiguous(array) is array for array in rows)


class PlainPass:
    """A plain pass of the calls of one signature; only addresses differ between calls.

    Parameters
    ----------
    P : Problem
        The problem, as `tileattn.backends.llvm.arrays.as_batch` returns it.
    x : Operands
        Arrays of a call; those of another call have the same layouts, and the same integers.
    target : Target
        The CPU.
    split_keys : int
        As for `tileattn.backends.llvm.tasks.divide`.
    """

    def __init__(self, P: Problem, x: Operands, target: Target, split_keys: int) -> None:
        self._problem, self._settings, self._beyond = P, settings(P, x), P.dtype.alignment - 1
        self._target, self._split_keys = target, split_keys

    @property
    def is_small(self) -> bool:
        """True if it takes little memory."""
        return sum(x.nbytes for x in self._settings.values()) <= _KEPT

    def _divide(self, name: str, x: Operands, few: int = 0) -> Division:
        """Divide the work of a module."""
        P, target = self._problem, self._target
        return divide(name, P, target, x, self._settings, self._split_keys, few)

    def _pack(self, name: str, division: Division, rows: Sequence[Array]) -> Executable:
        """Load a module, and pack its parameters for rows of four axes in the order of fields."""
        P = self._problem
        block = new_block(P, division, self._settings)
        put_first_rows(block, rows, packed=P.is_packed)
        put_strides(block, self._settings, packed=P.is_packed)
        kind = P.dtype, P.D, P.Dv, memory_layout(P), P.score_mod, P.mask_mod
        return Executable(load(name, self._target, *kind), division, block)


class PlainForward(PlainPass):
    """A plain forward pass; ``out`` is an array with the layout of the caller's, or None."""

    def __init__(
        self, kernels: Sequence[str], caller: Problem, few: int, out: Array | None,
        P: Problem, x: Operands, target: Target, split_keys: int,
    ) -> None:  # fmt: skip
        super().__init__(P, x, target, split_keys)
        has_integers = not P.enabled_options.isdisjoint(INTEGERS)  # which out might overlap
        self._overlaps = None if out is None or has_integers else Overlap(out, x[:3])
        shape, dtypes = caller.out_shape, (P.dtype, P.accum_dtype)
        self._out, self._lse = (shape, dtypes[0]), (shape[:-1], dtypes[1])
        rows = caller.B, caller.Hq, caller.Nq
        results = np.empty((*rows, P.Dv), dtypes[0]), np.empty(rows, dtypes[1])
        self._runs = [
            self._pack(name, self._divide(name, x, few), (*x[:3], *results)).run for name in kernels
        ]

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
        for run in self._runs:
            run((owners, result, lse, self), all_addresses)
        return Attention(result, lse)

    def _may_write(self, out: Array, inputs: Sequence[int]) -> bool:
        """Return True if ``out`` is writable and, by addresses, overlaps no input."""
        if self._overlaps is None or not out.flags.writeable:
            return False
        return not self._overlaps(address_of(out), inputs)


class PlainBackward(PlainPass):
    """A plain backward pass without rows of a large logsumexp.

    Arrays of the first call have four axes.
    """

    def __init__(self, P: Problem, x: Operands, target: Target, split_keys: int) -> None:
        super().__init__(P, x, target, split_keys)
        self._columns = padded(target, P.accum_dtype.itemsize, P.D)
        self._in_place = self._columns == P.D and P.dtype == P.accum_dtype
        self._division = self._divide("backward", x)
        self._executable: Executable | None = None

    def __call__(
        self,
        rows: Sequence[Array],
        options: Options,  # noqa: ARG002 - without arrays, and so the same in all calls
        out: None,  # noqa: ARG002 - only forward passes have it
    ) -> Gradients | None:
        """Compute all gradients; return None if an array is unaligned or some row is large."""
        P, (q, k, v, dout, attended, lse, *dlse) = self._problem, rows
        saved = Residuals.saved(P, dout, lse)
        if saved.large.any() or any(address_of(x) & self._beyond for x in rows):
            return None
        dq, dk, dv = (np.empty(x.shape, P.dtype) for x in (q, k, v))
        accum = dq
        if not self._in_place:
            accum = np.empty((*q.shape[:-1], self._columns), P.accum_dtype)
        sums = saved.log_l, saved.delta, accum
        arrays = q, k, v, attended, saved.lse, dout, *sums, dq, dk, dv, *dlse
        if self._executable is None:
            self._executable = self._pack("backward", self._division, arrays)
        self._executable.run((arrays, self), [address_of(x) for x in arrays])
        return Gradients(dq, dk, dv, None, None)
