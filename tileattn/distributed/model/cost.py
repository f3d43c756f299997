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
from tileattn.distributed.model.message_counts import MessageCounts, counts_of, lengths_of
from tileattn.distributed.model.workload import Workload, flops_per_pair
from tileattn.distributed.schedules.schedule import Schedule, ScheduleName, schedule_of
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

    schedule: ScheduleName
    forward: PassCost
    backward: PassCost

    @property
    def seconds(self) -> float:
        """Predicted time of both passes."""
        return self.forward.seconds + self.backward.seconds


def cost_of(work: Workload, name: ScheduleName, rates: Rates, *, on_gpu: bool) -> Cost:
    """Predict both passes of a schedule that the call supports."""
    schedule = schedule_of(name, work.ranks)
    n, passes = schedule.group_size, planners(work, schedule, on_gpu=on_gpu)
    one_host, whole_groups = work.ranks <= rates.ranks_per_host, rates.ranks_per_host % n == 0
    everywhere, inside = (rates.between(on_host=x) for x in (one_host, one_host or whole_groups))
    links = inside, everywhere, everywhere
    messages = counts_of(work, schedule, [x.plan.groups for x in passes])
    computing = _computing(work, schedule, rates, passes)
    costs = []
    for x, own, counts in zip(passes, computing, messages, strict=True):
        before, during, after = map(_seconds, counts, links)
        if schedule.gathers_keys:  # the keys of the first head group arrive before its matmuls
            before = during / x.plan.groups if x.plan.ahead else during
            during -= before
        seconds = before + max(during, own) + after
        count, nbytes = (int(y) for y in np.sum(counts, axis=0).max(axis=1))
        held = x.nbytes(x.plan)
        share = held / x.fair_share if x.fair_share else 1.0
        costs.append(PassCost(count, nbytes, float(seconds), x.plan.groups, held, share))
    return Cost(name, *costs)


def _seconds(counts: MessageCounts, link: Link) -> float:
    """Return the time of the rank that sends for longest."""
    messages, nbytes = counts
    return float(np.max(messages * link.latency + nbytes / link.bandwidth))


def _computing(
    work: Workload, schedule: Schedule, rates: Rates, passes: tuple[PassPlanner, PassPlanner]
) -> Array:
    """Return the time of both passes on the rank that computes for longest.

    A block takes one call for each head group, each split of its heads and each cut of its queries.
    """
    P, n, gathers = work.problem, schedule.group_size, schedule.gathers_keys
    layouts = layout_across(work.q_layout, n), layout_across(work.k_layout, n)
    queries, keys = map(lengths_of, layouts)
    occupancy = [x.occupancy(x.plan) if rates.on_gpu else 1.0 for x in passes]
    matmuls = [[flops_per_pair(P, backward=x > 0) / y] for x, y in enumerate(occupancy)]
    pairs = work.visibility.pairs(work.q_layout).reshape(-1, n).sum(axis=1)
    flops = pairs * (P.Hq // n) * np.array(matmuls)
    blocks = _blocks(work, *layouts, gathers=gathers)
    # Results of blocks that are added: out; dq, dk and dv. On a GPU the first result of a query is
    # written in place, and copies take as long as sums.
    of_query, of_key = (P.B * heads // n * P.accum_dtype.itemsize for heads in (P.Hq, P.Hkv))
    added = blocks.queries - rates.on_gpu * queries
    gradients = added * (of_query * P.D) + blocks.keys * (of_key * (P.D + P.Dv))
    moved = np.stack([added * (of_query * P.Dv), gradients])
    if rates.on_gpu:  # the bytes that are copied into place: all keys, or heads of all tokens
        each = P.B * (P.D + P.Dv) * P.dtype.itemsize
        if gathers:
            moved += keys.sum() * P.Hkv * each
        elif n > 1:
            moved += [[1], [2]] * (queries * (P.Hq // n) + keys * (P.Hkv // n)) * each
    calls = np.array([[x.calls(x.plan)] for x in passes])
    starts = blocks.number * calls * rates.block.latency
    slowest: Array = (flops / rates.flops + starts + moved / rates.block.bandwidth).max(axis=1)
    return slowest


def _blocks(work: Workload, queries: Layout, keys: Layout, *, gathers: bool) -> BlockCounts:
    """Count the blocks of each rank: one for each rank whose keys it gets, or for each segment."""
    if gathers or not work.only_order:
        whole = Layout.contiguous([keys.length]) if gathers else keys
        return work.visibility.blocks(queries, whole)
    number, attended = np.zeros((2, queries.ranks))
    attending = work.visibility.attending(queries, keys)
    for ranks, length in zip(attending, lengths_of(keys), strict=True):
        number += ranks
        attended += ranks * length
    return BlockCounts(number, number * lengths_of(queries), attended)
