"""Both passes of a schedule: head groups one after the other, each exchanged and computed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.residuals import has_large_lse
from tileattn.distributed.arrays import library
from tileattn.distributed.call import Call, Heads
from tileattn.distributed.comm.protocol import Communicator
from tileattn.distributed.comm.subset import across
from tileattn.distributed.layout import layout_across
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.schedules.all_to_all import Exchange
from tileattn.distributed.schedules.blockwise_attention import Upstream
from tileattn.distributed.schedules.head_groups import BackwardGroup, ForwardGroup, Totals
from tileattn.distributed.schedules.schedule import Plan, Schedule
from tileattn.results import Attention, Gradients

Array = NDArray[Any]


class Passes:
    """Both passes of a schedule, for calls with one signature; it keeps no arrays."""

    def __init__(self, call: Call, schedule: Schedule, plans: tuple[Plan, Plan]) -> None:
        comm, blocks, n = call.comm, call.blocks, schedule.group_size
        queries, keys = blocks.q_layout, blocks.k_layout
        self._schedule, self._n, self._plans = schedule, n, plans
        self._exchange = Exchange(comm, queries, keys, n)
        self._comm: Communicator = comm
        if n > 1:
            self._comm = across(comm, n)
            queries, keys = layout_across(queries, n), layout_across(keys, n)
        self._blocks = {
            plan.rows: RankBlocks(
                *(blocks.visibility, queries, keys, self._comm.rank, plan.rows),
                only_order=plan.only_order,
            )
            for plan in plans
        }

    def forward(self, call: Call) -> Attention:
        """Compute the rows of this rank's queries."""
        P, xp = call.problem, library(call.operands.q)
        rows = P.B, P.Hq, P.Nq
        result = Attention(xp.empty((*rows, P.Dv), P.dtype), xp.empty(rows, call.sums))
        groups = self._forward_groups(call, result)
        self._schedule.forward(groups, ahead=self._plans[0].ahead)
        return result

    def backward(
        self,
        call: Call,
        dout: Array,
        attention: Attention,
        dlse: Array | None,
        wrt: frozenset[str],
    ) -> Gradients:
        """Compute the gradients of this rank's arrays, and of inputs that all ranks share."""
        if not self._schedule.is_one_call:
            call, attention = self._precise(call, attention)
        totals = Totals(call, self._exchange, wrt)
        groups = self._backward_groups(totals, Upstream(dout, *attention, dlse))
        self._schedule.backward(groups, ahead=self._plans[1].ahead)
        return totals.gradients()

    def _precise(self, call: Call, attention: Attention) -> tuple[Call, Attention]:
        """Sum in float64 if the rounding of lse would show in gradients.

        It shows because each block has only some of the keys. On a GPU the dtype stays: the host
        would have to wait for lse.
        """
        if call.on_gpu:
            return call, attention
        if any(call.comm.gather(has_large_lse(attention.lse, call.problem.dtype).any())):
            call = replace(call, sums=np.dtype(np.float64))
            attention = Attention(attention.out, self.forward(call).lse)
        return call, attention

    def _forward_groups(self, call: Call, result: Attention) -> Iterator[ForwardGroup]:
        for one, _, heads, _ in self._calls(call, self._plans[0]):
            group = ForwardGroup(self._exchange, one, heads, result)
            del one
            yield group

    def _backward_groups(self, totals: Totals, upstream: Upstream) -> Iterator[BackwardGroup]:
        rows = [x for x in upstream if x is not None]
        for one, found, heads, is_last in self._calls(totals.call, self._plans[1], rows):
            given = Upstream(*found, *[None] * (4 - len(found)))
            group = BackwardGroup(totals, one, heads, given, is_last=is_last)
            del one, found, given
            yield group

    def _calls(
        self, call: Call, plan: Plan, rows: Sequence[Array] = ()
    ) -> Iterator[tuple[Call, list[Array], Heads, bool]]:
        """Yield for each head group its call, ``rows``, heads, and True if its keys end."""
        P, x, exchange = call.problem, call.operands, self._exchange
        groups = head_groups(P.Hq // self._n, P.Hkv // self._n, plan.groups)
        shared = {
            name: exchange.to_heads([y], slice(0, 1), exchange.queries)[0]
            for name, y in self._exchanged(call, shared=True)
        }
        keys: list[Array] = []
        for n, heads in enumerate(groups):
            keys = keys or exchange.to_heads((x.k, x.v), heads.keys, exchange.keys)
            more = dict(self._exchanged(call, shared=False))
            q, *found = exchange.to_heads(
                (x.q, *rows, *more.values()), heads.queries, exchange.queries
            )
            given, others = [found[: len(rows)]], zip(more, found[len(rows) :], strict=True)
            arrays = {"q": q, "k": keys[0], "v": keys[1], **shared, **dict(others)}
            of_all = Heads(exchange.heads(heads.queries, P.Hq), exchange.heads(heads.keys, P.Hkv))
            one = [self._placed(call.of_heads(of_all, **arrays), plan)]
            is_last = n + 1 == len(groups) or groups[n + 1].keys != heads.keys
            keys = [] if is_last else keys
            del q, more, found, others, arrays  # free arrays before the group is computed
            yield one.pop(), given.pop(), heads, is_last

    def _placed(self, call: Call, plan: Plan) -> Call:
        return replace(call, comm=self._comm, blocks=self._blocks[plan.rows], splits=plan.splits)

    def _exchanged(self, call: Call, *, shared: bool) -> Iterator[tuple[str, Any]]:
        """Yield the pair arrays whose rows are exchanged, with one head or with all."""
        if self._n == 1:
            return
        for name in call.with_rows:
            x = getattr(call.operands, name)
            if (x.shape[1] == 1) == shared:
                shape = *x.shape[:2], call.problem.Nq, x.shape[3]
                yield name, library(x).broadcast_to(call.wider(x), shape)


def head_groups(Hq: int, Hkv: int, count: int) -> list[Heads]:
    """Return the head groups in order; groups with the same keys are adjacent."""
    heads, keys = Hq // count, max(1, Hkv // count) if Hkv else 0
    starts = [n * Hkv // count for n in range(count)]
    return [
        Heads(slice(n * heads, (n + 1) * heads), slice(start, start + keys))
        for n, start in enumerate(starts)
    ]
