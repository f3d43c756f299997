"""Prepared calls of one signature: everything that depends on array layouts is kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from tileattn.algorithm import spec
from tileattn.algorithm.parameter_gradient import aux_gradients
from tileattn.algorithm.residuals import Residuals, rounding_of_lse, row_norms
from tileattn.backends.addresses import Overlap, address_of
from tileattn.backends.buffers import placed
from tileattn.backends.described import Lengths
from tileattn.backends.llvm.arrays import Array, as_inputs, aux_table, contiguous, settings
from tileattn.backends.llvm.execute import (
    Executable,
    load,
    memory_layout,
    new_block,
    scalars_of,
    sizes_of,
)
from tileattn.backends.llvm.new_numbers import PlainNumbers
from tileattn.backends.llvm.parameter_gradient import (
    bias_gradient,
    bias_sums,
    element_sums,
    layouts,
    places,
)
from tileattn.backends.llvm.plain import PlainBackward, PlainForward, PlainProgram, is_plain
from tileattn.backends.llvm.plan import flat, forward_kernels, plain_plans
from tileattn.backends.llvm.tasks import divide
from tileattn.call.options import DESCALES, INTEGERS
from tileattn.call.parse import CallKind, four_axes
from tileattn.call.prepared import DeviceMemory, PreparedCall
from tileattn.call.problem import Operands, Problem
from tileattn.kernels.llvm.params import BIAS_DTYPES, WORDS, put_strides
from tileattn.kernels.llvm.sizes import ROWS, SECTION, padded
from tileattn.kernels.llvm.target import Target
from tileattn.results import Attention, Gradients

_KEPT = 1 << 16  # bytes of lengths, offsets and kinds of blocks that a cached pass may keep


class LlvmCall(PreparedCall):
    """Calls of one signature on NumPy arrays; only addresses change from call to call."""

    def __init__(self, backend: Any, problem: Problem) -> None:
        super().__init__(backend, problem)
        self._few: int = backend.few_queries(problem)
        self._targets: tuple[Target, ...] = backend.targets_of(problem)

    @cached_property
    def _new_numbers(self) -> PlainNumbers:
        return PlainNumbers(self.backend)

    def at(self, problem: Problem) -> PreparedCall:
        """Return the call of another problem of the same kind."""
        return LlvmCall(self.backend, problem)

    def first(
        self,
        kind: CallKind,
        rows: Sequence[Any],
        options: Mapping[str, Any],
        deterministic: bool | None,
        _memory: DeviceMemory | None = None,  # results are NumPy arrays
        _gradients: tuple[str, ...] | None = None,
        /,
    ) -> Any:
        """Run a plain pass of the kind with other numbers; None if it needs validation."""
        return self._new_numbers.run(kind, rows, options, is_forward=deterministic is None)

    def _executables(
        self, x: Operands, others: Sequence[Array] = ()
    ) -> tuple[PlainProgram, list[Executable], dict[str, Array]] | None:
        """Plan a plain pass of this signature; None if it is not plain.

        ``others`` are the rows that the backward pass reads besides q, k and v. The arrays that are
        returned must live as long as the executables.
        """
        P = self.problem
        if not is_plain(P, x, (*x[:3], *others)):
            return None
        lengths = Lengths.of(P, x)
        descales = x.descales
        arrays = settings(lengths.batch(P), x) | descales
        planned = plain_plans(self.backend, P, x, lengths, others, arrays)
        if planned is None:
            return None
        program, numbers = PlainProgram(P, *planned), flat(planned[1])
        held = arrays | {name: a[:1, :1, :1].copy() for name, a in descales.items()}
        addresses = {name: address_of(array) for name, array in held.items()}
        return program, program.executables(numbers, _scalars(P), addresses, arrays), held

    def _plain_forward(self, x: Operands, out: Array | None) -> PlainForward | None:
        """Make what runs plain forward passes of this signature; None if they are not plain."""
        P, made = self.problem, self._executables(x)
        if made is None:
            return None
        program, executables, arrays = made
        others = not P.enabled_options.isdisjoint((*INTEGERS, *DESCALES))  # that out may overlap
        overlaps = None if out is None or others else Overlap(out, x[:3])
        return PlainForward(program, executables, P.out_shape, arrays, overlaps)

    def _plain_backward(self, x: Operands, others: Sequence[Array]) -> PlainBackward | None:
        """Make what runs plain backward passes of this signature; None if they are not plain."""
        made = self._executables(x, others)
        return None if made is None else PlainBackward(*made)

    def forward(self, operands: Operands, out: Array | None) -> Attention:
        """Compute attention; ``out`` is written at once, after everything else has succeeded."""
        P, plain = self.problem, self._plain_forward(operands, out)
        found = None if plain is None else plain(operands[:3], operands.descales, out)
        if plain is not None and found is not None:
            self._keep(None, plain)
            return Attention(four_axes(found.out), found.lse.reshape(P.B, P.Hq, P.Nq))
        x, batch = _aligned(operands), _batch(P, operands)
        result = Attention(
            np.empty((P.B, P.Hq, P.Nq, P.Dv), P.dtype), np.empty((P.B, P.Hq, P.Nq), P.accum_dtype)
        )
        arrays = as_inputs(batch, x) | {"out": result.out, "lse": result.lse}
        for kernel in forward_kernels(Lengths.of(P, x), self._few):
            self._run(kernel, batch, x, arrays, self._few)
        return placed(result, out)

    def host_pass(self) -> Callable[[Sequence[int], Any], Attention | None] | None:
        known = self.cached.get(None)
        if not isinstance(known, PlainForward) or self.problem.is_quantised:
            return None
        return known.at

    def backward(
        self,
        operands: Operands,
        dout: Array,
        attention: Attention,
        dlse: Array | None,
        deterministic: bool,
        workspace: Array | None,  # noqa: ARG002 - each thread keeps its tiles
    ) -> Gradients:
        """Compute the gradients; the workspace is not used."""
        P, x, targets = self.problem, _aligned(operands), self._targets
        rows = *x[:3], dout, *attention, *(() if dlse is None else (dlse,))
        plain = self._plain_backward(x, rows[3:])
        found = None if plain is None else plain(rows, {}, None)
        if plain is not None and found is not None:
            self._keep(deterministic, plain)
            return found
        saved = Residuals.saved(P, dout, attention.lse)
        large = saved.large.any()
        if large:
            self._split_large_rows(x, saved)
        columns = padded(targets[-1], P.accum_dtype.itemsize, P.D)
        dq = np.empty((P.B, P.Hq, P.Nq, P.D), P.dtype)
        in_place = columns == P.D and P.dtype == P.accum_dtype
        batch = _batch(P, x)
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
        self._run("backward", batch, x, arrays)
        with np.errstate(all="ignore"):
            return Gradients(
                dq,
                arrays["dk"],
                arrays["dv"],
                None if dbias is None else bias_gradient(x.bias, dbias),
                None if x.sinks is None else spec.sink_gradient(x.sinks, saved),
                aux_gradients(x, sums),
            )

    def _keep(self, key: bool | None, plain: PlainForward | PlainBackward) -> None:
        """Keep the pass for later calls of the signature, if it takes little memory."""
        if sum(x.nbytes for x in plain.held.values()) <= _KEPT:
            self.cached[key] = plain

    def _targets_of(self, kernel: str) -> tuple[Target, ...]:
        """Return the targets of a kernel; the second computes key heads that the first skips."""
        return self._targets[-1:] if kernel == "decode" else self._targets

    def _run(
        self, name: str, P: Problem, x: Operands, arrays: Mapping[str, Array], few: int = 0
    ) -> None:
        """Run a module for the first target, and for the next if key heads are left to it."""
        targets = self._targets_of(name)
        if len(targets) > 1 and "unusual" not in arrays:
            arrays = {**arrays, "unusual": np.zeros((self.problem.B, P.Hkv), np.int64)}
        aux = tuple((array.dtype, array.ndim) for array in x.aux)
        learning = name == "backward" and bool(x.aux) and x.wants("aux")
        layout = memory_layout(P)
        kind = P.dtype, P.D, P.Dv, layout, P.score_mod, P.mask_mod, aux, learning
        keys = self.backend.split_keys, few, Lengths.of(P, x).longest
        others = {name: address_of(array) for name, array in arrays.items()}
        if "bias" in arrays:
            others["bias_dtype"] = BIAS_DTYPES.index(arrays["bias"].dtype.name)
        for target in targets:
            division = divide(name, P, target, x, arrays, *keys)
            block = new_block(sizes_of(P), _scalars(P), division.fields, others)
            put_strides(block, arrays, packed=P.is_packed)
            module = load(name, target, *kind)
            _, grids, parts, own_bytes = division
            workspace = [(WORDS[name], *part) for name, part in parts.items()]
            Executable(module, grids, workspace, own_bytes, block).run((arrays, x.aux))
            if len(targets) > 1 and not np.count_nonzero(arrays["unusual"]):
                break

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
            batch = _batch(plain, x)
            arrays = as_inputs(batch, x)
            arrays |= {"out": key_norm, "row_max": m, "log_l": own_log_l}
            call = LlvmCall(self.backend, plain)
            call._run("forward", batch, x, arrays)
            q_norm = abs(P.scale) * row_norms(q)
            explained = rounding_of_lse(saved.lse, P.D, q_norm, key_norm[..., 0])
            ours = saved.large & (saved.lse - m - own_log_l <= explained)
            np.copyto(saved.log_l, own_log_l, where=ours)
            np.copyto(saved.lse, m, where=ours)


def _batch(P: Problem, x: Operands) -> Problem:
    return Lengths.of(P, x).batch(P)


def _scalars(P: Problem) -> tuple[float, ...]:
    return scalars_of(P.accum_dtype, P.scale, P.softcap, P.dropout_p, P.seed)


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
