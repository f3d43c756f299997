"""The schedules: one record each, with its passes and the facts from which costs are predicted."""

from collections.abc import Iterable
from math import gcd
from typing import Any, NamedTuple, Protocol

from tileattn.distributed.schedules import gather, ring, ulysses
from tileattn.distributed.schedules.head_groups import BackwardGroup, ForwardGroup

ScheduleName = str | tuple[str, int]  # as callers pass it


class ForwardPass(Protocol):
    """Compute the head groups of a forward pass, one after the other."""

    def __call__(self, groups: Iterable[ForwardGroup], *, ahead: bool) -> None:
        """With ``ahead``, messages of one head group overlap with the matmuls of another."""


class BackwardPass(Protocol):
    """Compute the head groups of a backward pass, one after the other."""

    def __call__(self, groups: Iterable[BackwardGroup], *, ahead: bool) -> None:
        """With ``ahead``, messages of one head group overlap with the matmuls of another."""


class Schedule(NamedTuple):
    """How ranks exchange arrays during both passes.

    Its messages are counted in ``model/message_counts.py``, by ``name``.
    """

    name: str
    forward: ForwardPass
    backward: BackwardPass
    group_size: int = 1  # ranks of an all-to-all group, which exchange heads
    gathers_keys: bool = False  # True if all keys of a head group arrive before its matmuls
    is_one_call: bool = False  # True if one call computes a head group: no partial sums
    between_groups: "Schedule | None" = None  # schedule between all-to-all groups, if they are many


class Plan(NamedTuple):
    """How a pass is divided."""

    groups: int = 1  # head groups, computed one after the other
    splits: int = 1  # calls per block; each computes some query heads of all key heads of a group
    rows: int | None = None  # maximum queries of a call; None for no limit
    ahead: bool = False  # True if messages of one head group overlap with the matmuls of another
    only_order: bool = False  # True if only the order of tokens matters, not their positions


RING = Schedule("ring", ring.forward, ring.backward)
ULYSSES = Schedule(
    "heads", ulysses.forward, ulysses.backward, is_one_call=True, between_groups=RING
)
GATHER = Schedule("gather", gather.forward, gather.backward, gathers_keys=True)

SCHEDULES = {schedule.name: schedule for schedule in (RING, ULYSSES, GATHER)}


def schedule_of(name: ScheduleName, ranks: int) -> Schedule:
    """Return the schedule with this name for a number of ranks."""
    kind, n = (name, ranks) if isinstance(name, str) else name
    schedule = SCHEDULES[kind]
    if schedule.between_groups is None:
        return schedule
    return (schedule if n == ranks > 1 else schedule.between_groups)._replace(group_size=n)


def check_known(name: Any) -> None:
    """Raise if there is no schedule with this name."""
    if not _is_known(name):
        accepted = (f"{x!r}, ({x!r}, n)" if _takes_size(x) else repr(x) for x in SCHEDULES)
        raise ValueError(f"schedule must be one of {', '.join(accepted)}, 'auto'; got {name!r}")


def check_divisible(name: ScheduleName, Hkv: int, ranks: int) -> None:
    """Raise if a schedule does not support these numbers of key heads and ranks."""
    reason = why_not(name, Hkv, ranks) if name != "auto" else None
    if reason is not None:
        others = (x for kind in SCHEDULES for x in _combinations(kind, Hkv, ranks))
        possible = " or ".join(map(repr, (RING.name, *others)))
        raise ValueError(f"schedule must be {possible}; got {name!r}, but {reason}")


def why_not(name: ScheduleName, Hkv: int, ranks: int) -> str | None:
    """Return why a schedule does not support these numbers of key heads and ranks, or None."""
    n = schedule_of(name, ranks).group_size
    if ranks % n:
        return f"{ranks} ranks do not form groups of {n}"
    if Hkv % n:
        return f"k has {Hkv} heads, and {n} ranks share them"
    return None


def every(Hkv: int, ranks: int) -> list[ScheduleName]:
    """List all schedules, with the group sizes that divide the key heads and the ranks."""
    return [x for kind in SCHEDULES for x in (*_combinations(kind, Hkv, ranks), kind)]


def _combinations(kind: str, Hkv: int, ranks: int) -> list[ScheduleName]:
    """List the possible group sizes of a schedule: more than one rank, and more than one group."""
    common = gcd(Hkv, ranks)
    sizes = range(2, min(common + 1, ranks)) if _takes_size(kind) else ()
    return [(kind, n) for n in sizes if common % n == 0]


def _is_known(name: Any) -> bool:
    if isinstance(name, str):
        return name in SCHEDULES or name == "auto"
    if not isinstance(name, tuple | list) or len(name) != 2:
        return False
    kind, n = name
    is_count = isinstance(n, int) and not isinstance(n, bool) and n >= 1
    return isinstance(kind, str) and kind in SCHEDULES and _takes_size(kind) and is_count


def _takes_size(kind: str) -> bool:
    """Return True if callers may pass a schedule with a group size."""
    return SCHEDULES[kind].between_groups is not None
