"""Keys in pages, of many rows: the Hopper kernel takes sequences of many queries."""

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import hopper, latent, split
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext, refused
from tileattn.kernels.cuda.families.family import Family, reads_pages
from tileattn.kernels.cuda.families.size_class import FEW_ROWS, MOST_ROWS, shared_rows
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM

_FEW = "sequences of which {} rows or fewer share keys"


class Pages(Family):
    """More rows than split-KV takes, over keys in pages."""

    name = "the Hopper kernel over pages"

    def concerns(self, problem: Problem, context: LaunchContext, direction: str) -> bool:  # noqa: ARG002 - the interface of families
        """Return True if keys are in pages, and more rows share them than split-KV takes."""
        P = problem
        few = shared_rows(P) <= FEW_ROWS
        narrow = max(P.D, P.Dv) <= MAX_HEAD_DIM
        return direction == "forward" and reads_pages(P) and narrow and not few

    def why_not(self, problem: Problem, context: LaunchContext, direction: str) -> str | None:  # noqa: ARG002 - the interface of families
        """Return why no kernel reads the pages; None if one does."""
        return split.why_not(problem, context)

    def forward(self, problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
        """Return the Hopper kernel, the split kernel, or both if sequences are packed.

        Which of them takes a sequence depends only on its own queries, and so do its bits.
        """
        P, few = problem, split.launch_over_splits(problem, context)
        refusal = _why_not_hopper(P, context)
        if refusal is not None:
            return (few._replace(why=f"not the Hopper kernel, because {refusal}; {few.why}"),)
        many = hopper.forward_launch(P, context)
        if not P.is_packed:
            return (many,)
        return many, few._replace(why=_FEW.format(FEW_ROWS))


PAGES = Pages()


def _why_not_hopper(problem: Problem, context: LaunchContext) -> str | None:
    option = refused(problem, "mask_mod")
    if option is not None:
        return f"{option} is in use"
    return hopper.why_not(problem, context, "forward")


def why_not_paged(problem: Problem) -> str | None:
    """Return why no kernel reads pages for a call, on any GPU; None if one does."""
    P = problem
    if max(P.D, P.Dv) > MAX_HEAD_DIM:
        why = latent.why_not_problem(P)
        return why and f"block_table: with a head dimension above {MAX_HEAD_DIM}, and {why}"
    option = refused(P, "has_block_mask", "has_dropout")
    if option is not None:
        return f"block_table: with {option}"
    if shared_rows(P) > MOST_ROWS:
        return f"block_table: with more than {MOST_ROWS:,} queries that share a key head"
    return None
