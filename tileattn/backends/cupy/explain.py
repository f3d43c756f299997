"""What would run for a call, and why: for CuPy arrays, or for a GPU that is not there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tileattn.backends.cupy import describe
from tileattn.backends.cupy.describe import addresses_of, inputs_of, layout_of
from tileattn.backends.protocol import Explanation
from tileattn.call.options import DESCALES
from tileattn.call.problem import Operands, Problem
from tileattn.call.sequences import Packing
from tileattn.expressions.nodes import elements
from tileattn.kernels.cuda.families.context import KernelLaunch, main_of
from tileattn.kernels.cuda.families.grid import OPEN
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.load import Kernel, load_all
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.plan import LaunchPlan, launch_line, plans_of
from tileattn.kernels.cuda.plan.tile_kinds import without_values
from tileattn.traffic import explained

_BLIND = "mask_mod: counted without the values of aux; the GPU reads them and skips more tiles"
_UNCOUNTED = "mask_mod: too many tiles to count here"
_COUNTED = 1 << 28  # pairs up to which the tiles of a mask_mod are counted; takes a second
_SUMS = "the sums of the splits take {:,.2f} MB besides the results"
_ASSIGNED = "query blocks are assigned in advance, the longest first"
_PROVISIONAL = (
    "tables are made when a call repeats; until then the GPU orders query blocks, and lists the "
    "tiles of a mask_mod"
)
_DYNAMIC = "query blocks are claimed one by one, head by head"


def explain(problem: Problem, operands: Operands) -> Explanation:
    """Compile and load the kernels of both passes, and describe them.

    Parameters
    ----------
    problem : Problem
        The call.
    operands : Operands
        The arrays, on CuPy's current device. The host waits for lengths and offsets on it.

    Returns
    -------
    Explanation
        Its backward tile is the tile of the kernel over keys.

    Raises
    ------
    ValueError
        If an array is on another device.
    """
    import cupy

    ordinal = cupy.cuda.runtime.getDevice()
    arrays = inputs_of(operands)
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
    """Plan both passes, and describe what they launch.

    Parameters
    ----------
    device : Device
        The GPU; it need not be there.
    problem : Problem
        The call.
    inputs : CallLayout
        The inputs; all other arrays are contiguous.
    operands : Operands
        Lengths, offsets and masks on the host.
    load : callable or None
        Loads kernels, to report their registers; None leaves that out.

    Returns
    -------
    Explanation
        Its backward tile is the tile of the kernel over keys.
    """
    forward, backward, deterministic = plans_of(problem, inputs, device)
    without = plans_of(problem, inputs, device, tables=False)
    launches = (*forward.launches, *backward.launches)
    keys = [launch.key for launch in launches]
    first = main_of(forward.launches) or KernelLaunch(
        KernelKey("forward", problem.dtype.name), OPEN
    )
    last = main_of(backward.launches) or first
    counted = problem.Nq * problem.Nk <= _COUNTED
    own = problem.mask_mod
    listed = replace(problem, mask_mod=None if own is None or not counted else without_values(own))
    rows, keys_of_tile = first.tile
    heads = min(problem.group, rows) if first.traits.split_keys else 1
    queries = rows // heads, keys_of_tile
    tiles, moved, traffic = explained(listed, operands, queries, last.tile, heads)
    if first.traits.loads_v_with_k:
        once, twice = traffic["flash2"]
        traffic |= {"flash2": (once - moved["v"], twice)}
        moved = moved | {"v": 0}
    sums = _split_bytes(forward)
    alignment = forward.kind.context.alignment_bytes
    loaded = [None] * len(keys) if load is None else load(keys)
    return Explanation(
        backend="cupy",
        kernel=first.key.kernel,
        forward_tile=first.tile,
        backward_tile=last.tile,
        workers=device.sm_count,
        scratch_bytes=first.shared_bytes,
        tiles=tiles,
        bytes_moved=moved | ({"sums": 2 * sums} if sums else {}),
        traffic=traffic,
        kernels=tuple(map(_described, launches, loaded)),
        workspace_bytes=max(x.workspace.nbytes for x in (backward, deterministic, *without[1:])),
        reasons=(
            f"q, k and v are CuPy arrays on {device.name}",
            f"rows are aligned to {alignment} bytes, so each copy moves {alignment} bytes",
            *dict.fromkeys(f"{launch.key.kernel}: {launch.why}" for launch in launches),
            *([_SUMS.format(sums / 1e6)] if sums else []),
            *([_UNCOUNTED] if own is not None and not counted else []),
            *([_BLIND] if own is not None and counted and elements(own) else []),
            *([_ASSIGNED] if "assignment" in forward.constants else []),
            *([_PROVISIONAL] if any(x.is_provisional for x in without) else []),
            *([_DYNAMIC] if forward.fields.get("single_heads") else []),
        ),
    )


def _split_bytes(plan: LaunchPlan) -> int:
    """Count the bytes of the sums that splits leave for the kernel that joins them."""
    parts = (x.traits.workspace(plan.problem, x.key) for x in plan.launches if x.traits.workspace)
    names = "partial_out", "partial_sums"
    return sum(each.scratch.get(name, 0) for each in parts for name in names)


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


def _on_host(P: Problem, x: Operands) -> Operands:
    """Replace arrays by placeholders: tile counts need only lengths, offsets and the block mask."""

    def blank(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def fetched(of: Any) -> Any:
        is_there = of is not None and not isinstance(of, np.ndarray)
        return of.get().astype(np.int64) if is_there else of

    packing = None if x.packing is None else Packing(*map(fetched, x.packing))
    lengths, offset = fetched(x.kv_lengths), fetched(x.q_offset)
    if packing is not None:
        _, queries, keys = packing.sizes
        lengths = keys if lengths is None else lengths
        offset = lengths - queries if offset is None else offset
    offset = lengths - P.Nq if offset is None else offset
    rows = (P.B, P.Hq, P.Nq, P.D), (P.B, P.Hkv, P.Nk, P.D), (P.B, P.Hkv, P.Nk, P.Dv)
    q, k, v = (blank(shape, P.dtype) for shape in rows)
    # k and v are contiguous here, so descales of tokens have shape (B, Hkv, Nk).
    tokens, heads = (P.B, P.Hkv, P.Nk), (P.entries, P.Hkv, 1)
    descales = {
        name: blank(tokens if name in P.token_descales else heads, np.float32)
        for name in (DESCALES if P.is_quantised else ())
    }
    return Operands(
        *(q, k, v, lengths, offset),
        **descales,
        mask=None if x.mask is None else blank(x.mask.shape, np.bool_),
        block_mask=x.block_mask,
        packing=packing,
    )
