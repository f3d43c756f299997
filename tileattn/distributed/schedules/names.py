"""Names of the schedules, which calls they support, and how they divide a pass."""

from math import gcd
from typing import Any, NamedTuple

Schedule = str | tuple[str, int]

ACCEPTED = "'ring', 'heads', ('heads', n), 'gather', 'auto'"


def check_known(schedule: Any) -> None:
    """Raise if a schedule is unknown."""
    if not _known(schedule):
        raise ValueError(f"schedule must be one of {ACCEPTED}; got {schedule!r}")


def check_divisible(schedule: Schedule, Hkv: int, ranks: int) -> None:
    """Raise if a schedule does not support these numbers of key heads and ranks."""
    reason = why_not(schedule, Hkv, ranks)
    if reason is not None:
        others = "".join(f" or {other}" for other in combinations(Hkv, ranks))
        raise ValueError(f"schedule must be 'ring'{others}; got {schedule!r}, but {reason}")


def why_not(schedule: Schedule, Hkv: int, ranks: int) -> str | None:
    """Return why a schedule does not support these numbers of key heads and ranks, or None."""
    n = group_size(schedule, ranks)
    if ranks % n:
        return f"{ranks} ranks do not form groups of {n}"
    if Hkv % n:
        return f"k has {Hkv} heads, and {n} ranks share them"
    return None


def group_size(schedule: Schedule, ranks: int) -> int:
    """Return the number of ranks in an all-to-all group; 1 without all-to-all."""
    if isinstance(schedule, str):
        return ranks if schedule == "heads" else 1
    return schedule[1]


def combinations(Hkv: int, ranks: int) -> list[Schedule]:
    """List the schedules that combine a ring with an all-to-all inside groups."""
    common = gcd(Hkv, ranks)
    return [("heads", n) for n in range(2, min(common + 1, ranks)) if common % n == 0]


def every(Hkv: int, ranks: int) -> list[Schedule]:
    """List all schedules, with the combinations that divide the key heads and the ranks."""
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
    """How a pass is divided."""

    groups: int = 1  # head groups, computed one after the other
    splits: int = 1  # calls per block; each computes some query heads of all key heads of a group
    rows: int | None = None  # maximum queries of a call; None for no limit
    ahead: bool = False  # True if messages of one head group overlap with the matmuls of another
    only_order: bool = False  # True if only the order of tokens matters, not their positions
