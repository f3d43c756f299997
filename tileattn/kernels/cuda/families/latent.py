"""The Hopper kernel for latent attention (MLA): values are the first columns of the keys.

Each key is loaded once. Keys are cut into splits as for other calls of few queries.
"""

from collections.abc import Callable

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import split
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    LaunchContext,
    option_fields,
    refused,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import latent_bytes
from tileattn.kernels.cuda.families.split import LATENT, LATENT_VALUE_DIM, split_count
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, TileSize

LATENT_HEAD_DIM = 576
_TILE = TileSize(64, 64, 4, 2, 2)
_PRODUCER_WARPS = 4  # a warpgroup: registers are handed from one warpgroup to another
_LEAST_PAGE = 8  # keys: a swizzle atom has eight rows
_REFUSED = frozenset(
    {"bias", "mask", "block_mask", "score_mod", "mask_mod", "dropout_p", "cu_seqlens_q"}
)

_LATENT = "latent attention: v is a view of k"

_Clause = tuple[str, Callable[[Problem], bool]]
_UNSUPPORTED: tuple[_Clause, ...] = (
    (f"no head dimension is above {MAX_HEAD_DIM}", lambda P: max(P.D, P.Dv) <= MAX_HEAD_DIM),
    (f"the head dimension of k is above {LATENT_HEAD_DIM}", lambda P: P.D > LATENT_HEAD_DIM),
    (f"the head dimension of v is above {LATENT_VALUE_DIM}", lambda P: P.Dv > LATENT_VALUE_DIM),
    ("the head dimension of v is above that of k", lambda P: P.Dv > P.D),
    ("dtype is neither float16 nor bfloat16", lambda P: P.dtype.itemsize != 2),
    ("sequences are packed", lambda P: P.sequences is not None),
    (
        f"pages of fewer than {_LEAST_PAGE} keys, or neither divisors nor multiples of 64",
        lambda P: (
            P.page is not None and (P.page < _LEAST_PAGE or max(P.page, 64) % min(P.page, 64) > 0)
        ),
    ),
    (
        f"more than {split.MOST_ROWS:,} queries share a key head",
        lambda P: P.group * P.Nq > split.MOST_ROWS,
    ),
)


def why_not(problem: Problem, context: LaunchContext) -> str | None:
    """Why the kernel does not run a forward pass, if so."""
    why = _why_not_problem(problem)
    if why is not None:
        return why
    if context.arch != "sm_90a":
        return "the GPU is not of compute capability 9.0"
    if not problem.Nk:
        return "there are no keys"
    if not context.v_is_k:
        return "v is no view of the first columns of k"
    if context.alignment_bytes < 16:
        return "a row is not aligned to 16 bytes"
    if not context.tensor_maps:
        return "an array has an axis that is broadcast, reversed or of too long strides"
    return None


def why_not_paged(problem: Problem) -> str | None:
    """Why keys in pages do not go with a problem on any GPU, if so."""
    if max(problem.D, problem.Dv) <= MAX_HEAD_DIM:
        return split.why_not_paged(problem)
    why = _why_not_problem(problem)
    return why and f"block_table: with a head dimension above {MAX_HEAD_DIM}, and {why}"


def _why_not_problem(problem: Problem) -> str | None:
    option = refused(problem, _REFUSED)
    if option is not None:
        return f"{option} is in use"
    return next((why for why, holds in _UNSUPPORTED if holds(problem)), None)


def launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the kernel over splits, and what joins them where there are several."""
    P, splits, shared = problem, split_count(problem), latent_bytes(_TILE, LATENT_HEAD_DIM)
    key = KernelKey(
        *(LATENT, P.dtype.name, LATENT_HEAD_DIM, LATENT_VALUE_DIM, *_TILE[:6]),
        alignment_bytes=context.alignment_bytes,
        paged=P.page is not None,
        producer_warps=_PRODUCER_WARPS,
        smem_bytes=shared,
        **option_fields(P, ""),
    )
    grid = splits * P.B * P.Hkv * -(-P.group * P.Nq // key.block_q)
    box = key.block_k if P.page is None else min(P.page, key.block_k)
    latent = KernelLaunch(key, grid, shared, _LATENT, (("k", box),))
    return split.joined(P, latent)
