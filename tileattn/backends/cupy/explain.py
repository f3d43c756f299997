"""What would run for a call on CuPy arrays, and why."""

from typing import Any

import numpy as np

from tileattn.backends.protocol import Explanation
from tileattn.kernels.build.load import Kernel, load_all
from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.launch.call import Call
from tileattn.kernels.launch.steps import Step, backward_steps, forward_steps
from tileattn.problem import Operands, Problem
from tileattn.traffic import compared, forward_traffic

_DEALT = "blocks of queries of different length are dealt out in advance, in {} turns"


def explain(problem: Problem, operands: Operands) -> Explanation:
    """Compile the kernels of both passes, and say what they are.

    Parameters
    ----------
    problem : Problem
        What is asked.
    operands : Operands
        The arrays. Lengths and offsets that are on the GPU are waited for.

    Returns
    -------
    Explanation
        The tile of the backward pass is that of its kernel over keys.
    """
    import cupy

    call = Call(problem, operands)
    facts = call.facts()
    forward = forward_steps(problem, facts)
    sinks = operands.sinks
    backward, in_order = (
        backward_steps(problem, facts, deterministic=fixed, sinks=sinks is not None)
        for fixed in (False, True)
    )
    started = (*forward, *backward)
    first = forward[0].key if forward else KernelKey("forward", problem.dtype.name)
    last = next((s.key for s in backward if s.key.kernel.endswith(("_keys", "_sm90"))), first)
    dealt = call.order(forward).table
    on_host = _on_host(problem, operands)
    tiles, moved = forward_traffic(problem, on_host, _tile(first))
    if sinks is not None:
        dsinks = cupy.ndarray(sinks.shape, sinks.dtype, sinks.data)  # looked at, not written
        call.add("dsinks", dsinks, problem.accum_dtype, result=True)
    device = cupy.cuda.runtime.getDeviceProperties(call.device)["name"].decode()
    return Explanation(
        backend="cupy",
        kernel=first.kernel,
        forward_tile=_tile(first),
        backward_tile=_tile(last),
        workers=facts.processors,
        scratch_bytes=forward[0].shared if forward else 0,
        tiles=tiles,
        bytes_moved=moved,
        traffic=compared(problem, on_host, _tile(first), _tile(last)),
        kernels=tuple(map(_described, started, load_all([s.key for s in started]))),
        workspace_bytes=max(call.layout(steps).nbytes for steps in (backward, in_order)),
        reasons=(
            f"q, k and v are CuPy arrays on {device}",
            f"rows start at multiples of {facts.vector} bytes, which one copy moves",
            *dict.fromkeys(f"{step.key.kernel}: {step.why}" for step in started),
            *([] if dealt is None else [_DEALT.format(len(dealt) - 1)]),
        ),
    )


def _tile(key: KernelKey) -> tuple[int, int]:
    """Give the queries and keys of a tile; the textbook kernels go pair by pair."""
    return (1, 1) if key.kernel.startswith("plain") else (key.block_q, key.block_k)


def _described(step: Step, kernel: Kernel) -> str:
    key = step.key
    blocks = kernel.occupancy(key.threads, step.shared)
    spills = f", {kernel.local_bytes} bytes of local memory" if kernel.local_bytes else ""
    q, k = _tile(key)
    return (
        f"{key.kernel} {q} x {k}, {key.head_dim}/{key.value_dim} columns, {key.stages} stages: "
        f"{step.blocks:,} blocks of {key.threads} threads, {blocks} on each multiprocessor, "
        f"{kernel.registers} registers, "
        f"{(step.shared + kernel.shared_bytes) / 1024:.1f} KiB shared{spills}, for {kernel.arch}"
    )


def _on_host(P: Problem, x: Operands) -> Operands:
    """Stand in for the arrays: the schedule looks at lengths, offsets and the block mask alone."""

    def blank(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def fetched(of: Any) -> Any:
        return of if isinstance(of, np.ndarray) else of.get()

    rows = (P.B, P.Hq, P.Nq, P.D), (P.B, P.Hkv, P.Nk, P.D), (P.B, P.Hkv, P.Nk, P.Dv)
    q, k, v = (blank(shape, P.dtype) for shape in rows)
    return Operands(
        *(q, k, v, fetched(x.kv_lengths), fetched(x.q_offset), {}),
        mask=None if x.mask is None else blank(x.mask.shape, np.bool_),
        block_mask=x.block_mask,
    )
