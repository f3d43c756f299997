"""What a call asks the cost model: which schedule ``"auto"`` is, and how its passes are divided."""

from collections.abc import Mapping
from operator import attrgetter

from tileattn.distributed.call import Call
from tileattn.distributed.model.cost import CPU_RATES, GPU_RATES, Cost, Rates, cost_of
from tileattn.distributed.model.memory_plan import planners
from tileattn.distributed.model.workload import Workload, workload_of
from tileattn.distributed.schedules.schedule import (
    Plan,
    Schedule,
    ScheduleName,
    every,
    schedule_of,
    why_not,
)


def plan_passes(
    call: Call, name: ScheduleName, *, backward: bool
) -> tuple[Schedule, tuple[Plan, Plan]]:
    """Return the schedule of a pass, and how it divides the forward and the backward pass.

    All ranks return the same: they use the choice of rank 0 for ``"auto"``.
    """
    work = workload_of(call)
    if name == "auto":
        costs, _ = costs_of(work, default_rates(call), on_gpu=call.on_gpu)
        name = call.comm.gather(fastest(costs)[backward])[0]
    schedule = schedule_of(name, work.ranks)
    forward, of_backward = planners(work, schedule, on_gpu=call.on_gpu)
    return schedule, (forward.plan, of_backward.plan)


def default_rates(call: Call) -> Rates:
    """Return the rates by which ``schedule="auto"`` chooses."""
    return GPU_RATES if call.on_gpu else CPU_RATES


def costs_of(
    work: Workload, rates: Rates, *, on_gpu: bool
) -> tuple[tuple[Cost, ...], Mapping[ScheduleName, str]]:
    """Return the costs of the possible schedules, and why others are not possible."""
    Hkv, ranks = work.problem.Hkv, work.ranks
    reasons = {name: why_not(name, Hkv, ranks) for name in every(Hkv, ranks)}
    costs = (
        cost_of(work, name, rates, on_gpu=on_gpu) for name, why in reasons.items() if why is None
    )
    refused = {name: why for name, why in reasons.items() if why is not None}
    return tuple(costs), refused


def fastest(costs: tuple[Cost, ...]) -> tuple[ScheduleName, ScheduleName]:
    """Return the schedules that take the least time forward and backward; the first of equals."""
    return (
        min(costs, key=attrgetter("forward.seconds")).schedule,
        min(costs, key=attrgetter("backward.seconds")).schedule,
    )
