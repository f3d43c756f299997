"""The Hopper kernel for latent attention (MLA): heads above 256, whose v is a view of k.

Values are the first columns of the keys, so each key is loaded once. Keys are split as in split-KV.
"""

from collections.abc import Callable

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import split
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    KernelTraits,
    LaunchContext,
    option_fields,
    refused,
)
from tileattn.kernels.cuda.families.family import (
    NO_TENSOR_MAPS,
    NOT_ALIGNED,
    NOT_HOPPER,
    Clause,
    Family,
    first_reason,
)
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.shared_memory import latent_bytes
from tileattn.kernels.cuda.families.size_class import (
    MOST_ROWS,
    empty_axes,
    shared_rows,
    split_keys,
)
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM
from tileattn.kernels.cuda.tile_sizes import TileSize

LATENT = "forward_latent_sm90"
LATENT_VALUE_DIM = 512
LATENT_HEAD_DIM = 576
_TILE = TileSize(64, 64, 4, 2, 2)
_PRODUCER_WARPS = 4  # one warpgroup, because setmaxnreg moves registers between warpgroups
_LEAST_PAGE = 8  # keys: the rows of a swizzle atom

_LATENT = "latent attention: v is a view of k"

_UNSUPPORTED: tuple[tuple[str, Callable[[Problem], bool]], ...] = (
    (f"no head dimension is above {MAX_HEAD_DIM}", lambda P: max(P.D, P.Dv) <= MAX_HEAD_DIM),
    (f"the head dimension of k is above {LATENT_HEAD_DIM}", lambda P: P.D > LATENT_HEAD_DIM),
    (f"the head dimension of v is above {LATENT_VALUE_DIM}", lambda P: P.Dv > LATENT_VALUE_DIM),
    ("the head dimension of v is above that of k", lambda P: P.Dv > P.D),
    ("dtype is neither float16 nor bfloat16", lambda P: P.dtype.itemsize != 2),
    ("sequences are packed", lambda P: P.is_packed),
    (
        f"pages of fewer than {_LEAST_PAGE} keys, or neither divisors nor multiples of 64",
        lambda P: (
            P.page is not None and (P.page < _LEAST_PAGE or max(P.page, 64) % min(P.page, 64) > 0)
        ),
    ),
    (
        f"more than {MOST_ROWS:,} queries share a key head",
        lambda P: shared_rows(P) > MOST_ROWS,
    ),
)
_UNSUPPORTED_ARRAYS: tuple[Clause, ...] = (
    NOT_HOPPER,
    ("there are no keys", lambda P, _: "Nk" in empty_axes(P)),
    ("v is not a view of the first columns of k", lambda _, context: not context.v_is_k),
    NOT_ALIGNED,
    NO_TENSOR_MAPS,
)


def why_not_problem(problem: Problem) -> str | None:
    """Return why the kernel does not support a call with any arrays on any GPU; None if it may."""
    option = refused(
        *(problem, "is_invariant", "has_bias", "has_block_mask", "has_dropout", "has_mask"),
        *("mask_mod", "score_mod"),
    )
    if option is not None:
        return f"{option} is in use"
    return next((why for why, holds in _UNSUPPORTED if holds(problem)), None)


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    return why_not_problem(problem) or first_reason(_UNSUPPORTED_ARRAYS, problem, context)


def _launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    P, shared = problem, latent_bytes(_TILE, LATENT_HEAD_DIM)
    keys = split_keys(P, context.tuning)
    key = KernelKey(
        *(LATENT, P.dtype.name, LATENT_HEAD_DIM, LATENT_VALUE_DIM, *_TILE[:6]),
        alignment_bytes=context.alignment_bytes,
        paged=P.is_paged,
        producer_warps=_PRODUCER_WARPS,
        smem_bytes=shared,
        **option_fields(P, context),
    )
    grid = Grid("splits", key.block_q, split_keys=keys)
    box = key.block_k if P.page is None else min(P.page, key.block_k)
    traits = KernelTraits(main=True, split_keys=keys, loads_v_with_k=True)
    launch = KernelLaunch(key, grid, shared, _LATENT, (("k", box),), traits=traits)
    return split.joined(P, context, launch)


LATENT_FAMILY = Family(
    "latent attention", _launches, _why_not, lambda P, _: max(P.D, P.Dv) > MAX_HEAD_DIM
)
