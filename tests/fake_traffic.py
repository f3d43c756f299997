"""A model of traffic whose numbers are easy to work out by hand."""

from types import ModuleType
from typing import Any, NamedTuple

from tileattn.problem import Problem

PASSES_OVER = {"standard": 100, "flash1": 10, "flash2": 1}


class Moved(NamedTuple):
    """Stand in for ``tileattn.traffic.Traffic``."""

    nbytes: float


def modelled(
    problem: Problem,
    tile: tuple[int, int],
    algorithm: str = "flash2",
    kind: str = "forward",
    share: float | None = None,
) -> Moved:
    """Keys once for each block of queries, times 1, 10 or 100, and twice as much backward."""
    blocks = -(-problem.Nq // tile[0])
    keys = problem.B * problem.Hq * problem.Nk * problem.D * problem.dtype.itemsize
    passes = PASSES_OVER[algorithm] * (2 if kind == "backward" else 1)
    return Moved(passes * blocks * keys * (1.0 if share is None else share))


def flops(problem: Problem, kind: str, share: float | None) -> float:
    """Count a thousand operations for each query, twice as many backward."""
    assert share is None
    return 1e3 * problem.B * problem.Hq * problem.Nq * (2 if kind == "backward" else 1)


def module() -> Any:
    """Make a module of them."""
    made: Any = ModuleType("tileattn.traffic")
    made.ALGORITHMS, made.modelled, made.flops = tuple(PASSES_OVER), modelled, flops
    return made
