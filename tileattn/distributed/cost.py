"""What a schedule sends, and how long it takes: an alpha-beta model of links, and a FLOP rate.

Messages and bytes are those that ranks send one another, counted exactly in at most O(P * P / 64)
steps for P ranks. What all ranks gather is not counted: their arguments, and the sums of gradients
that they share.

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
from tileattn.distributed.visibility import Visibility, reach
from tileattn.problem import Problem

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

    def __post_init__(self) -> None:
        links = [x for x in (self.link, self.host_link) if x is not None]
        for name, x in (("flops", self.flops), *(("bandwidth", x.bandwidth) for x in links)):
            if not x > 0:
                raise ValueError(f"{name} is {x}; more than 0 is accepted")
        if self.ranks_per_host < 1:
            raise ValueError(f"ranks_per_host is {self.ranks_per_host}; 1 or more is accepted")

    def between(self, *, on_host: bool) -> Link:
        """Give the link of ranks that are, or are not, all on one host."""
        return self.host_link if on_host and self.host_link is not None else self.link


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


class Rows(NamedTuple):
    """A bias or a mask of which each rank has the rows of its queries.

    Parameters
    ----------
    batch, heads, keys : int
        Its other axes; 1 where it is broadcast.
    itemsize : int
        Bytes of an element on the way.
    gradient : bool
        Whether its gradient travels back.
    """

    batch: int
    heads: int
    keys: int
    itemsize: int
    gradient: bool


class Workload(NamedTuple):
    """A call on ranks, without arrays.

    Parameters
    ----------
    problem : Problem
        Of which the number of queries is not looked at.
    visibility : Visibility
        Where keys are visible; functions and masks hide others, which is not looked at.
    q_layout, k_layout : Layout
        Queries and keys of each rank.
    rows : tuple of Rows
        Bias and mask.
    """

    problem: Problem
    visibility: Visibility
    q_layout: Layout
    k_layout: Layout
    rows: tuple[Rows, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.q_layout.ranks


class _Sent(NamedTuple):
    """Messages and bytes that each rank sends in a pass."""

    messages: Array
    nbytes: Array

    def plus(self, other: "_Sent") -> "_Sent":
        return _Sent(self.messages + other.messages, self.nbytes + other.nbytes)

    def seconds(self, link: Link) -> float:
        return float(np.max(self.messages * link.latency + self.nbytes / link.bandwidth))


def cost_of(work: Workload, schedule: Schedule, rates: Rates) -> Cost:
    """Predict both passes of a schedule that goes with the call."""
    n = group_size(schedule, work.ranks)
    matmuls = _flops(work, n) / rates.flops
    whole = rates.between(on_host=work.ranks <= rates.ranks_per_host)
    if schedule == "gather":
        gathers = zip(_gathered(work), matmuls, strict=True)
        return Cost(schedule, *(_cost(sent, sent.seconds(whole) + own) for sent, own in gathers))
    inside = rates.between(on_host=rates.ranks_per_host % n == 0)
    costs = []
    for exchanged, passed_on, own in zip(_exchanged(work, n), _ring(work, n), matmuls, strict=True):
        # Keys travel while a rank computes; exchanges do not.
        seconds = exchanged.seconds(inside) + max(passed_on.seconds(whole), own)
        costs.append(_cost(exchanged.plus(passed_on), seconds))
    return Cost(schedule, *costs)


def _cost(sent: _Sent, seconds: float) -> PassCost:
    return PassCost(int(sent.messages.max()), int(sent.nbytes.max()), float(seconds))


def _flops(work: Workload, n: int) -> Array:
    """Count the FLOPs of both passes on the rank that has most, in groups of n ranks."""
    P = work.problem
    pairs = work.visibility.pairs(work.q_layout).reshape(-1, n).sum(axis=1).max()
    matmuls = np.array([P.D + P.Dv, 3 * P.D + 2 * P.Dv])
    flops: Array = 2 * pairs * (P.Hq // n) * matmuls
    return flops


def _exchanged(work: Workload, n: int) -> list[_Sent]:
    """Count what ranks exchange inside groups of n, in both passes: tokens for heads, and back."""
    P, item, wide = work.problem, work.problem.dtype.itemsize, work.problem.accum_dtype.itemsize
    # Bytes of one token that one rank sends another.
    q, out = (P.B * P.Hq // n * columns * item for columns in (P.D, P.Dv))
    k, v = (P.B * P.Hkv // n * columns * item for columns in (P.D, P.Dv))
    lse, of_rows = P.B * P.Hq // n * wide, []
    for x in work.rows:
        heads = x.heads if x.heads == 1 else x.heads // n
        of_rows.append(x.batch * heads * x.keys * x.itemsize)
    dbias = [size for size, x in zip(of_rows, work.rows, strict=True) if x.gradient]
    passes: tuple[tuple[list[int], ...], ...] = (
        ([q, *of_rows], [k, v], [out, lse], []),
        ([q, out, out, lse, *of_rows], [k, v], [q, *dbias], [k, v]),
    )
    own = [_lengths(x) for x in (work.q_layout, work.k_layout)]
    others = [np.repeat(x.reshape(-1, n).sum(axis=1), n) - x for x in own]
    tokens = (*((n - 1) * x for x in own), *others)  # to heads, of each; and back to tokens
    return [
        _Sent(
            np.full(work.ranks, (n - 1) * sum(map(len, sizes))),
            sum((x * sum(y) for x, y in zip(tokens, sizes, strict=True)), np.zeros(work.ranks)),
        )
        for sizes in passes
    ]


def _ring(work: Workload, n: int) -> list[_Sent]:
    """Count what ranks of a ring over groups of n pass on, in both passes."""
    queries, keys = (layout_across(x, n) for x in (work.q_layout, work.k_layout))
    P, size = work.problem, keys.ranks
    steps = np.array(reach(work.visibility.attending(queries, keys)))
    elements = _lengths(keys) * (P.B * P.Hkv // n * (P.D + P.Dv))
    some = steps > 0
    last = (np.arange(size) + steps)[some] % size  # it returns the gradients
    parts, sums = _passed_on(steps, np.ones(size)), _passed_on(steps, elements)
    returned, gradients = (np.bincount(last, x[some], size) for x in (np.ones(size), elements))
    item, wide = P.dtype.itemsize, P.accum_dtype.itemsize
    forward = _Sent(2 * parts, sums * item)
    backward = _Sent(4 * parts + 2 * returned, sums * (item + wide) + gradients * wide)
    return [_Sent(*(np.repeat(x, n) for x in sent)) for sent in (forward, backward)]


def _passed_on(steps: Array, sizes: Array) -> Array:
    """Sum the sizes of the parts that each rank of a ring sends on, its own first."""
    ranks = np.arange(len(steps))
    changes = np.zeros(2 * len(steps))
    np.add.at(changes, ranks, sizes)
    np.add.at(changes, ranks + steps, -sizes)
    under_way: Array = changes.cumsum().reshape(2, -1).sum(axis=0)  # behind the last comes rank 0
    return under_way


def _gathered(work: Workload) -> list[_Sent]:
    """Count what ranks send to those that attend to their keys, and gradients back."""
    P, size = work.problem, work.ranks
    elements = _lengths(work.k_layout) * (P.B * P.Hkv * (P.D + P.Dv))
    sent, back = (_Sent(np.zeros(size), np.zeros(size)) for _ in range(2))
    for rank, ranks in enumerate(work.visibility.attending(work.q_layout, work.k_layout)):
        bits = np.frombuffer(ranks.to_bytes(size // 8 + 1, "little"), np.uint8)
        others = np.unpackbits(bits, count=size, bitorder="little").astype(bool)
        others[rank] = False
        sent.messages[rank] = 2 * others.sum()
        back.messages[others] += 2
        back.nbytes[others] += elements[rank]
    sent = sent._replace(nbytes=sent.messages / 2 * elements * P.dtype.itemsize)
    back = back._replace(nbytes=back.nbytes * P.accum_dtype.itemsize)
    return [sent, sent.plus(back)]


def _lengths(layout: Layout) -> Array:
    return np.array([layout.length_of(rank) for rank in range(layout.ranks)], np.float64)
