"""The ways for ranks to share a call, by name, and which of them go with it."""

from math import gcd
from typing import Any, NamedTuple

Schedule = str | tuple[str, int]

ACCEPTED = "'ring', 'heads', ('heads', n), 'gather', 'auto'"


def check_known(schedule: Any) -> None:
    """Raise if there is no such schedule."""
    if not _known(schedule):
        raise ValueError(f"schedule is {schedule!r}; accepted are {ACCEPTED}")


def check(schedule: Schedule, Hkv: int, ranks: int) -> None:
    """Raise if a schedule does not go with so many heads and ranks."""
    reason = why_not(schedule, Hkv, ranks)
    if reason is not None:
        others = "".join(f", and {other}" for other in combinations(Hkv, ranks))
        raise ValueError(f"schedule is {schedule!r}: {reason}; schedule='ring' is accepted{others}")


def why_not(schedule: Schedule, Hkv: int, ranks: int) -> str | None:
    """Why a schedule does not go with so many heads of k and ranks."""
    n = group_size(schedule, ranks)
    if ranks % n:
        return f"{ranks} ranks do not form groups of {n}"
    if Hkv % n:
        return f"k has {Hkv} heads, and {n} ranks share them"
    return None


def group_size(schedule: Schedule, ranks: int) -> int:
    """Count the ranks that exchange tokens for heads: 1 where none do."""
    if isinstance(schedule, str):
        return ranks if schedule == "heads" else 1
    return schedule[1]


def combinations(Hkv: int, ranks: int) -> list[Schedule]:
    """List the schedules between a ring and an exchange of heads among all ranks."""
    common = gcd(Hkv, ranks)
    return [("heads", n) for n in range(2, min(common + 1, ranks)) if common % n == 0]


def every(Hkv: int, ranks: int) -> list[Schedule]:
    """List the schedules that have a name of their own, and the combinations that go with both."""
    return ["ring", *combinations(Hkv, ranks), "heads", "gather"]


def _known(schedule: Any) -> bool:
    if isinstance(schedule, str):
        return schedule in ("ring", "heads", "gather", "auto")
    if not isinstance(schedule, tuple | list) or len(schedule) != 2:
        return False
    name, n = schedule
    is_count = isinstance(n, int) and not isinstance(n, bool) and n >= 1
    return isinstance(name, str) and name == "heads" and is_count


class Plan(NamedTuple):
    """How a pass is divided.

    Parameters
    ----------
    groups : int
        Groups of the heads of a rank, one after the other.
    splits : int
        Calls of a block, each of some of the query heads of all its key heads.
    rows : int or None
        Queries of a call, at most; None is all that there are.
    ahead : bool
        Whether messages of one group are under way while another is computed.
    only_order : bool
        Whether of the positions of tokens nothing but their order counts.
    """

    groups: int = 1
    splits: int = 1
    rows: int | None = None
    ahead: bool = False
    only_order: bool = False
