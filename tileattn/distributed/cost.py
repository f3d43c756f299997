"""How long a schedule takes: an alpha-beta model of links, and a FLOP rate.

References
----------
Hockney, The communication challenge for MPP, Parallel Computing 20, 1994.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.groups import layout_across
from tileattn.distributed.layout import Layout
from tileattn.distributed.schedules import Schedule, group_size
from tileattn.distributed.sent import Sent, Workload, exchanged, gathered, passed_on

Array = NDArray[Any]


@dataclass(frozen=True)
class Link:
    """How fast a rank sends.

    Parameters
    ----------
    latency : float
        Seconds for each message.
    bandwidth : float
        Bytes in a second.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Rates:
    """How fast ranks compute and send; the defaults are ranks with eight cores of one server.

    ``CPU_RATES`` and ``GPU_RATES`` have the cost of a block, too; ``schedule="auto"`` goes by them.

    Parameters
    ----------
    flops : float
        FLOPs in a second that attention reaches on a rank.
    link : Link
        Of a rank to any other.
    host_link : Link or None
        Of a rank to those of its host, where that is faster.
    ranks_per_host : int
        Consecutive ranks of one host, which ``host_link`` joins.
    block : Link
        Seconds that a block takes beside its FLOPs, and bytes in a second at which its results are
        added to those of others; free by default.

    Examples
    --------
    Hosts with eight GPUs, joined by NVLink and by InfiniBand of 400 Gbit/s for each GPU:

    >>> from tileattn.distributed import Link, Rates
    >>> rates = Rates(5e14, Link(1e-5, 4e10), host_link=Link(5e-6, 3e11), ranks_per_host=8)
    """

    flops: float = 2e11
    link: Link = Link(2e-5, 5e9)
    host_link: Link | None = None
    ranks_per_host: int = 1
    block: Link = Link(0.0, float("inf"))

    def __post_init__(self) -> None:
        links = [x for x in (self.link, self.host_link, self.block) if x is not None]
        for name, x in (("flops", self.flops), *(("bandwidth", x.bandwidth) for x in links)):
            if not x > 0:
                raise ValueError(f"{name} is {x}; more than 0 is accepted")
        for link in links:
            if not link.latency >= 0:
                raise ValueError(f"latency is {link.latency}; 0 or more is accepted")
        if self.ranks_per_host < 1:
            raise ValueError(f"ranks_per_host is {self.ranks_per_host}; 1 or more is accepted")

    def between(self, *, on_host: bool) -> Link:
        """Give the link of ranks that are, or are not, all on one host."""
        return self.host_link if on_host and self.host_link is not None else self.link


# Ranks with eight cores of one server, and with a Hopper GPU of a host with NVLink.
CPU_RATES = Rates(block=Link(5e-5, 4e9))
GPU_RATES = Rates(6e14, Link(2e-5, 5e10), Link(1e-5, 3e11), 8, block=Link(5e-5, 4e11))


class PassCost(NamedTuple):
    """What one pass costs.

    Parameters
    ----------
    messages, nbytes : int
        What a rank sends at most.
    seconds : float
        Predicted time of the slowest rank.
    """

    messages: int
    nbytes: int
    seconds: float


class Cost(NamedTuple):
    """What a schedule costs.

    Parameters
    ----------
    schedule : str or (str, int)
        As ``tileattn.distributed.forward`` takes it.
    forward, backward : PassCost
        Of each pass; backward, of all gradients.
    """

    schedule: Schedule
    forward: PassCost
    backward: PassCost

    @property
    def seconds(self) -> float:
        """Predicted time of both passes."""
        return self.forward.seconds + self.backward.seconds


def cost_of(work: Workload, schedule: Schedule, rates: Rates) -> Cost:
    """Predict both passes of a schedule that goes with the call."""
    n = group_size(schedule, work.ranks)
    matmuls = _computing(work, schedule, rates)
    whole = rates.between(on_host=work.ranks <= rates.ranks_per_host)
    if schedule == "gather":
        gathers = zip(gathered(work), matmuls, strict=True)
        return Cost(schedule, *(_cost(sent, _seconds(sent, whole) + own) for sent, own in gathers))
    inside = rates.between(
        on_host=work.ranks <= rates.ranks_per_host or rates.ranks_per_host % n == 0
    )
    costs = []
    for heads, ring, own in zip(exchanged(work, n), passed_on(work, n), matmuls, strict=True):
        # Keys travel while a rank computes; exchanges do not.
        seconds = _seconds(heads, inside) + max(_seconds(ring, whole), own)
        costs.append(_cost(heads.plus(ring), seconds))
    return Cost(schedule, *costs)


def _seconds(sent: Sent, link: Link) -> float:
    """Give the time of the rank that sends for longest."""
    return float(np.max(sent.messages * link.latency + sent.nbytes / link.bandwidth))


def _cost(sent: Sent, seconds: float) -> PassCost:
    return PassCost(int(sent.messages.max()), int(sent.nbytes.max()), float(seconds))


def _computing(work: Workload, schedule: Schedule, rates: Rates) -> Array:
    """Give the time of both passes on the rank that computes for longest."""
    P, n = work.problem, group_size(schedule, work.ranks)
    pairs = work.visibility.pairs(work.q_layout).reshape(-1, n).sum(axis=1)
    matmuls = np.array([[P.D + P.Dv], [3 * P.D + 2 * P.Dv]])
    flops = 2 * pairs * (P.Hq // n) * matmuls
    keys = work.k_layout
    whole = Layout.contiguous([keys.length]) if schedule == "gather" else layout_across(keys, n)
    blocks = work.visibility.blocks(layout_across(work.q_layout, n), whole)
    # What is summed over blocks: out; gradients of queries, keys and values.
    queries, of_keys = (P.B * heads // n * P.accum_dtype.itemsize for heads in (P.Hq, P.Hkv))
    out = blocks.queries * (queries * P.Dv)
    gradients = blocks.queries * (queries * P.D) + blocks.keys * (of_keys * (P.D + P.Dv))
    sums = np.stack([out, gradients]) / rates.block.bandwidth
    starts = blocks.number * rates.block.latency
    slowest: Array = (flops / rates.flops + starts + sums).max(axis=1)
    return slowest
