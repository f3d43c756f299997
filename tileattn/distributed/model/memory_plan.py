"""Memory of a rank in each pass, and how a pass is divided to keep it near the rank's share.

Byte counts cover inputs, results and buffers. They assume that all parts are as long as the longest
one and travel all the way. Tile buffers of a CPU, bias and mask are not counted.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.problem import Problem
from tileattn.distributed.layout import Layout, layout_across
from tileattn.distributed.model.message_counts import lengths_of
from tileattn.distributed.model.occupancy import Occupancy
from tileattn.distributed.model.workload import Workload, flops_per_pair
from tileattn.distributed.schedules.schedule import Plan, Schedule
from tileattn.distributed.visibility import Visibility

_MAX_QUERY_CUTS = 8
_ROW_NUMBERS = 4  # numbers that a backward pass keeps for each query


class Device(NamedTuple):
    """Minimum work that justifies a kernel launch or a communication step."""

    on_gpu: bool  # blocks keep the dtype of the call, and float32 sums are kept in two halves
    tile: int  # queries (backward: keys) of a work tile
    units: int  # work tiles that run at the same time
    flops: float  # FLOP/s
    call: float  # seconds of computation that justify one more call
    step: float  # seconds of computation that justify one more communication step
    rows: int = 1024  # minimum queries of a call whose queries are cut
    budget: float = 1.15  # bytes that a rank may hold, relative to its share of one call's


# A CPU with some cores, and a Hopper GPU with its 132 SMs.
CPU = Device(on_gpu=False, tile=512, units=4, flops=2e11, call=5e-4, step=5e-4)
GPU = Device(on_gpu=True, tile=128, units=132, flops=6e14, call=1e-4, step=5e-4)

_MIN_RELATIVE_OCCUPANCY = 0.9  # of a divided call, relative to one call for all heads


class PassPlanner:
    """Counts the memory of one pass of a schedule, and divides the pass.

    The layouts distribute queries and keys over all ranks. The number of queries of the problem
    is ignored. ``fair_share`` is the bytes of one call divided by the number of ranks.
    """

    def __init__(
        self,
        problem: Problem,
        layouts: tuple[Layout, Layout],
        schedule: Schedule,
        device: Device,
        visibility: Visibility,
        *,
        backward: bool,
        only_order: bool,
    ) -> None:
        ranks, (queries, keys) = layouts[0].ranks, (x.length for x in layouts)
        P, n = problem, schedule.group_size
        self._P, self._n, self._device, self._backward = P, n, device, backward
        self._ring, self._all_keys = ranks // n, keys
        self._gathers, self._is_one_call = schedule.gathers_keys, schedule.is_one_call
        self._only_order = only_order
        flops = visibility.pairs(layouts[0]).sum() * P.Hq * flops_per_pair(P, backward=backward)
        self._seconds = float(flops) / ranks / device.flops
        self._own = self._operands(*map(_longest_part, layouts))
        self.fair_share = (self._operands(queries, keys) + self._row_sums(P.Hq, queries)) / ranks
        joined = [layout_across(x, n) if n > 1 else x for x in layouts]
        self._queries, self._keys = map(_longest_part, joined)
        longest = [_longest_segments(x) for x in joined]
        self._segment, self._block_keys = (max(x, default=0) for x in longest)
        self._tiles = Occupancy(
            *(visibility, (joined[0], joined[1]), device.tile, device.units),
            gathers=self._gathers,
            backward=backward,
            only_order=only_order,
        )
        if only_order:  # a block may join segments that are not adjacent
            if not self._gathers or P.window[1] is None:
                self._segment = self._queries
            self._block_keys = self._keys
        if self._gathers:
            self._block_keys = self._all_keys

    @cached_property
    def plan(self) -> Plan:
        """The plan with the fewest calls within the memory budget; else the smallest."""
        plans = list(self._plans())
        budget = self._device.budget * self.fair_share
        fitting = (x for x in plans if self.nbytes(x) <= budget)
        return next(fitting, None) or min(plans, key=self.nbytes)

    def _plans(self) -> Iterator[Plan]:
        """Yield plans with long enough calls: overlapped ones first, then by number of calls."""
        P, n = self._P, self._n
        keys, splits = max(1, P.Hkv // n), [1]
        groups = group_counts(P.Hq // n, P.Hkv // n)
        cuts: Sequence[int] = (1,)
        if not self._is_one_call:  # more groups would send keys again
            groups = [count for count in groups if count <= keys]
            splits = [count for count in range(1, P.group + 1) if P.group % count == 0] or [1]
            cuts = range(1, _MAX_QUERY_CUTS + 1)
        # Divide heads first: cutting queries loads the same keys again for each cut.
        divided = sorted(product(cuts, groups, splits), key=lambda x: (x[0], prod(x), x[1]))
        plans = [
            Plan(
                *(count, split, None if cut == 1 else -(-self._segment // cut)),
                only_order=self._only_order,
            )
            for cut, count, split in divided
            if cut * count * split == 1 or self._is_long_enough(count, split, cut)
        ]
        if self._gathers or (self._backward and self._ring > 1):
            yield from (plan._replace(ahead=plan.groups > 1) for plan in plans)
            plans = [plan for plan in plans if plan.groups > 1]
        yield from plans

    def _is_long_enough(self, count: int, split: int, cut: int) -> bool:
        """Return True if calls outlast their launch and messages, and occupy the device."""
        device, blocks = self._device, 1 if self._gathers else self._ring
        steps = (self._ring - 1) * (1 + self._backward) + 2 * (self._n - 1)
        rows = None if cut == 1 else -(-self._segment // cut)
        if (rows is not None and rows < device.rows) or not self._may_split(count, split):
            return False
        starts = blocks * count * split * cut * device.call
        if self._seconds < max(starts, steps * count * device.step if count > 1 else 0.0):
            return False
        whole = self._occupancy(1, 1, None)
        return self._occupancy(count, split, rows) >= _MIN_RELATIVE_OCCUPANCY * whole

    def _may_split(self, count: int, split: int) -> bool:
        """Return True if query heads may be split: one entry or one key head, and no sinks."""
        P = self._P
        is_plain = self._only_order and not P.has_sinks
        return split == 1 or (is_plain and (P.B == 1 or count == P.Hkv // self._n))

    def occupancy(self, plan: Plan) -> float:
        """Return the share of time in which the work tiles of a call occupy the device."""
        return self._occupancy(plan.groups, plan.splits, plan.rows)

    def _occupancy(self, count: int, split: int, rows: int | None) -> float:
        """Return the occupancy of calls of a divided pass."""
        hq, hk = self._heads(count)
        return self._tiles.of_calls(self._P.B * (hk if self._backward else hq // split), rows)

    def calls(self, plan: Plan) -> int:
        """Return the maximum number of calls for one block."""
        cuts = -(-self._segment // plan.rows) if plan.rows else 1
        return plan.groups * plan.splits * cuts

    def nbytes(self, plan: Plan) -> int:
        """Return the maximum number of bytes that a rank holds."""
        P, (hq, hk) = self._P, self._heads(plan.groups)
        exchanged = self._exchanged(hq, hk) if self._n > 1 else 0
        if self._gathers:
            buffers = self._gather_buffers(hq, hk, plan)
        elif self._is_one_call:
            buffers = self._row_sums(hq, self._queries)
            if self._backward and hq < P.group:  # sums over groups that share keys
                buffers += self._pair(hk, self._keys, self._wide)
        else:
            buffers = self._ring_buffers(hq, hk, plan)
        return self._own + exchanged + buffers

    def _ring_buffers(self, hq: int, hk: int, plan: Plan) -> int:
        """Count two buffers of keys and values, their gradients, row sums and a block."""
        P = self._P
        keys = self._pair(hk, self._keys)
        is_copied = self._n == 1 and P.B > 1 and hk < P.Hkv
        steps = min(self._ring, 3) - 1  # in which another rank's keys are present or arriving
        found = max(keys * (is_copied + min(steps, 1)), keys * steps)
        if self._backward:  # this rank's gradients, the pair being summed, and the next one
            pairs = 1 if self._ring == 1 else 3 + (plan.ahead and plan.groups > 1)
            found += pairs * self._pair(hk, self._keys, self._wide)
        parts = self._ring if plan.only_order else 3  # minimum key parts of a sum
        return found + self._sums(hq, parts) + self._block(hq, hk, plan)

    def _gather_buffers(self, hq: int, hk: int, plan: Plan) -> int:
        """Count all keys, joined or arriving, their gradients (backward), row sums and a block."""
        P, ranks, others = self._P, self._ring, self._all_keys - self._keys
        keys, arriving = self._pair(hk, self._all_keys), self._pair(hk, others)
        k, of_v = self._bytes(hk, self._all_keys, P.D), self._bytes(hk, others, P.Dv)
        upcoming = arriving if plan.ahead and plan.groups > 1 else 0
        joining = max(arriving + k, of_v + keys)
        sums = self._sums(hq, 1)
        if not self._backward:
            return upcoming + max(joining, keys + sums + self._block(hq, hk, plan))
        dkv = self._pair(hk, self._all_keys, self._wide)
        computing = keys + dkv + sums + self._block(hq, hk, plan)
        sent = self._pair(hk, others, self._wide)
        returning = dkv + sent + ranks * self._pair(hk, self._keys, self._wide)
        return upcoming + max(joining, computing, returning)

    def _exchanged(self, hq: int, hk: int) -> int:
        """Count the inputs and results of the all-to-all: some heads of all tokens of a group."""
        P, passes = self._P, 1 + self._backward
        rows = self._bytes(hq, self._queries, passes * (P.D + P.Dv))
        numbers = P.B * hq * self._queries * self._wide
        keys = self._pair(hk, self._keys)
        return rows + numbers + (1 + (self._backward and self._ring == 1)) * keys

    def _sums(self, hq: int, parts: int) -> int:
        """Count accumulators of rows: the lower halves on a GPU, whole wide arrays on a CPU.

        A GPU allocates lower halves when a third key part arrives.
        """
        P, on_gpu = self._P, self._device.on_gpu
        if on_gpu and parts < 3:
            return 0
        columns = P.D if self._backward else P.Dv
        half = 2 if on_gpu else self._wide
        found = self._bytes(hq, self._queries, columns, half) if self._is_narrow else 0
        if not on_gpu and not self._backward:  # denominators
            found += self._bytes(hq, self._queries, 1, self._wide)
        return found

    def _block(self, hq: int, hk: int, plan: Plan) -> int:
        """Count the widened operands of one call, and its results."""
        P, rows = self._P, min(plan.rows or self._segment, self._segment)
        hq //= plan.splits
        on_gpu, keys = self._device.on_gpu, self._block_keys
        item = self._item if on_gpu else self._wide
        widened = self._is_narrow and not on_gpu
        found = self._pair(hk, keys, self._wide) if widened else 0
        if self._backward:
            found += self._bytes(hq, rows, P.D + 2 * P.Dv, self._wide) if widened else 0
            found += self._bytes(hq, rows, P.D, item) + self._pair(hk, keys, item)
            sums = 0 if widened else self._row_sums(hq, rows)
            return found + (sums or self._bytes(hq, rows, _ROW_NUMBERS, self._wide))
        found += self._bytes(hq, rows, P.D, self._wide) if widened else 0
        if on_gpu and self._gathers:
            return self._bytes(hq, rows, 1, self._wide)
        results = 1 if on_gpu else 2  # the accumulator and the part being merged
        return found + results * self._bytes(hq, rows, P.Dv, item)

    def _heads(self, count: int) -> tuple[int, int]:
        """Return the number of query heads and key heads of a head group."""
        P, n = self._P, self._n
        return P.Hq // n // count, max(1, P.Hkv // n // count)

    def _bytes(self, heads: int, rows: int, columns: int, itemsize: int | None = None) -> int:
        return self._P.B * heads * rows * columns * (itemsize or self._item)

    def _pair(self, heads: int, keys: int, itemsize: int | None = None) -> int:
        """Count keys and values, or their gradients."""
        return self._bytes(heads, keys, self._P.D + self._P.Dv, itemsize)

    def _operands(self, queries: int, keys: int) -> int:
        """Count the inputs and results of the pass."""
        P = self._P
        of_heads = self._bytes(P.Hq, queries, P.D + P.Dv) + self._pair(P.Hkv, keys)
        return (1 + self._backward) * of_heads + self._bytes(P.Hq, queries, 1, self._wide)

    def _row_sums(self, heads: int, queries: int) -> int:
        """Count the temporaries of a backward pass: wide dq, and a few numbers for each query."""
        columns = _ROW_NUMBERS + self._P.D * self._is_narrow
        return self._bytes(heads, queries, columns, self._wide) if self._backward else 0

    @property
    def _is_narrow(self) -> bool:
        """True if sums are wider than results."""
        return self._item < self._wide

    @property
    def _item(self) -> int:
        return self._P.dtype.itemsize

    @property
    def _wide(self) -> int:
        return self._P.accum_dtype.itemsize


def planners(
    work: Workload, schedule: Schedule, *, on_gpu: bool
) -> tuple[PassPlanner, PassPlanner]:
    """Return the planners of the forward and the backward pass."""
    layouts, (window, *entries) = (work.q_layout, work.k_layout), work.visibility
    visibility = window, *(tuple(x.tolist()) for x in entries)
    device = GPU if on_gpu else CPU
    return _planners(work.problem, layouts, schedule, device, visibility, work.only_order)


@lru_cache(maxsize=256)
def _planners(
    problem: Problem,
    layouts: tuple[Layout, Layout],
    schedule: Schedule,
    device: Device,
    visibility: tuple[Any, ...],
    only_order: bool,
) -> tuple[PassPlanner, PassPlanner]:
    window, *entries = visibility
    places = Visibility(window, *(np.array(x, np.int64) for x in entries))
    given = problem, layouts, schedule, device, places
    forward, backward = (
        PassPlanner(*given, backward=x, only_order=only_order) for x in (False, True)
    )
    return forward, backward


def _longest_part(layout: Layout) -> int:
    return int(max(lengths_of(layout), default=0))


def _longest_segments(layout: Layout) -> list[int]:
    """Return the length of the longest segment of each rank."""
    parts = (layout.segments(rank) for rank in range(layout.ranks))
    return [max((x.stop - x.start for x in part), default=0) for part in parts]


def group_counts(Hq: int, Hkv: int) -> Sequence[int]:
    """List the possible numbers of head groups of equal size, in ascending order.

    A group has some key heads with all query heads that read them, or one key head and some of its
    query heads.
    """
    shared = Hq // Hkv if Hkv else 1
    whole = [n for n in range(1, Hkv + 1) if Hkv % n == 0] or [1]
    return [*whole, *(Hkv * n for n in range(2, shared + 1) if shared % n == 0)]
