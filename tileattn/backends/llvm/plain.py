"""Plain passes: they read rows of the caller, such as q, k and v, in place, and descales.

They read no other array of the caller.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tileattn.algorithm.residuals import Residuals
from tileattn.backends.addresses import Overlap, address_of
from tileattn.backends.buffers import placed
from tileattn.backends.llvm.arrays import Array, contiguous
from tileattn.backends.llvm.execute import (
    Executable,
    LoadedModule,
    load,
    memory_layout,
    new_block,
)
from tileattn.backends.llvm.plan import KernelPlan
from tileattn.backends.llvm.tasks import Grid, Part
from tileattn.call.options import DESCALES, Options, options_with
from tileattn.call.problem import Operands, Problem
from tileattn.kernels.llvm.params import OF_PASS, SIZES, WORDS, put_row_strides, put_strides
from tileattn.kernels.llvm.sizes import padded
from tileattn.kernels.llvm.target import Target
from tileattn.results import Attention, Gradients

_OTHER_ARRAYS = {*options_with(value="array"), "block_mask", "aux"}
_UNALIGNED = 3  # bits of the address of a descale that must be 0
_SIZES, _PASS = len(SIZES), len(SIZES) + len(OF_PASS)


def is_plain(P: Problem, x: Operands, rows: Sequence[Array]) -> bool:
    """Return True if a pass that reads some rows is plain."""
    if x.aux or not P.enabled_options.isdisjoint(_OTHER_ARRAYS):
        return False
    in_place = all(contiguous(array) is array for array in rows)
    return in_place and all(a is None or a.flags.aligned for a in (x.k_descale, x.v_descale))


class PlainKernel:
    """A loaded kernel, for calls whose plans differ in numbers only.

    Parameters
    ----------
    module : LoadedModule
        Its functions.
    plan : KernelPlan
        The plan of one of the calls.
    """

    def __init__(self, module: LoadedModule, plan: KernelPlan) -> None:
        self._module, self._own_bytes = module, plan.division.own_bytes
        grids = _PASS + len(plan.steps)
        parts = grids + len(Grid._fields) * len(plan.division.grids)
        self._steps, self._at_grids = slice(_PASS, grids), range(grids, parts, len(Grid._fields))
        self.count = parts + len(Part._fields) * len(plan.division.workspace)
        at_parts = range(parts, self.count, len(Part._fields))
        words = (WORDS[name] for name in plan.division.workspace)
        self._parts = [*zip(words, at_parts, strict=True)]

    def executable(
        self,
        numbers: Sequence[int],
        scalars: Sequence[float],
        addresses: Mapping[str, int],
        strided: Mapping[str, Array],
    ) -> Executable:
        """Pack the parameters of a call.

        Parameters
        ----------
        numbers : sequence of int
            As ``KernelPlan.numbers`` lists them.
        scalars : sequence of float
            As from `tileattn.backends.llvm.execute.scalars_of`.
        addresses : mapping of str to int
            Addresses of arrays that are not rows, by field.
        strided : mapping of str to array
            Those of them of which kernels read the strides.
        """
        block = new_block(numbers[:_SIZES], scalars, numbers[_SIZES:_PASS], addresses)
        put_row_strides(block, numbers[self._steps])
        if strided:
            put_strides(block, strided, packed=True)
        grids = [numbers[n : n + 3] for n in self._at_grids]
        workspace = [(word, *numbers[n : n + 2]) for word, n in self._parts]
        return Executable(self._module, grids, workspace, self._own_bytes, block)


class PlainProgram:
    """The loaded kernels of a plain pass.

    Parameters
    ----------
    P : Problem
        The problem of a call.
    target : Target
        The CPU.
    plans : mapping of str to KernelPlan
        The plans of its kernels, by name.
    """

    def __init__(self, P: Problem, target: Target, plans: Mapping[str, KernelPlan]) -> None:
        self.like = P
        self.dtype, self.accum_dtype = P.dtype, P.accum_dtype
        self.beyond = P.dtype.alignment - 1  # bits of addresses that must be 0
        self.columns = padded(target, P.accum_dtype.itemsize, P.D)  # of the sums of dQ
        kind = P.dtype, P.D, P.Dv, memory_layout(P), P.score_mod, P.mask_mod
        self._kernels = [PlainKernel(load(name, target, *kind), x) for name, x in plans.items()]

    def executables(
        self,
        numbers: Sequence[int],
        scalars: Sequence[float],
        addresses: Mapping[str, int],
        strided: Mapping[str, Array] = MappingProxyType({}),
    ) -> list[Executable]:
        """Pack the parameters of a call, as `PlainKernel.executable`; numbers are of all kernels.

        The addresses must stay valid as long as the executables run.
        """
        found, first = [], 0
        for kernel in self._kernels:
            past = first + kernel.count
            found.append(kernel.executable(numbers[first:past], scalars, addresses, strided))
            first = past
        return found


class PlainForward:
    """A plain forward pass of the calls of one signature; only addresses differ between calls.

    Parameters
    ----------
    program : PlainProgram
        Its kernels.
    executables : sequence of Executable
        With the numbers of the signature.
    shape : tuple of int
        Shape of the output.
    held : object
        What keeps the addresses of the executables alive.
    overlaps : Overlap or None
        Tests if ``out`` overlaps q, k or v; None if the pass cannot write to it.

    Notes
    -----
    Each call brings its own arrays of descales. Descales that are numbers are part of the
    signature, and the executables hold them.
    """

    def __init__(
        self,
        program: PlainProgram,
        executables: Sequence[Executable],
        shape: tuple[int, ...],
        held: Any,
        overlaps: Overlap | None = None,
    ) -> None:
        self._runs = [x.run for x in executables]
        self._out, self._lse = (shape, program.dtype), (shape[:-1], program.accum_dtype)
        self._beyond, self.held, self._overlaps = program.beyond, held, overlaps
        names = DESCALES if program.like.is_quantised else ()
        self._descales = [(name, WORDS[name]) for name in names]

    def __call__(
        self,
        rows: Sequence[Array],
        options: Mapping[str, object],  # descales vary; everything else is as in all calls
        out: Array | None,
    ) -> Attention | None:
        """Run the call; return None if an array is unaligned or ``out`` cannot be written."""
        q, k, v = rows
        inputs = address_of(q), address_of(k), address_of(v)
        if out is not None and not self._may_write(out, inputs):
            return None
        descales = []
        for name, word in self._descales:
            x = options.get(name)
            if isinstance(x, np.ndarray) and x.shape:
                descales.append((word, address_of(x)))
        if any(address & _UNALIGNED for _, address in descales):
            return None
        found = self.at(inputs, (rows, options), descales)
        return None if found is None else placed(found, out)

    def at(
        self, addresses: Sequence[int], owners: Any, descales: Sequence[tuple[int, int]] = ()
    ) -> Attention | None:
        """Run the call on q, k and v at these addresses; return None if one is unaligned.

        ``owners`` keep the memory alive. ``descales`` are words of the parameter block, and the
        addresses of the caller's arrays.
        """
        at_q, at_k, at_v = addresses
        if (at_q | at_k | at_v) & self._beyond:
            return None
        result, lse = np.empty(*self._out), np.empty(*self._lse)
        all_addresses = [at_q, at_k, at_v, address_of(result), address_of(lse)]
        for run in self._runs:
            run((owners, result, lse, self), all_addresses, descales)
        return Attention(result, lse)

    def _may_write(self, out: Array, inputs: Sequence[int]) -> bool:
        """Return True if ``out`` is writable and, by addresses, overlaps no input."""
        if self._overlaps is None or not out.flags.writeable:
            return False
        return not self._overlaps(address_of(out), inputs)


class PlainBackward:
    """A plain backward pass without rows of a large logsumexp.

    Parameters
    ----------
    program : PlainProgram
        Its kernel.
    executables : sequence of Executable
        With the numbers of the signature; there is one.
    held : object
        What keeps the addresses of the executable alive.
    """

    def __init__(self, program: PlainProgram, executables: Sequence[Executable], held: Any) -> None:
        (self._executable,) = executables
        self._program, self.held = program, held

    def __call__(
        self,
        rows: Sequence[Array],
        options: Options,  # noqa: ARG002 - without arrays, and so the same in all calls
        out: None,  # noqa: ARG002 - only forward passes have it
    ) -> Gradients | None:
        """Compute all gradients; return None if an array is unaligned or some row is large."""
        q, k, v, dout, attended, lse, *dlse = rows
        program = self._program
        dtype, accum_dtype, beyond = program.dtype, program.accum_dtype, program.beyond
        saved = Residuals.saved(program.like, dout, np.ascontiguousarray(lse))
        if saved.large.any() or any(address_of(x) & beyond for x in rows):
            return None
        dq, dk, dv = (np.empty(x.shape, dtype) for x in (q, k, v))
        accum = dq
        if program.columns != q.shape[-1] or dtype != accum_dtype:
            accum = np.empty((*q.shape[:-1], program.columns), accum_dtype)
        sums = saved.log_l, saved.delta, accum
        arrays = q, k, v, attended, saved.lse, dout, *sums, dq, dk, dv, *dlse
        self._executable.run((arrays, self), [address_of(x) for x in arrays])
        return Gradients(dq, dk, dv, None, None)
