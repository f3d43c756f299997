"""Predicted time of a schedule: an alpha-beta model of links, and a FLOP rate.

References
----------
Hockney, The communication challenge for MPP, Parallel Computing 20, 1994.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.layout import Layout, layout_across
from tileattn.distributed.model.memory_plan import PassPlanner, planners
from tileattn.distributed.model.message_counts import (
    Sent,
    attending_ranks,
    exchanged,
    gathered,
    passed_on,
)
from tileattn.distributed.model.workload import Workload, flops_per_pair
from tileattn.distributed.schedules.names import Schedule, group_size
from tileattn.distributed.visibility import BlockCounts

Array = NDArray[Any]


@dataclass(frozen=True)
class Link:
    """How fast a rank sends.

    Parameters
    ----------
    latency : float
        Seconds per message.
    bandwidth : float
        Bytes per second.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Rates:
    """How fast ranks compute and send; by default ranks with eight cores of one server each.

    ``schedule="auto"`` uses ``CPU_RATES`` or ``GPU_RATES``, which also have the cost of a block.

    Parameters
    ----------
    flops : float
        FLOP/s that attention reaches on a rank.
    link : Link
        Between any two ranks.
    host_link : Link or None
        Between ranks of one host, if that is faster.
    ranks_per_host : int
        Number of consecutive ranks on one host.
    block : Link
        Seconds per call of a block besides its FLOPs, and bytes per second at which its results
        are added to other results; free by default.
    on_gpu : bool
        True if each rank has a GPU: then head groups are large enough to occupy it.

    Examples
    --------
    Hosts with eight GPUs, NVLink inside a host, and 400 Gbit/s InfiniBand per GPU:

    >>> from tileattn.distributed import Link, Rates
    >>> rates = Rates(5e14, Link(1e-5, 4e10), host_link=Link(5e-6, 3e11), ranks_per_host=8)
    """

    flops: float = 2e11
    link: Link = Link(2e-5, 5e9)
    host_link: Link | None = None
    ranks_per_host: int = 1
    block: Link = Link(0.0, float("inf"))
    on_gpu: bool = False

    def __post_init__(self) -> None:
        links = [x for x in (self.link, self.host_link, self.block) if x is not None]
        for name, x in (("flops", self.flops), *(("bandwidth", x.bandwidth) for x in links)):
            if not x > 0:
                raise ValueError(f"{name} must be positive; got {x}")
        for link in links:
            if not link.latency >= 0:
                raise ValueError(f"latency must be non-negative; got {link.latency}")
        if self.ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1; got {self.ranks_per_host}")

    def between(self, *, on_host: bool) -> Link:
        """Return the link between ranks that are all on one host, or are not."""
        return self.host_link if on_host and self.host_link is not None else self.link


# Ranks with eight cores of one server, and with a Hopper GPU of a host with NVLink.
CPU_RATES = Rates(block=Link(5e-5, 4e9))
GPU_RATES = Rates(
    *(6.3e14, Link(5e-5, 4e10), Link(2e-5, 2.3e11), 8), block=Link(2e-5, 7e11), on_gpu=True
)


class PassCost(NamedTuple):
    """Cost of one pass.

    Parameters
    ----------
    messages, nbytes : int
        The most that a rank sends.
    seconds : float
        Predicted time of the slowest rank.
    groups : int
        Number of head groups, computed one after the other.
    held : int
        The most bytes of inputs, results and buffers on a rank, without ``bias`` and ``mask``.
    share : float
        ``held`` relative to an equal share of what one call on one device holds.
    """

    messages: int
    nbytes: int
    seconds: float
    groups: int
    held: int
    share: float


class Cost(NamedTuple):
    """Cost of a schedule.

    Parameters
    ----------
    schedule : str or (str, int)
        As ``tileattn.distributed.forward`` takes it.
    forward, backward : PassCost
        Cost of each pass; backward computes all gradients.
    """

    schedule: Schedule
    forward: PassCost
    backward: PassCost

    @property
    def seconds(self) -> float:
        """Predicted time of both passes."""
        return self.forward.seconds + self.backward.seconds


def cost_of(work: Workload, schedule: Schedule, rates: Rates, *, on_gpu: bool) -> Cost:
    """Predict both passes of a schedule that the call supports."""
    n, held = group_size(schedule, work.ranks), planners(work, schedule, on_gpu=on_gpu)
    plans = [x.plan for x in held]
    matmuls = _computing(work, schedule, rates, held)
    whole = rates.between(on_host=work.ranks <= rates.ranks_per_host)
    if schedule == "gather":
        keys, gradients = gathered(work)
        returned = Sent(*map(np.zeros_like, gradients)), gradients
        sent, seconds = [], []
        for plan, whole_back, own in zip(plans, returned, matmuls, strict=True):
            there, back = keys.in_groups(plan.groups), whole_back.in_groups(plan.groups)
            sent.append(there.plus(back))
            travel = _seconds(there, whole)
            first = travel / plan.groups if plan.ahead else travel
            seconds.append(first + max(own, travel - first) + _seconds(back, whole))
    else:
        inside = rates.between(
            on_host=work.ranks <= rates.ranks_per_host or rates.ranks_per_host % n == 0
        )
        groups = [plan.groups for plan in plans]
        heads, ring = exchanged(work, n, groups), passed_on(work, n, groups)
        sent = [x.plus(y) for x, y in zip(heads, ring, strict=True)]
        # Ring messages overlap with computation; the all-to-all does not.
        seconds = [
            _seconds(x, inside) + max(_seconds(y, whole), own)
            for x, y, own in zip(heads, ring, matmuls, strict=True)
        ]
    costs = (
        PassCost(
            *(int(x.messages.max()), int(x.nbytes.max()), float(time), plan.groups),
            *((nbytes := one.nbytes(plan)), nbytes / one.fair_share if one.fair_share else 1.0),
        )
        for x, time, plan, one in zip(sent, seconds, plans, held, strict=True)
    )
    return Cost(schedule, *costs)


def _seconds(sent: Sent, link: Link) -> float:
    """Return the time of the rank that sends for longest."""
    return float(np.max(sent.messages * link.latency + sent.nbytes / link.bandwidth))


def _computing(
    work: Workload, schedule: Schedule, rates: Rates, held: tuple[PassPlanner, PassPlanner]
) -> Array:
    """Return the time of both passes on the rank that computes for longest.

    A block takes one call for each head group, each split of its heads and each cut of its queries.
    """
    P, n, plans = work.problem, group_size(schedule, work.ranks), [x.plan for x in held]
    pairs = work.visibility.pairs(work.q_layout).reshape(-1, n).sum(axis=1)
    filled = [
        x.occupancy(plan) if rates.on_gpu else 1.0 for x, plan in zip(held, plans, strict=True)
    ]
    matmuls = np.array([[flops_per_pair(P, backward=x > 0) / y] for x, y in enumerate(filled)])
    flops = pairs * (P.Hq // n) * matmuls
    gathers, lengths = schedule == "gather", _lengths(work, n)
    blocks = _blocks(work, n, lengths, gathers=gathers)
    # Sums over blocks: out, dq, dk and dv. On a GPU the first result of a query is written in
    # place, and copies take as long as sums.
    queries, of_keys = (P.B * heads // n * P.accum_dtype.itemsize for heads in (P.Hq, P.Hkv))
    added = blocks.queries - rates.on_gpu * lengths[0]
    out = added * (queries * P.Dv)
    gradients = added * (queries * P.D) + blocks.keys * (of_keys * (P.D + P.Dv))
    moved = np.stack([out, gradients])
    if rates.on_gpu:
        moved = moved + _copied(work, n, lengths, gathers=gathers)
    calls = [x.calls(plan) for x, plan in zip(held, plans, strict=True)]
    starts = np.stack([blocks.number * number for number in calls]) * rates.block.latency
    slowest: Array = (flops / rates.flops + starts + moved / rates.block.bandwidth).max(axis=1)
    return slowest


def _copied(work: Workload, n: int, lengths: tuple[Array, Array], *, gathers: bool) -> Array:
    """Count the bytes that a rank copies into place: all keys, or its heads of all tokens."""
    P, (queries, keys) = work.problem, lengths
    each = P.B * (P.D + P.Dv) * P.dtype.itemsize
    if gathers:
        return np.full(2, keys.sum() * P.Hkv * each)[:, np.newaxis]
    if n == 1:
        return np.zeros((2, 1))
    of_heads = (queries * (P.Hq // n) + keys * (P.Hkv // n)) * each
    return np.stack([of_heads, 2 * of_heads])


def _blocks(work: Workload, n: int, lengths: tuple[Array, Array], *, gathers: bool) -> BlockCounts:
    """Count the blocks of each rank: one for each rank whose keys it gets, or for each segment."""
    queries, keys = layout_across(work.q_layout, n), layout_across(work.k_layout, n)
    if gathers or not work.only_order:
        whole = Layout.contiguous([keys.length]) if gathers else keys
        return work.visibility.blocks(queries, whole)
    number, attended = np.zeros((2, queries.ranks))
    for ranks, length in zip(attending_ranks(work, queries, keys), lengths[1], strict=True):
        number += ranks
        attended += ranks * length
    return BlockCounts(number, number * lengths[0], attended)


def _lengths(work: Workload, n: int) -> tuple[Array, Array]:
    """Count the queries and keys of each group of n ranks."""
    queries, keys = (
        np.array([x.length_of(rank) for rank in range(x.ranks)], np.float64).reshape(-1, n)
        for x in (work.q_layout, work.k_layout)
    )
    return queries.sum(axis=1), keys.sum(axis=1)
