"""Prepared calls of one signature: everything that depends on array layouts is kept."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tileattn.algorithm import spec
from tileattn.algorithm.parameter_gradient import aux_gradients
from tileattn.algorithm.residuals import Residuals, rounding_of_lse, row_norms
from tileattn.backends.addresses import Overlap, address_of
from tileattn.backends.buffers import placed
from tileattn.backends.llvm.arrays import Array, as_batch, as_inputs, aux_table, contiguous
from tileattn.backends.llvm.execute import Executable, load
from tileattn.backends.llvm.parameter_gradient import (
    bias_gradient,
    bias_sums,
    element_sums,
    layouts,
    places,
)
from tileattn.backends.llvm.tasks import divide
from tileattn.call.options import Options
from tileattn.call.prepared import PreparedCall
from tileattn.call.problem import Operands, Problem
from tileattn.kernels.llvm.params import Layout
from tileattn.kernels.llvm.sizes import ROWS, SECTION, padded
from tileattn.kernels.llvm.target import Target
from tileattn.results import Attention, Gradients

_PLAIN = ("q", "k", "v", "out", "lse", "kv_lengths", "q_offset")
"""Arrays of every forward pass, in the order of their fields."""


class LlvmCall(PreparedCall):
    """Calls of one signature on NumPy arrays; only addresses change from call to call."""

    def __init__(self, backend: Any, problem: Problem) -> None:
        super().__init__(backend, problem)
        self._few: int = backend.few_queries(problem)
        self._targets: tuple[Target, ...] = backend.targets_of(problem)

    def at(self, problem: Problem) -> PreparedCall:
        """Return the call of another problem of the same kind."""
        return LlvmCall(self.backend, problem)

    def forward(self, operands: Operands, out: Array | None) -> Attention:
        """Compute attention; ``out`` is written at once, after everything else has succeeded."""
        P, operands = self.problem, _aligned(operands)
        result = Attention(
            np.empty((P.B, P.Hq, P.Nq, P.Dv), P.dtype), np.empty((P.B, P.Hq, P.Nq), P.accum_dtype)
        )
        batch = as_batch(P, operands)
        arrays = as_inputs(batch, operands)
        arrays |= {"out": result.out, "lse": result.lse}
        for kernel, targets in self._kernels(operands):
            executable = self._run(kernel, batch, operands, arrays, targets, self._few)
            if len(targets) == 1 and self._is_plain(operands, arrays, out):
                self.cached[None] = CachedForward(executable, P, arrays, out)
        return placed(result, out)

    def backward(
        self,
        operands: Operands,
        dout: Array,
        attention: Attention,
        dlse: Array | None,
        deterministic: bool,  # noqa: ARG002 - sums have a fixed order in any case
        workspace: Array | None,  # noqa: ARG002 - each thread keeps its tiles
    ) -> Gradients:
        """Compute the gradients; the workspace is not used."""
        P, x, targets = self.problem, _aligned(operands), self._targets
        saved = Residuals.saved(P, dout, attention.lse)
        large = saved.large.any()
        if large:
            self._split_large_rows(x, saved)
        columns = padded(targets[-1], P.accum_dtype.itemsize, P.D)
        dq = np.empty((P.B, P.Hq, P.Nq, P.D), P.dtype)
        in_place = columns == P.D and P.dtype == P.accum_dtype
        batch = as_batch(P, x)
        arrays = as_inputs(batch, x) | {
            "dout": contiguous(dout),
            "out": contiguous(attention.out),
            "lse": saved.lse,
            "log_l": saved.log_l,
            "delta": saved.delta,
            "dq_accum": dq if in_place else np.empty((*dq.shape[:3], columns), P.accum_dtype),
            "dq": dq,
            "dk": np.empty((P.B, P.Hkv, P.Nk, P.D), P.dtype),
            "dv": np.empty((P.B, P.Hkv, P.Nk, P.Dv), P.dtype),
        }
        if batch.Nk > SECTION:
            arrays |= _dq_sums(batch, arrays["dq_accum"])
        if large and len(targets) > 1:  # in float32, as `_split_large_rows`
            groups = saved.large.reshape(P.B, P.Hkv, P.group * P.Nq)
            arrays["unusual"] = groups.any(axis=-1).astype(np.int64)
        dbias = bias_sums(P, x.bias) if x.wants("bias") else None
        others = {"dlse": None if dlse is None else contiguous(dlse), "dbias": dbias}
        arrays |= {name: given for name, given in others.items() if given is not None}
        learned = layouts(batch, x)
        sums = element_sums(learned)
        if learned:
            arrays["aux"] = aux_table(batch, x.aux, places(learned, sums))
        self._run("backward", batch, x, arrays, targets)
        with np.errstate(all="ignore"):
            return Gradients(
                dq,
                arrays["dk"],
                arrays["dv"],
                None if dbias is None else bias_gradient(x.bias, dbias),
                None if x.sinks is None else spec.sink_gradient(x.sinks, saved),
                aux_gradients(x, sums),
            )

    def _kernels(self, x: Operands) -> Iterator[tuple[str, tuple[Target, ...]]]:
        """Yield the forward kernels that run, and their targets; packed lengths may need both."""
        queries = [self.problem.Nq] if x.packing is None else x.packing.sizes[1].tolist()
        few = {n <= self._few for n in queries}
        if True in few:
            yield "decode", self._targets[-1:]
        if False in few:
            yield "forward", self._targets

    def _run(
        self, name: str, P: Problem, x: Operands, arrays: Mapping[str, Array],
        targets: tuple[Target, ...], few: int = 0,
    ) -> Executable:  # fmt: skip
        """Run a module for the first target, and for the next if key heads are left to it."""
        if len(targets) > 1 and "unusual" not in arrays:
            arrays = {**arrays, "unusual": np.zeros((self.problem.B, P.Hkv), np.int64)}
        layout = Layout(P.is_packed, P.is_paged)
        aux = tuple((array.dtype, array.ndim) for array in x.aux)
        learning = name == "backward" and x.wants("aux")
        kind = P.dtype, P.D, P.Dv, layout, P.score_mod, P.mask_mod, aux, learning
        for target in targets:
            division = divide(name, P, target, x, arrays, self.backend.split_keys, few)
            executable = Executable(load(name, target, *kind), P, arrays, division)
            executable.run(arrays, x.aux)
            if len(targets) > 1 and not np.count_nonzero(arrays["unusual"]):
                break
        return executable

    def _is_plain(self, x: Operands, arrays: Mapping[str, Array], out: Array | None) -> bool:
        """Return True if calls of this signature read only q, k and v, and in place."""
        if len(arrays) > len(_PLAIN) or any(arrays[name] is not getattr(x, name) for name in "qkv"):
            return False
        # CachedForward checks that out overlaps none of q, k and v, but no other input.
        return out is None or not (self.problem.has_lengths or self.problem.has_offset)

    def _split_large_rows(self, x: Operands, saved: Residuals) -> None:
        """Split the logsumexp of large rows, as ``spec.renormalise``, but for whole arrays.

        The values of this forward pass are the norms of the keys. Its scores are bitwise identical
        to the scores of both passes: their sums have one order.
        """
        P = self.problem
        with np.errstate(all="ignore"):
            q, k = (np.asarray(a, P.accum_dtype) for a in (x.q, x.k))
            plain = replace(P, dropout_p=0.0, Dv=1, dtype=P.accum_dtype)
            key_norm = np.empty((P.B, P.Hq, P.Nq, 1), P.accum_dtype)
            m, own_log_l = np.empty_like(saved.lse), np.empty_like(saved.lse)
            x = x._replace(q=q, k=k, v=row_norms(k)[..., None])
            batch = as_batch(plain, x)
            arrays = as_inputs(batch, x)
            arrays |= {"out": key_norm, "row_max": m, "log_l": own_log_l}
            call = LlvmCall(self.backend, plain)
            call._run("forward", batch, x, arrays, call._targets)
            q_norm = abs(P.scale) * row_norms(q)
            explained = rounding_of_lse(saved.lse, P.D, q_norm, key_norm[..., 0])
            ours = saved.large & (saved.lse - m - own_log_l <= explained)
            np.copyto(saved.log_l, own_log_l, where=ours)
            np.copyto(saved.lse, m, where=ours)


class CachedForward:
    """The forward pass of calls of one signature with no arrays but q, k, v and out.

    ``executable``, ``arrays`` and ``out`` come from an earlier call.
    """

    def __init__(
        self, executable: Executable, P: Problem, arrays: Mapping[str, Array], out: Array | None
    ) -> None:
        self._start = executable.start
        self._out, self._lse = (P.out_shape, P.dtype), (P.out_shape[:-1], P.accum_dtype)
        self._beyond = P.dtype.alignment - 1
        self._overlaps = None if out is None else Overlap(out, (arrays[n] for n in "qkv"))
        self._lengths = arrays["kv_lengths"], arrays["q_offset"]  # the same in all calls
        self._at_lengths = tuple(map(address_of, self._lengths))

    def __call__(
        self,
        rows: Sequence[Array],
        options: Options,  # noqa: ARG002 - without arrays, and so the same in all calls
        out: Array | None,
    ) -> Attention | None:
        """Run the call; return None if an array is unaligned or ``out`` cannot be written."""
        q, k, v = rows
        inputs = at_q, at_k, at_v = address_of(q), address_of(k), address_of(v)
        if (at_q | at_k | at_v) & self._beyond:
            return None
        if out is not None and not self._may_write(out, inputs):
            return None
        result, lse = np.empty(*self._out), np.empty(*self._lse)
        pointers = [at_q, at_k, at_v, address_of(result), address_of(lse), *self._at_lengths]
        self._start(pointers, (q, k, v, result, lse, self))
        return placed(Attention(result, lse), out)

    def _may_write(self, out: Array, inputs: tuple[int, int, int]) -> bool:
        """Return True if ``out`` is writable and, by addresses, overlaps no input."""
        if self._overlaps is None or not out.flags.writeable:
            return False
        return not self._overlaps(address_of(out), inputs)


def _dq_sums(P: Problem, dq: Array) -> dict[str, Array]:
    """Allocate the compensated sums of dQ over sections of keys, and the section of each tile."""
    tiles = P.B, P.Hq, -(-P.Nq // ROWS)
    sums = {name: np.zeros(dq.shape, dq.dtype) for name in ("dq_high", "dq_low")}
    return sums | {"dq_section": np.zeros(tiles, np.int64)}


def _aligned(x: Operands) -> Operands:
    """Copy the unaligned arrays of ``aux``."""
    if all(array.flags.aligned for array in x.aux):
        return x
    return x._replace(aux=tuple(a if a.flags.aligned else a.copy() for a in x.aux))
