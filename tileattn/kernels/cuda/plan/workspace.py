"""The memory that a call needs besides its results: one piece, and what lies where in it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.block_order import (
    ORDERS_KEYS,
    ORDERS_QUERIES,
    order_bytes,
    ordered_blocks,
)
from tileattn.kernels.cuda.families.context import KernelLaunch, block_count, padded_rows
from tileattn.kernels.cuda.families.hopper import HOPPER_BACKWARDS, HOPPER_WIDE, dq_columns
from tileattn.kernels.cuda.families.split import COMBINE, partial_bytes

ALIGNED = 256  # bytes that every part is aligned to, and so the whole
_COUNT = 4  # bytes of a u32


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the parts of a piece of memory begin."""

    starts: dict[str, int]  # bytes before each part, by its name in the parameter block
    zeros: int  # bytes before the parts that kernels find at zero: they come last
    nbytes: int  # of all


def workspace_of(
    problem: Problem,
    launches: Iterable[KernelLaunch],
    copies: Mapping[str, int],
    sums: Mapping[str, int],
) -> Workspace:
    """Lay out what a pass needs besides its results.

    It has ``copies``, and ``sums`` that begin at zero, by their bytes. For the backward pass it has
    three numbers of each query, flags of each key head, and the sums of dq where they are in device
    memory. The Hopper kernels add a tile counter each, a semaphore of each tile of dq, two
    counters of each key head, and the order of work tiles where those are of packed sequences.
    """
    P, keys = problem, [launch.key for launch in launches]
    number, heads = P.accum_dtype.itemsize, P.B * P.Hq
    parts = dict(copies)
    zeros = dict(sums)
    is_forward = any("forward" in key.kernel for key in keys)
    if keys and not is_forward:
        rows = heads * padded_rows(P) * number
        parts |= dict.fromkeys(("delta", "lse_log2", "row_max"), rows)
        zeros["head_flags"] = P.entries * P.Hkv * _COUNT
    for key in keys:
        if key.kernel in (ORDERS_QUERIES, ORDERS_KEYS):
            parts["block_order"] = max(order_bytes(P, key), parts.get("block_order", 0))
        if key.kernel == ORDERS_QUERIES and is_forward:
            parts |= {"tile_counter": _COUNT, "next_tiles": heads * ordered_blocks(P, key) * _COUNT}
        if key.kernel == COMBINE:
            parts |= partial_bytes(P)
        if key.kernel == HOPPER_WIDE:
            zeros["tile_counter"] = 2 * _COUNT
        if key.kernel in HOPPER_BACKWARDS and P.sequences is None:
            zeros["row_counter"] = P.B * P.Hkv * _COUNT
        if not key.add_dq:
            continue
        of_hopper = key.kernel in HOPPER_BACKWARDS
        columns = dq_columns(key.head_dim) if of_hopper else key.head_dim
        sums = {"dq_accum": heads * P.Nq * columns * number}
        if of_hopper:
            parts |= sums
            tiles = heads * block_count(P, P.Nq, key.block_q)
            counts = {"tile_counter": 2, "dq_semaphore": tiles}
            if P.sequences is None:
                counts["dq_counter"] = P.B * P.Hkv
            zeros |= {name: count * _COUNT for name, count in counts.items()}
        else:
            zeros |= sums
    starts, end = {}, 0
    for name, nbytes in (parts | zeros).items():
        starts[name] = -(-end // ALIGNED) * ALIGNED
        end = starts[name] + nbytes
    return Workspace(starts, min((starts[name] for name in zeros), default=end), end)
