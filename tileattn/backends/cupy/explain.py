"""What would run for a call, and why: of CuPy arrays, or on a GPU that is not there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tileattn.backends.cupy import describe
from tileattn.backends.cupy.describe import addresses_of, inputs_of, layout_of
from tileattn.backends.protocol import Explanation
from tileattn.kernels.config.context import KernelLaunch
from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.jit.load import Kernel, load_all
from tileattn.kernels.launch.device import Device
from tileattn.kernels.launch.layout import CallLayout
from tileattn.kernels.launch.plan import launch_context, launch_line, plans_of
from tileattn.problem import Operands, Problem
from tileattn.traffic import ALGORITHMS, compared, forward_traffic, modelled

_ASSIGNED = "query blocks differ in length: they are assigned in advance, the longest first"
_TALLEST = 256  # queries of a tile, above which the schedule cuts tiles that the model does not


def explain(problem: Problem, operands: Operands) -> Explanation:
    """Compile and load the kernels of both passes, and say what they are.

    Parameters
    ----------
    problem : Problem
        What is asked.
    operands : Operands
        The arrays, on CuPy's current device. Lengths and offsets on it are waited for.

    Returns
    -------
    Explanation
        The tile of the backward pass is that of its kernel over keys.

    Raises
    ------
    ValueError
        Where an array is on another device.
    """
    import cupy

    ordinal = cupy.cuda.runtime.getDevice()
    arrays = inputs_of(problem, operands)
    addresses_of(arrays, ordinal)  # for the check
    layout, host = layout_of(arrays, operands), _on_host(problem, operands)
    return explain_on(describe.device_of(ordinal), problem, layout, host, load_all)


def explain_on(
    device: Device,
    problem: Problem,
    inputs: CallLayout,
    operands: Operands,
    load: Callable[[Sequence[KernelKey]], list[Kernel]] | None = None,
) -> Explanation:
    """Plan both passes, and say what they launch.

    Parameters
    ----------
    device : Device
        Where they would run; it need not be there.
    problem : Problem
        What is asked.
    inputs : CallLayout
        Of the inputs; all other arrays are contiguous.
    operands : Operands
        Lengths, offsets and masks on the host.
    load : callable or None
        Loads kernels, to look at their registers; None leaves that out.

    Returns
    -------
    Explanation
        The tile of the backward pass is that of its kernel over keys.
    """
    forward, backward, deterministic = plans_of(problem, inputs, device)
    launches = (*forward.launches, *backward.launches)
    keys = [launch.key for launch in launches]
    first = keys[0] if forward.launches else KernelKey("forward", problem.dtype.name)
    backward_launched = keys[len(forward.launches) :]
    last = next(
        (key for key in backward_launched if key.kernel.endswith(("_dkdv", "_sm90"))), first
    )
    tiles, moved, traffic = _traffic(problem, operands, first.tile, last.tile)
    outputs = inputs.with_contiguous_results(problem, "forward")
    alignment = launch_context(problem, outputs, device).alignment_bytes
    loaded = [None] * len(keys) if load is None else load(keys)
    return Explanation(
        backend="cupy",
        kernel=first.kernel,
        forward_tile=first.tile,
        backward_tile=last.tile,
        workers=device.sm_count,
        scratch_bytes=forward.launches[0].shared_bytes if forward.launches else 0,
        tiles=tiles,
        bytes_moved=moved,
        traffic=traffic,
        kernels=tuple(map(_described, launches, loaded)),
        workspace_bytes=max(plan.workspace.nbytes for plan in (backward, deterministic)),
        reasons=(
            f"q, k and v are CuPy arrays on {device.name}",
            f"rows are aligned to {alignment} bytes, which one copy moves",
            *dict.fromkeys(f"{launch.key.kernel}: {launch.why}" for launch in launches),
            *([_ASSIGNED] if "schedule" in forward.constants else []),
        ),
    )


def _described(launch: KernelLaunch, kernel: Kernel | None) -> str:
    if kernel is None:
        return (
            f"{launch_line(launch)}, {launch.shared_bytes / 1024:.1f} KiB of dynamic shared memory"
        )
    blocks = kernel.occupancy(launch.key.threads, launch.shared_bytes)
    spills = f", {kernel.local_bytes} bytes of local memory" if kernel.local_bytes else ""
    return (
        f"{launch_line(launch)}, {blocks} on each SM, {kernel.registers} registers, "
        f"{(launch.shared_bytes + kernel.shared_bytes) / 1024:.1f} KiB shared{spills}, "
        f"for {kernel.arch}"
    )


def _traffic(
    P: Problem, operands: Operands, forward: tuple[int, int], backward: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int], dict[str, tuple[int, int]]]:
    """Count tiles and bytes: in closed form where that is exact, else tile by tile."""
    full = (operands.kv_lengths == P.Nk).all() and (operands.q_offset == P.Nk - P.Nq).all()
    if not full or operands.block_mask is not None or max(forward[0], backward[0]) > _TALLEST:
        traffic = compared(P, operands, forward, backward)
        return *forward_traffic(P, operands, forward), traffic
    plain = replace(P, uses=P.uses - {"kv_lengths", "q_offset"})
    traffic = {
        name: (
            modelled(plain, forward, name, "forward").nbytes,
            modelled(plain, backward, name, "backward").nbytes,
        )
        for name in ALGORITHMS
    }
    return _tile_counts(P, forward), modelled(plain, forward).moved, traffic


def _tile_counts(P: Problem, tile: tuple[int, int]) -> dict[str, int]:
    """Count the tiles of all query blocks at once, of full lengths aligned at the bottom right."""
    block_q, block_k = tile
    left, right = (P.Nq + P.Nk if side is None else side for side in P.window)  # open: all keys
    first = np.arange(0, P.Nq, block_q) + P.Nk - P.Nq  # positions of each block's queries
    last = np.minimum(first + block_q, P.Nk) - 1
    # Keys that some query of a block attends to, and those that all of them do.
    lo, all_lo = (np.clip(x - left, 0, P.Nk) for x in (first, last))
    hi, all_hi = (np.clip(x + right + 1, 0, P.Nk) for x in (last, first))
    visited = np.where(lo < hi, -(-hi // block_k) - lo // block_k, 0)
    # A tile is cut to the first range; it is full where the rest lies within the second.
    begin = np.where(lo >= all_lo, lo // block_k, -(-all_lo // block_k))
    end = np.where(hi <= all_hi, -(-hi // block_k), all_hi // block_k)
    full = np.clip(end - begin, 0, visited)
    seen, whole = int(visited.sum()), 0 if "mask" in P.uses else int(full.sum())
    tiles = -(-P.Nk // block_k) * len(first)
    counts = {"skipped": tiles - seen, "partial": seen - whole, "full": whole}
    return {kind: P.B * P.Hq * n for kind, n in counts.items()}


def _on_host(P: Problem, x: Operands) -> Operands:
    """Stand in for the arrays: the schedule looks at lengths, offsets and the block mask alone."""

    def blank(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def fetched(of: Any) -> Any:
        return of if isinstance(of, np.ndarray) else of.get()

    rows = (P.B, P.Hq, P.Nq, P.D), (P.B, P.Hkv, P.Nk, P.D), (P.B, P.Hkv, P.Nk, P.Dv)
    q, k, v = (blank(shape, P.dtype) for shape in rows)
    return Operands(
        *(q, k, v, fetched(x.kv_lengths), fetched(x.q_offset)),
        mask=None if x.mask is None else blank(x.mask.shape, np.bool_),
        block_mask=x.block_mask,
    )
