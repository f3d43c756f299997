"""CuPy arrays: chooses a kernel, allocates, and launches on CuPy's current stream and device."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from tileattn.backends.buffers import span
from tileattn.backends.protocol import Explanation
from tileattn.kernels.launch.call import WIDEST, Call
from tileattn.kernels.launch.plan import Plan
from tileattn.kernels.launch.steps import backward_steps, forward_steps
from tileattn.problem import Operands, Problem
from tileattn.results import Attention, Gradients

_REMEDY = (
    "where there is one, it needs a driver from 580 on, or for older ones "
    "pip install 'tileattn[cuda12]'; backend='numpy' needs none"
)

# Kernels add positions, FAR of src/blocks.cuh and the sides of a tile in 32 bits.
LONGEST = (1 << 30) - (1 << 16)


class Repeat:
    """The forward pass of calls that passed validation before and bring q, k, v and out alone.

    Nearly all that a short call costs the host is Python; this is the least of it.

    Parameters
    ----------
    plan : Plan
        Of the earlier call.
    problem : Problem
        What is asked.
    device : int
        Where the plan runs.
    arrays : sequence of cupy array
        Of the earlier call: q, k, v and out. They are not kept.
    """

    def __init__(self, plan: Plan, problem: Problem, device: int, arrays: Sequence[Any]) -> None:
        import cupy

        P = problem
        self._start, self._device, self._aligned = plan.start, device, plan.aligned
        self._array, self._current_device = cupy.ndarray, cupy.cuda.runtime.getDevice
        self._out = (P.B, P.Hq, P.Nq, P.Dv), P.dtype
        self._lse = (P.B, P.Hq, P.Nq), P.accum_dtype
        *self._spans, self._span = map(span, arrays)

    def __call__(self, q: Any, k: Any, v: Any, out: Any | None) -> Attention | None:
        """Run it; None where an array, or the current device, is not where the plan needs it."""
        device, of_q, of_k, of_v = self._device, q.data, k.data, v.data
        there = of_q.device_id == of_k.device_id == of_v.device_id == device
        if not there or self._current_device() != device:
            return None
        at_q, at_k, at_v = of_q.ptr, of_k.ptr, of_v.ptr
        if out is None:
            out = self._array(*self._out)
        elif out.data.device_id != device or self._overlaps(out.data.ptr, (at_q, at_k, at_v)):
            return None
        at_out = out.data.ptr
        bits = at_q | at_k | at_v | at_out | WIDEST
        if bits & -bits != self._aligned:
            return None
        lse = self._array(*self._lse)
        self._start((at_q, at_k, at_v, at_out, lse.data.ptr))
        return Attention(out, lse)

    def _overlaps(self, at_out: int, inputs: tuple[int, ...]) -> bool:
        """Whether out may share memory with an input: then validation is to look closely."""
        first, past = self._span
        first, past = at_out + first, at_out + past
        for at, (lo, hi) in zip(inputs, self._spans, strict=True):
            if at + lo < past and first < at + hi:
                return True
        return False


class CupyBackend:
    """Attention on CuPy arrays; serves every problem of up to `LONGEST` queries and keys.

    After the first call of a signature nothing waits for the GPU: results are complete when the
    current stream reaches them.
    """

    name = "cupy"

    def owns(self, x: Any) -> bool:
        """Whether ``x`` is a CuPy array, found without importing CuPy."""
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(x, cupy.ndarray)

    def unavailable(self) -> str | None:
        """Why the backend cannot run here."""
        return _unavailable()

    def why_not(self, problem: Problem) -> str | None:
        """Why a problem is not served: only for its lengths."""
        for name in ("Nq", "Nk"):
            n = getattr(problem, name)
            if n > LONGEST:
                return f"{name} is {n:,}, and the kernels take up to {LONGEST:,} queries and keys"
        return None

    def forward(self, problem: Problem, operands: Operands, out: Any | None) -> Attention:
        """Compute attention.

        Parameters
        ----------
        problem : Problem
            What is asked.
        operands : Operands
            The arrays, on CuPy's current device.
        out : cupy array, shape (B, Hq, Nq, Dv), or None
            Where the output is written.

        Returns
        -------
        Attention
            With four axes.

        Raises
        ------
        ValueError
            Where an array is on another device.
        """
        import cupy

        P = problem
        call = Call(P, operands)
        # cupy.empty makes the same array, in a microsecond more.
        result = out if out is not None else cupy.ndarray((P.B, P.Hq, P.Nq, P.Dv), P.dtype)
        lse = cupy.ndarray((P.B, P.Hq, P.Nq), P.accum_dtype)
        call.add_rows("out", result, result=True)
        call.addresses["lse"] = lse.data.ptr
        # All memory is there and all kernels are loaded before the first byte of out is written.
        plan = call.plan(forward_steps)
        call.run(plan)
        if call.plain:
            arrays = operands.q, operands.k, operands.v, result
            call.memo["repeat"] = Repeat(plan, P, call.device, arrays)
        return Attention(result, lse)

    def backward(
        self,
        problem: Problem,
        operands: Operands,
        dout: Any,
        attention: Attention,
        dlse: Any | None,
        deterministic: bool,
        workspace: Any | None = None,
    ) -> Gradients:
        """Compute the gradients.

        Parameters
        ----------
        problem : Problem
            What is asked.
        operands : Operands
            The arrays, on CuPy's current device.
        dout : cupy array, shape (B, Hq, Nq, Dv)
            Gradient that arrives at the output.
        attention : Attention
            What the forward pass has returned, with four axes.
        dlse : cupy array, shape (B, Hq, Nq), or None
            Gradient that arrives at the logsumexp.
        deterministic : bool
            Whether dq is summed in a fixed order.
        workspace : cupy array of uint8, shape (n,), or None
            What all memory but that of the results is taken from.

        Returns
        -------
        Gradients
            With four axes, those of bias and sinks in their own shape.

        Raises
        ------
        ValueError
            Where an array is on another device, or the workspace too small.
        """
        import cupy

        P = problem
        dq = cupy.ndarray((P.B, P.Hq, P.Nq, P.D), P.dtype)
        dk = cupy.ndarray((P.B, P.Hkv, P.Nk, P.D), P.dtype)
        dv = cupy.ndarray((P.B, P.Hkv, P.Nk, P.Dv), P.dtype)
        bias, dbias, sinks, dsinks = operands.bias, None, operands.sinks, None
        call = Call(P, operands)
        for name, x in (("out", attention.out), ("dout", dout), ("dq", dq), ("dk", dk), ("dv", dv)):
            call.add_rows(name, x)
        call.add("lse", attention.lse)
        if dlse is not None:
            call.add_strided("dlse", dlse)
        if bias is not None:
            # Tiles that are skipped are not written.
            dbias = cupy.zeros(bias.shape, bias.dtype)
            call.add_strided("dbias", dbias)
        if sinks is not None:
            dsinks = cupy.ndarray((P.Hq,), sinks.dtype)
            call.add("dsinks", dsinks, P.accum_dtype, result=True)
        plan = call.plan(
            functools.partial(backward_steps, deterministic=deterministic, sinks=sinks is not None),
            deterministic,
        )
        call.run(plan, workspace)
        return Gradients(dq, dk, dv, dbias, dsinks)

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Say what would run.

        Parameters
        ----------
        problem : Problem
            What is asked.
        operands : Operands
            The arrays; what is looked at is their layout, and the options.

        Returns
        -------
        Explanation
            Kernels, tiles, registers, shared memory, and the tiles and bytes of the schedule. The
            kernels are compiled for it, and loaded.

        Raises
        ------
        ValueError
            Where an array is on another device.
        """
        from tileattn.backends.cupy.explain import explain

        return explain(problem, operands)


@functools.cache
def _unavailable() -> str | None:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed: pip install 'tileattn[cuda13]' (or [cuda12])"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU ({error}); {_REMEDY}"
    if not count:
        return f"CuPy finds no GPU; {_REMEDY}"
    from tileattn.errors import BackendUnavailableError
    from tileattn.kernels.build.load import arch_of

    try:
        arch_of(cupy.cuda.runtime.getDevice())
    except BackendUnavailableError as error:
        return str(error)
    return None
