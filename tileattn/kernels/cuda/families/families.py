"""The kernel families, the preferred one first, and what each pass launches.

A family is a module with the members of `KernelFamily`, and a place in `FAMILIES`.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from tileattn.call.problem import Problem
from tileattn.errors import UnsupportedError
from tileattn.kernels.cuda.families import generic, hopper, latent, pages, split, split_sm90
from tileattn.kernels.cuda.families.block_order import with_orders
from tileattn.kernels.cuda.families.context import (
    ROW_WARPS,
    KernelLaunch,
    LaunchContext,
    block_count,
    padded_rows,
    rows_of_block,
)
from tileattn.kernels.cuda.families.ds_tiles import daux_launches, dbias_launch
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, TileSize, bucket

_VECTORS = 4  # of a lane, at most: as in ``src/backward_preprocess.cu``
# Where the next kernel begins beside the first one of a backward pass, that has some of the SMs.
_BESIDE_PART, _BESIDE_WARPS = 4, 32
_BESIDE_WAVES = 8  # at least, of work tiles: with few, those that begin late end late


class KernelFamily(Protocol):
    """Kernels for one generation of GPUs, or for all."""

    NAME: str

    def why_not(self, problem: Problem, context: LaunchContext, direction: str) -> str | None:
        """Why the family does not support a pass, ``"forward"`` or ``"backward"``, if so."""

    def forward(
        self, problem: Problem, context: LaunchContext, tiles: Sequence[TileSize] = ()
    ) -> KernelLaunch:
        """Launch the forward pass of at least one query, of some tiles where they are given."""

    def backward(
        self, problem: Problem, context: LaunchContext, *, deterministic: bool
    ) -> tuple[KernelLaunch, ...]:
        """Launch what computes dq, dk and dv."""


FAMILIES: tuple[KernelFamily, ...] = (hopper, generic)


def forward_launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """List what the forward pass launches: nothing where there is no query."""
    if not problem.B * problem.Hq * problem.Nq:
        return ()
    is_wide = max(problem.D, problem.Dv) > MAX_HEAD_DIM
    why = (latent if is_wide else split).why_not(problem, context)
    if why is None:
        if is_wide:
            return latent.launches(problem, context)
        if problem.page is not None:
            return pages.launches(problem, context)
        return split_sm90.launches(problem, context)
    if problem.page is not None and problem.Nk:
        raise UnsupportedError(f"backend 'cupy' does not support block_table here: {why}")
    family, refusal = _supporting(problem, context, "forward")
    if is_wide:
        refusal = f"{refusal}; not latent attention: {why}"
    own = _explained(refusal, family.forward(problem, context))
    return tuple(with_orders(problem, own))


def backward_launches(
    problem: Problem, context: LaunchContext, *, deterministic: bool, sinks: bool
) -> tuple[KernelLaunch, ...]:
    """List what the backward pass launches; ``deterministic`` sums dq in a fixed order.

    ``sinks`` says whether their gradient is wanted. If a key has ``add_dq``, dq is summed in an
    array of zeros. Without the gradients of q, k and v the kernels that sum dS run alone. Keys in
    pages have no backward pass.
    """
    P = problem
    if P.page is not None:
        return ()
    queries, keys = P.B * P.Hq * P.Nq, P.B * P.Hkv * P.Nk
    family, refusal = _supporting(P, context, "backward")
    own: tuple[KernelLaunch, ...] = ()
    if context.dqkv:
        own = _explained(refusal, *family.backward(P, context, deterministic=deterministic))
    own = tuple(with_orders(P, own))
    begins = tuple(takewhile(_begins_beside_rows, own))
    before = []
    if queries:
        before.append(_rows(P, context, begins))
    before += begins
    if queries and keys:
        before.append(generic.large_scores_launch(P, context))
    after = []
    if context.dbias and queries * P.Nk and not any(launch.key.write_dbias for launch in own):
        after.append(dbias_launch(P, context))
    after += daux_launches(P, context)
    if sinks and P.Hq:
        packed = P.sequences is not None
        key = KernelKey("backward_dsinks", P.dtype.name, warps_m=ROW_WARPS, packed=packed)
        after.append(KernelLaunch(key, P.Hq))
    return (*before, *own[len(begins) :], *after)


def _supporting(
    problem: Problem, context: LaunchContext, direction: str
) -> tuple[KernelFamily, str | None]:
    """Give the first family that supports a pass, and why the one before does not."""
    refusal = None
    for family in FAMILIES:
        why = family.why_not(problem, context, direction)
        if why is None:
            break
        refusal = why
    return family, refusal and f"the {family.NAME} kernel, because {refusal}"


def _explained(refusal: str | None, *launches: KernelLaunch) -> tuple[KernelLaunch, ...]:
    """Say at the first launch why it is not of a preferred family."""
    if refusal is None or not launches:
        return launches
    first, *others = launches
    return first._replace(why=f"{refusal}; {first.why}"), *others


def _begins_beside_rows(launch: KernelLaunch) -> bool:
    return launch.key.kernel in hopper.HOPPER_BESIDE_ROWS and not launch.key.head_flags


def _rows(P: Problem, context: LaunchContext, begins: Sequence[KernelLaunch]) -> KernelLaunch:
    """Launch the kernel that computes delta, row by row, on all SMs or beside what ``begins``."""
    tiles = P.B * P.Hkv * block_count(P, P.Nk, begins[0].key.block_k) if begins else 0
    beside = tiles >= _BESIDE_WAVES * context.sm_count
    key = KernelKey(
        *("backward_preprocess", P.dtype.name),
        value_dim=bucket(min(P.Dv, MAX_HEAD_DIM)),
        warps_m=_BESIDE_WARPS if beside else ROW_WARPS,
        alignment_bytes=context.alignment_bytes,
        packed=P.sequences is not None,
    )
    lanes = key.threads // rows_of_block(key, key.value_dim)
    rows = key.threads // max(1, lanes // _VECTORS)
    grid = -(-P.B * P.Hq * padded_rows(P) // rows)
    if beside:
        grid = min(grid, -(-context.sm_count // _BESIDE_PART))
    return KernelLaunch(key, grid, why="a few lanes for each row")
