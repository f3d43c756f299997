"""The launches of a backward pass: its family's, and what runs before and after them."""

from collections.abc import Sequence
from itertools import takewhile

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import generic
from tileattn.kernels.cuda.families.context import (
    ROW_WARPS,
    KernelLaunch,
    LaunchContext,
    rows_of_block,
)
from tileattn.kernels.cuda.families.ds_tiles import daux_launches, dbias_launches
from tileattn.kernels.cuda.families.families import gradient_launches
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.size_class import (
    delta_beside,
    empty_axes,
    has_keys,
    has_queries,
)
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, whole_row_bucket

_VECTORS = 4  # upper bound of the vectors of a lane, as in ``src/backward_preprocess.cu``
# Thread blocks of an SM that compute delta, 16 and 32 bits. Without this limit 4 or 5 fit (H200:
# docs/tuning-log.md).
_ROW_BLOCKS = 8
_BESIDE_WARPS = 32  # warps of a thread block that computes delta beside the main kernel


def backward_launches(
    problem: Problem, context: LaunchContext, *, deterministic: bool, sinks: bool
) -> tuple[KernelLaunch, ...]:
    """Return the launches of the backward pass.

    ``deterministic`` sums dq in a fixed order. ``sinks`` is true if their gradient is wanted. If
    no gradient of q, k and v is wanted, only the kernels that sum dS run. There is no backward pass
    over pages, or over keys and values of 8 bits.
    """
    P, context = problem, context._replace(deterministic=deterministic)
    if P.is_paged or P.is_quantised:
        return ()
    queries, keys = has_queries(P), has_keys(P)
    own: tuple[KernelLaunch, ...] = ()
    if context.dqkv:
        own = gradient_launches(P, context)
    begins = tuple(takewhile(_begins_beside_rows, own))
    before = []
    if queries:
        before.append(_rows(P, context, begins))
    before += begins
    if queries and keys:
        before.append(generic.large_scores_launch(P, context))
    after: list[KernelLaunch] = []
    written = any(launch.key.write_dbias for launch in own)
    if context.dbias and queries and "Nk" not in empty_axes(P):
        after += dbias_launches(P, context, written=written)
    after += daux_launches(P, context)
    if sinks and "Hq" not in empty_axes(P):
        key = KernelKey("backward_dsinks", P.dtype.name, warps_m=ROW_WARPS, packed=P.is_packed)
        after.append(KernelLaunch(key, Grid("heads")))
    return (*before, *own[len(begins) :], *after)


def _begins_beside_rows(launch: KernelLaunch) -> bool:
    return launch.traits.beside_rows and not launch.key.head_flags


def _rows(P: Problem, context: LaunchContext, begins: Sequence[KernelLaunch]) -> KernelLaunch:
    """Launch the kernel that computes delta, on all SMs or beside the next kernel."""
    tuning, sm_count = context.tuning, context.sm_count
    beside = bool(begins) and not P.is_packed  # packed sequences have no counters of rows
    beside = beside and delta_beside(P, begins[0].key.block_k, tuning, sm_count)
    key = KernelKey(
        *("backward_preprocess", P.dtype.name),
        value_dim=whole_row_bucket(min(P.Dv, MAX_HEAD_DIM), P.dtype.itemsize),
        warps_m=_BESIDE_WARPS if beside else ROW_WARPS,
        min_blocks_per_sm=_ROW_BLOCKS if P.dtype.itemsize <= 4 and not beside else 1,
        alignment_bytes=context.alignment_bytes,
        packed=P.is_packed,
    )
    lanes = key.threads // rows_of_block(key, key.value_dim)
    rows = key.threads // max(1, lanes // _VECTORS)
    grid = Grid("padded queries", together=rows)
    if beside:
        grid = grid._replace(most=-(-sm_count // tuning.rows_beside_part))
    return KernelLaunch(key, grid, why="a few lanes for each row")
