"""The Hopper kernel for latent attention (MLA): values are the first columns of the keys.

Each key is loaded once. Keys are split as for other calls of few queries.
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
from tileattn.kernels.cuda.families.family import Family
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
from tileattn.kernels.cuda.tuning import TileSize

LATENT = "forward_latent_sm90"
LATENT_VALUE_DIM = 512
LATENT_HEAD_DIM = 576
_TILE = TileSize(64, 64, 4, 2, 2)
_PRODUCER_WARPS = 4  # a warpgroup: registers are handed from one warpgroup to another
_LEAST_PAGE = 8  # keys: a swizzle atom has eight rows

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
_UNSUPPORTED_ARRAYS: tuple[tuple[str, Callable[[Problem, LaunchContext], bool]], ...] = (
    ("the GPU is not of compute capability 9.0", lambda _, context: context.arch != "sm_90a"),
    ("there are no keys", lambda P, _: "Nk" in empty_axes(P)),
    ("v is no view of the first columns of k", lambda _, context: not context.v_is_k),
    ("a row is not aligned to 16 bytes", lambda _, context: context.alignment_bytes < 16),
    (
        "an array has an axis that is broadcast, reversed or of too long strides",
        lambda _, context: not context.tensor_maps,
    ),
)


class Latent(Family):
    """Heads wider than `MAX_HEAD_DIM`, of which v is a view of k."""

    name = "latent attention"

    def concerns(self, problem: Problem, context: LaunchContext, direction: str) -> bool:  # noqa: ARG002 - the interface of families
        """Return True for the forward pass of wide heads."""
        return direction == "forward" and max(problem.D, problem.Dv) > MAX_HEAD_DIM

    def why_not(self, problem: Problem, context: LaunchContext, direction: str) -> str | None:  # noqa: ARG002 - the interface of families
        """Return why the kernel does not run a pass; None if it does."""
        clauses = (why for why, holds in _UNSUPPORTED_ARRAYS if holds(problem, context))
        return why_not_problem(problem) or next(clauses, None)

    def forward(self, problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
        """Return the kernel over splits, and the one that joins them."""
        P, shared = problem, latent_bytes(_TILE, LATENT_HEAD_DIM)
        keys = split_keys(P, context.tuning)
        key = KernelKey(
            *(LATENT, P.dtype.name, LATENT_HEAD_DIM, LATENT_VALUE_DIM, *_TILE[:6]),
            alignment_bytes=context.alignment_bytes,
            paged=P.is_paged,
            producer_warps=_PRODUCER_WARPS,
            smem_bytes=shared,
            **option_fields(P, ""),
        )
        grid = Grid("splits", key.block_q, split_keys=keys)
        box = key.block_k if P.page is None else min(P.page, key.block_k)
        traits = KernelTraits(main=True, split_keys=keys, loads_v_with_k=True)
        launch = KernelLaunch(key, grid, shared, _LATENT, (("k", box),), traits=traits)
        return split.joined(P, context, launch)


LATENT_FAMILY = Latent()


def why_not_problem(problem: Problem) -> str | None:
    """Return why the kernel does not support a call, whatever its arrays are; None if it does."""
    option = refused(
        *(problem, "has_bias", "has_block_mask", "has_dropout", "has_mask", "mask_mod", "score_mod")
    )
    if option is not None:
        return f"{option} is in use"
    return next((why for why, holds in _UNSUPPORTED if holds(problem)), None)
