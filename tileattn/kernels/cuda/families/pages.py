"""Keys in pages that more rows share than split-KV takes: the Hopper kernel, if it can."""

from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import hopper, latent, split
from tileattn.kernels.cuda.families.context import KernelLaunch, LaunchContext, refused
from tileattn.kernels.cuda.families.family import Family, reads_pages
from tileattn.kernels.cuda.families.size_class import FEW_ROWS, MOST_ROWS, shared_rows
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM


def _concerns(problem: Problem, _: LaunchContext) -> bool:
    P, narrow = problem, max(problem.D, problem.Dv) <= MAX_HEAD_DIM
    return reads_pages(P) and narrow and (shared_rows(P) > FEW_ROWS or P.is_invariant)


def _why_not_hopper(problem: Problem, context: LaunchContext) -> str | None:
    option = refused(problem, "mask_mod")
    return hopper.why_not_forward(problem, context) if option is None else f"{option} is in use"


def _why_not(problem: Problem, context: LaunchContext) -> str | None:
    why = split.why_not(problem, context)
    return why or (_why_not_hopper(problem, context) if problem.is_invariant else None)


def _launches(problem: Problem, context: LaunchContext) -> tuple[KernelLaunch, ...]:
    """Launch the Hopper kernel, the split-KV kernel, or both if sequences are packed.

    Which of both takes a sequence depends only on its own queries, and so do its bits.
    """
    P = problem
    if P.is_invariant:
        return (hopper.forward_launch(P, context),)
    few, refusal = split.launches_over_splits(P, context), _why_not_hopper(P, context)
    if refusal is not None:
        why = f"not the Hopper kernel, because {refusal}; {few[0].why}"
        return few[0]._replace(why=why), *few[1:]
    many = hopper.forward_launch(P, context)
    others = (x._replace(traits=replace(x.traits, main=False)) for x in few)
    return (many, *others) if P.is_packed else (many,)


PAGES_FAMILY = Family(
    "the Hopper kernel over pages", _launches, _why_not, _concerns, invariant=True
)


def _why_not_invariant(P: Problem) -> str | None:
    """Return what an invariant call over a cache may not have; empty for any such call."""
    if P.is_quantised:
        return ""
    if P.dtype.itemsize != 2:
        return f" in {P.dtype}"
    if P.mask_mod is not None:
        return f" and {P.option_of('mask_mod')}"
    return " and Dv that is not a multiple of 8" if P.Dv % 8 > 0 else None


def why_not_cache(problem: Problem) -> str | None:
    """Return why no kernel reads the cache of a call, on any GPU; None if one does.

    A cache has its keys in pages, or keys and values of 8 bits.
    """
    P, what = problem, "k_descale and v_descale" if problem.is_quantised else "block_table"
    if max(P.D, P.Dv) > MAX_HEAD_DIM:
        why = "k and v have 8 bits" if P.is_quantised else latent.why_not_problem(P)
        return why and f"{what}: with a head dimension above {MAX_HEAD_DIM}, and {why}"
    option = refused(P, "has_block_mask", "has_dropout")
    if option is not None:
        return f"{what}: with {option}"
    if P.is_invariant and (why := _why_not_invariant(P)) is not None:
        return f"{what}: with invariant{why}"
    if shared_rows(P) > MOST_ROWS:
        return f"{what}: with more than {MOST_ROWS:,} queries that share a key head"
    return None
