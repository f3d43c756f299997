"""What a rank holds, and into how many groups of heads a pass is divided for it.

Bytes are those of inputs, results and buffers, where all parts are as long as the longest and
travel all the way. Tiles of a CPU come on top, and bias and mask.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.problem import Problem
from tileattn.distributed.layout import Layout, layout_across
from tileattn.distributed.model.waves import Waves
from tileattn.distributed.model.workload import Workload, flops_of
from tileattn.distributed.schedules.names import Plan, Schedule, group_size
from tileattn.distributed.visibility import Visibility

_MOST_PIECES = 8  # into which queries are cut
_ROWS = 4  # numbers of each query that a backward pass computes with


class Device(NamedTuple):
    """What calls and messages are worth their start.

    Parameters
    ----------
    on_gpu : bool
        Whether blocks keep their dtype, and sums are in two halves.
    tile : int
        Queries, backward keys, of a work tile.
    units : int
        Work tiles that run at a time.
    flops : float
        FLOPs in a second.
    call, step : float
        Seconds of computing that are worth a call, and a step in which messages begin.
    rows : int
        Queries of a call where they are cut, at least.
    budget : float
        What a rank may hold, over its share in what one call holds.
    """

    on_gpu: bool
    tile: int
    units: int
    flops: float
    call: float
    step: float
    rows: int = 1024
    budget: float = 1.15


# Some cores; and a Hopper GPU with its 132 SMs.
CPU = Device(on_gpu=False, tile=512, units=4, flops=2e11, call=5e-4, step=5e-4)
GPU = Device(on_gpu=True, tile=128, units=132, flops=6e14, call=1e-4, step=5e-4)

_WELL_FILLED = 0.9  # of what one call for all heads fills


class Held:
    """What a pass of a schedule holds.

    Parameters
    ----------
    problem : Problem
        The call, of which the number of queries is not looked at.
    layouts : (Layout, Layout)
        Queries and keys of each rank.
    schedule : str or (str, int)
        It goes with the call.
    device : Device
        What runs it.
    visibility : Visibility
        Where keys are visible.
    backward : bool
        Which pass.
    only_order : bool
        As a plan has it.
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
        P, n = problem, group_size(schedule, ranks)
        self._P, self._n, self._device, self._backward = P, n, device, backward
        self._ring, self._gathers, self._all_keys = ranks // n, schedule == "gather", keys
        self._only_order = only_order
        flops = visibility.pairs(layouts[0]).sum() * P.Hq * flops_of(P, backward=backward)
        self._seconds = float(flops) / ranks / device.flops
        self._own = self._operands(*map(_longest_part, layouts))
        self.share = (self._operands(queries, keys) + self._of_rows(P.Hq, queries)) / ranks
        joined = [layout_across(x, n) if n > 1 else x for x in layouts]
        self._queries, self._keys = map(_longest_part, joined)
        longest = [_longest_segments(x) for x in joined]
        self._segment, self._block_keys = (max(x, default=0) for x in longest)
        self._waves = Waves(
            *(visibility, (joined[0], joined[1]), device.tile, device.units),
            gathers=self._gathers,
            backward=backward,
            only_order=only_order,
        )
        if only_order:  # blocks have segments that are no neighbours
            if not self._gathers or P.window[1] is None:
                self._segment = self._queries
            self._block_keys = self._keys
        if self._gathers:
            self._block_keys = self._all_keys

    @cached_property
    def plan(self) -> Plan:
        """Divide the pass: the fewest calls that hold no more than the budget; else the least."""
        plans = list(self._plans())
        fitting = (x for x in plans if self.of(x) <= self._device.budget * self.share)
        return next(fitting, None) or min(plans, key=self.of)

    def _plans(self) -> Iterator[Plan]:
        """Yield what is worth its start: first with messages ahead, then with the fewest calls."""
        P, n, is_single = self._P, self._n, self._n > 1 and self._ring == 1
        keys, splits = max(1, P.Hkv // n), [1]
        groups = counts(P.Hq // n, P.Hkv // n)
        cuts: Sequence[int] = (1,)
        if not is_single:  # else keys would travel again
            groups = [count for count in groups if count <= keys]
            splits = [count for count in range(1, P.group + 1) if P.group % count == 0] or [1]
            cuts = range(1, _MOST_PIECES + 1)
        # Heads are divided first: of fewer queries keys are loaded as often.
        divided = sorted(product(cuts, groups, splits), key=lambda x: (x[0], prod(x), x[1]))
        plans = [
            Plan(
                *(count, split, None if cut == 1 else -(-self._segment // cut)),
                only_order=self._only_order,
            )
            for cut, count, split in divided
            if cut * count * split == 1 or self._is_worth(count, split, cut)
        ]
        if self._gathers or (self._backward and self._ring > 1):
            yield from (plan._replace(ahead=plan.groups > 1) for plan in plans)
            plans = [plan for plan in plans if plan.groups > 1]
        yield from plans

    def _is_worth(self, count: int, split: int, cut: int) -> bool:
        """Whether calls take some time and fill a rank, and messages are worth their start."""
        device, blocks = self._device, 1 if self._gathers else self._ring
        steps = (self._ring - 1) * (1 + self._backward) + 2 * (self._n - 1)
        rows = None if cut == 1 else -(-self._segment // cut)
        if (rows is not None and rows < device.rows) or not self._may_split(count, split):
            return False
        starts = blocks * count * split * cut * device.call
        if self._seconds < max(starts, steps * count * device.step if count > 1 else 0.0):
            return False
        return self._fills(count, split, rows) >= _WELL_FILLED * self._fills(1, 1, None)

    def _may_split(self, count: int, split: int) -> bool:
        """Whether key heads can be a batch: there is one of each, or one of them."""
        P = self._P
        is_plain = self._only_order and "sinks" not in P.enabled_options
        return split == 1 or (is_plain and (P.B == 1 or count == P.Hkv // self._n))

    def filled(self, plan: Plan) -> float:
        """Give the share of the time in which the work tiles of calls fill a rank."""
        return self._fills(plan.groups, plan.splits, plan.rows)

    def _fills(self, count: int, split: int, rows: int | None) -> float:
        hq, hk = self._heads(count)
        hq //= split
        heads = hk if self._backward else hq
        return self._waves.filled(self._P.B * heads, hq // hk, rows)

    def calls(self, plan: Plan) -> int:
        """Count the calls of a block, at most."""
        cuts = -(-self._segment // plan.rows) if plan.rows else 1
        return plan.groups * plan.splits * cuts

    def of(self, plan: Plan) -> int:
        """Count the bytes that a rank holds at most."""
        P, (hq, hk) = self._P, self._heads(plan.groups)
        exchanged = self._exchanged(hq, hk) if self._n > 1 else 0
        if self._gathers:
            buffers = self._of_gather(hq, hk, plan)
        elif self._n > 1 and self._ring == 1:
            buffers = self._of_rows(hq, self._queries)
            if self._backward and hq < P.group:  # sums of groups that read the same keys
                buffers += self._pair(hk, self._keys, self._wide)
        else:
            buffers = self._of_ring(hq, hk, plan)
        return self._own + exchanged + buffers

    def _of_ring(self, hq: int, hk: int, plan: Plan) -> int:
        """Count two pairs of keys and values on their way, backward of gradients; sums, a block."""
        P = self._P
        keys = self._pair(hk, self._keys)
        is_copied = self._n == 1 and P.B > 1 and hk < P.Hkv
        steps = min(self._ring, 3) - 1  # in which other keys are there, or arrive
        found = max(keys * (is_copied + min(steps, 1)), keys * steps)
        if self._backward:  # own ones, those that travel, and those that arrive
            pairs = 1 if self._ring == 1 else 3 + (plan.ahead and plan.groups > 1)
            found += pairs * self._pair(hk, self._keys, self._wide)
        parts = self._ring if plan.only_order else 3  # over which results are summed, at least
        return found + self._sums(hq, parts) + self._block(hq, hk, plan)

    def _of_gather(self, hq: int, hk: int, plan: Plan) -> int:
        """Count all keys, joined or on their way, and backward their gradients; sums, a block."""
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
        """Count some heads of all tokens of a group: inputs and results."""
        P, passes = self._P, 1 + self._backward
        rows = self._bytes(hq, self._queries, passes * (P.D + P.Dv))
        numbers = P.B * hq * self._queries * self._wide
        keys = self._pair(hk, self._keys)
        return rows + numbers + (1 + (self._backward and self._ring == 1)) * keys

    def _sums(self, hq: int, parts: int) -> int:
        """Count sums of the results of queries: lower halves, or all where they are wider.

        A GPU has lower halves from the third part on.
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
        """Count the operands of a call where they are widened, and its results."""
        P, rows = self._P, min(plan.rows or self._segment, self._segment)
        hq //= plan.splits
        on_gpu, keys = self._device.on_gpu, self._block_keys
        item = self._item if on_gpu else self._wide
        widened = self._is_narrow and not on_gpu
        found = self._pair(hk, keys, self._wide) if widened else 0
        if self._backward:
            found += self._bytes(hq, rows, P.D + 2 * P.Dv, self._wide) if widened else 0
            found += self._bytes(hq, rows, P.D, item) + self._pair(hk, keys, item)
            sums = 0 if widened else self._of_rows(hq, rows)
            return found + (sums or self._bytes(hq, rows, _ROWS, self._wide))
        found += self._bytes(hq, rows, P.D, self._wide) if widened else 0
        if on_gpu and self._gathers:
            return self._bytes(hq, rows, 1, self._wide)
        results = 1 if on_gpu else 2  # of which one is weighed
        return found + results * self._bytes(hq, rows, P.Dv, item)

    def _heads(self, count: int) -> tuple[int, int]:
        """Count the heads of queries and of keys of a group."""
        P, n = self._P, self._n
        return P.Hq // n // count, max(1, P.Hkv // n // count)

    def _bytes(self, heads: int, rows: int, columns: int, itemsize: int | None = None) -> int:
        return self._P.B * heads * rows * columns * (itemsize or self._item)

    def _pair(self, heads: int, keys: int, itemsize: int | None = None) -> int:
        """Count keys and values, or their gradients."""
        return self._bytes(heads, keys, self._P.D + self._P.Dv, itemsize)

    def _operands(self, queries: int, keys: int) -> int:
        """Count inputs and results of the pass."""
        P = self._P
        of_heads = self._bytes(P.Hq, queries, P.D + P.Dv) + self._pair(P.Hkv, keys)
        return (1 + self._backward) * of_heads + self._bytes(P.Hq, queries, 1, self._wide)

    def _of_rows(self, heads: int, queries: int) -> int:
        """Count what a backward pass computes with: sums of dq, and numbers of each query."""
        columns = _ROWS + self._P.D * self._is_narrow
        return self._bytes(heads, queries, columns, self._wide) if self._backward else 0

    @property
    def _is_narrow(self) -> bool:
        """Whether sums are wider than results."""
        return self._item < self._wide

    @property
    def _item(self) -> int:
        return self._P.dtype.itemsize

    @property
    def _wide(self) -> int:
        return self._P.accum_dtype.itemsize


def held_by(work: Workload, schedule: Schedule, *, on_gpu: bool) -> tuple[Held, Held]:
    """Give what both passes of a schedule hold."""
    layouts, (window, *entries) = (work.q_layout, work.k_layout), work.visibility
    visibility = window, *(tuple(x.tolist()) for x in entries)
    device = GPU if on_gpu else CPU
    return _held_by(work.problem, layouts, schedule, device, visibility, work.only_order)


@lru_cache(maxsize=256)
def _held_by(
    problem: Problem,
    layouts: tuple[Layout, Layout],
    schedule: Schedule,
    device: Device,
    visibility: tuple[Any, ...],
    only_order: bool,
) -> tuple[Held, Held]:
    window, *entries = visibility
    places = Visibility(window, *(np.array(x, np.int64) for x in entries))
    forward, backward = (
        Held(problem, layouts, schedule, device, places, backward=x, only_order=only_order)
        for x in (False, True)
    )
    return forward, backward


def _longest_part(layout: Layout) -> int:
    return max(map(layout.length_of, range(layout.ranks)), default=0)


def _longest_segments(layout: Layout) -> list[int]:
    """Give the longest segment of each rank."""
    parts = (layout.segments(rank) for rank in range(layout.ranks))
    return [max((x.stop - x.start for x in part), default=0) for part in parts]


def counts(Hq: int, Hkv: int) -> Sequence[int]:
    """List the numbers of groups of equal size, the least first.

    A group has some heads of keys and all queries that read them, or some of those of one.
    """
    shared = Hq // Hkv if Hkv else 1
    whole = [n for n in range(1, Hkv + 1) if Hkv % n == 0] or [1]
    return [*whole, *(Hkv * n for n in range(2, shared + 1) if shared % n == 0)]
