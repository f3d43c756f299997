"""CuPy arrays: chooses a kernel, allocates, and launches on CuPy's current stream and device."""

import functools
import sys
from typing import Any

import numpy as np

from tileattn.backends.protocol import Explanation
from tileattn.kernels.call import Call
from tileattn.kernels.select import ROW_WARPS, row_key
from tileattn.problem import Operands, Problem
from tileattn.results import Attention, Gradients


class CupyBackend:
    """Attention on CuPy arrays; serves every problem.

    Nothing waits for the GPU: results are complete when the current stream reaches them.
    """

    name = "cupy"

    def owns(self, x: Any) -> bool:
        """Whether ``x`` is a CuPy array, found without importing CuPy."""
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(x, cupy.ndarray)

    def unavailable(self) -> str | None:
        """Why the backend cannot run here."""
        return _unavailable()

    def why_not(self, problem: Problem) -> str | None:  # noqa: ARG002 - the protocol's argument
        """Why a problem is not served: every one is."""
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
        _ensure_here(operands, out=out)
        call = Call(P, operands)
        result = out
        if out is None or (P.Dv > 1 and out.strides[-1] != out.itemsize):
            result = cupy.empty((P.B, P.Hq, P.Nq, P.Dv), P.dtype)
        call.add_rows("out", result)
        lse = call.add("lse", cupy.empty((P.B, P.Hq, P.Nq), P.sum_dtype))
        if lse.size:
            choice = call.choice("forward")
            key = choice.key
            if key.kernel == "forward":
                columns = max(1, -(-P.Dv // key.value_dim))
                call.launch(key, lse.size // P.Nq * columns * -(-P.Nq // key.block_q), choice.shared)
            else:
                call.launch(key, _blocks_of_rows(lse.size))
        if out is not None and result is not out:
            out[...] = result
        return Attention(result if out is None else out, lse)

    def backward(
        self,
        problem: Problem,
        operands: Operands,
        dout: Any,
        attention: Attention,
        dlse: Any | None,
        deterministic: bool,
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
            Whether dq is summed in a fixed order, by a kernel of its own.

        Returns
        -------
        Gradients
            With four axes, those of bias and sinks in their own shape.

        Raises
        ------
        ValueError
            Where an array is on another device.
        """
        import cupy

        P = problem
        _ensure_here(operands, dout=dout, out=attention.out, lse=attention.lse, dlse=dlse)
        call = Call(P, operands)
        call.add_rows("out", attention.out)
        call.add_rows("dout", dout)
        call.add("lse", cupy.ascontiguousarray(attention.lse))
        if dlse is not None:
            call.add_rows("dlse", cupy.ascontiguousarray(dlse)[..., None])
        dq = call.add_rows("dq", cupy.empty((P.B, P.Hq, P.Nq, P.D), P.dtype))
        dk = call.add_rows("dk", cupy.empty((P.B, P.Hkv, P.Nk, P.D), P.dtype))
        dv = call.add_rows("dv", cupy.empty((P.B, P.Hkv, P.Nk, P.Dv), P.dtype))
        rows = (P.B, P.Hq, P.Nq)
        for name in ("delta", "shift"):
            call.add(name, cupy.empty(rows, P.sum_dtype))
        if dq.size or attention.lse.size:
            call.launch(row_key("backward_rows", P.dtype.name), _blocks_of_rows(attention.lse.size))
        _launch_keys(call, dq, dk, dv, deterministic)
        return Gradients(dq, dk, dv, _bias_gradient(call), _sink_gradient(call, operands.sinks))

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Say what would run.

        Parameters
        ----------
        problem : Problem
            What is asked.
        operands : Operands
            The arrays; only the options are looked at.

        Returns
        -------
        Explanation
            Kernel, tiles, registers, shared memory, and the tiles and bytes of the schedule.
        """
        raise NotImplementedError


def _launch_keys(call: Call, dq: Any, dk: Any, dv: Any, deterministic: bool) -> None:
    """Start the kernels of dq, dk and dv."""
    import cupy
    from dataclasses import replace

    P = call.problem
    keys = call.choice("backward_keys")
    add_dq = not deterministic and keys.key.kernel == "backward_keys" and dq.size > 0
    if add_dq:
        shape = (P.B, P.Hq, P.Nq, keys.key.head_dim)
        call.add("dq_sum", cupy.zeros(shape, P.sum_dtype))
    key = replace(keys.key, add_dq=add_dq)
    if P.B * P.Hkv * P.Nk:
        if key.kernel == "backward_keys":
            call.launch(key, P.B * P.Hkv * -(-P.Nk // key.block_k), keys.shared)
        else:
            call.launch(key, _blocks_of_rows(P.B * P.Hkv * P.Nk))
    if not P.B * P.Hq * P.Nq:
        return
    if add_dq:
        call.launch(
            replace(key, kernel="backward_finish", warps_m=ROW_WARPS, warps_n=1, add_dq=False),
            _blocks_of_rows(P.B * P.Hq * P.Nq),
        )
        return
    choice = call.choice("backward_queries")
    if choice.key.kernel == "backward_queries":
        blocks = P.B * P.Hq * -(-P.Nq // choice.key.block_q)
        call.launch(choice.key, blocks, choice.shared)
    else:
        call.launch(choice.key, _blocks_of_rows(P.B * P.Hq * P.Nq))


def _bias_gradient(call: Call) -> Any:
    """Start the kernel of dbias, where there is a bias."""
    import cupy

    P, bias = call.problem, call.bias
    if bias is None:
        return None
    dbias = call.add_pairs("dbias", cupy.zeros(bias.shape, bias.dtype))
    if dbias.size and P.B * P.Hq * P.Nq * P.Nk:
        choice = call.choice("backward_bias")
        key = choice.key
        if key.kernel == "backward_bias":
            tiles = 1 if bias.shape[2] == 1 else -(-P.Nq // key.block_q)
            tiles *= 1 if bias.shape[3] == 1 else -(-P.Nk // key.block_k)
            call.launch(key, bias.shape[0] * bias.shape[1] * tiles, choice.shared)
        else:
            call.launch(key, _blocks_of_rows(dbias.size))
    return dbias


def _sink_gradient(call: Call, sinks: Any) -> Any:
    """Start the kernel of dsinks, where there are sinks."""
    import cupy

    if sinks is None:
        return None
    P = call.problem
    dsinks = call.add("dsinks", cupy.zeros(P.Hq, P.sum_dtype))
    if P.Hq:
        call.launch(row_key("backward_sinks", P.dtype.name), P.Hq)
    return dsinks.astype(sinks.dtype, copy=False)


def _blocks_of_rows(rows: int) -> int:
    return -(-rows // ROW_WARPS)


def _ensure_here(operands: Operands, **others: Any) -> None:
    """Raise where an array is on another device than CuPy's current one."""
    import cupy

    here = cupy.cuda.runtime.getDevice()
    names = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "kv_lengths", "q_offset")
    arrays = {name: getattr(operands, name) for name in names} | others
    for name, x in arrays.items():
        if isinstance(x, cupy.ndarray) and x.device.id != here:
            raise ValueError(
                f"{name} is on device {x.device.id}; arrays on CuPy's current device, {here}, are "
                f"accepted (use it within `with cupy.cuda.Device({x.device.id}):`)"
            )


@functools.cache
def _unavailable() -> str | None:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed: pip install 'tileattn[cuda13]' (or [cuda12])"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU ({error}); backend='numpy' needs none"
    if not count:
        return "CuPy finds no GPU; backend='numpy' needs none"
    from tileattn.errors import BackendUnavailableError
    from tileattn.kernels.compile import arch_of

    try:
        arch_of(cupy.cuda.runtime.getDevice())
    except BackendUnavailableError as error:
        return str(error)
    return None
