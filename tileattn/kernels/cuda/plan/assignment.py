"""The LPT assignment: which worker of a persistent kernel takes which work tiles."""

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def assign(order: Array, cost: Array, workers: int, team: int = 1, late: int = 0) -> Array:
    """Assign work tiles as if each worker took the next one when it is free, then even loads out.

    ``order`` has the tile numbers in the order in which they start, ``cost`` their times. The
    workers of a team go in step: they take one tile each at a time. The last ``late`` tiles, never
    all, have a worker each, which starts when another has ended.

    The int32 table has a column for each worker, teams side by side and late workers last. Each
    column is padded with the number of all tiles, which ends it.
    """
    tiles, early = len(order), len(order) - late
    units = np.full((-(-early // team), team), tiles, np.int32)  # one tile for each of a team
    units.flat[:early] = order[:early]
    times = np.maximum.reduceat(cost[:early], np.arange(0, early, team))
    columns = _in_turn(times, workers // team)
    _even_out(columns, times)
    table = np.full((max(map(len, columns)) + 1, len(columns), team), tiles, np.int32)
    for n, column in enumerate(columns):
        table[: len(column), n] = units[sorted(column)]
    ends = np.full((len(table), late), tiles, np.int32)
    ends[0] = order[early:]
    return np.hstack([table.reshape(len(table), -1), ends])


def _in_turn(times: Array, count: int) -> list[list[int]]:
    """Give each unit to the column that is free first.

    Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969).
    """
    columns: list[list[int]] = [[] for _ in range(count)]
    # Time and column in one integer, which a heap compares faster than a pair.
    free = list(range(count))
    for unit, time in enumerate((count * times).tolist()):
        soonest = free[0]
        columns[soonest % count].append(unit)
        heapq.heapreplace(free, soonest + time)
    return columns


def _even_out(columns: list[list[int]], times: Array) -> None:
    """Exchange units of the longest column with shorter columns while that helps.

    The number of exchanges is bounded, so that planning is fast; mostly far fewer are enough.
    """
    loads = np.array([times[column].sum() for column in columns])
    for _ in range(4 * len(columns)):
        longest = int(loads.argmax())
        others = loads.argsort(kind="stable")
        if not any(_exchange(columns, times, loads, longest, other) for other in others):
            return


def _exchange(columns: list[list[int]], times: Array, loads: Array, long: int, short: int) -> bool:
    """Exchange the two units of two columns that shorten the longer one most, if any do.

    Of equal exchanges it takes the last, which keeps the first units in their order.
    """
    gap = loads[long] - loads[short]
    moved = times[columns[long]][:, None] - times[columns[short]]
    gaps = np.abs(gap - 2 * moved)  # after each exchange
    least = gaps.min(initial=gap)
    if least == gap:
        return False
    i, j = np.argwhere(gaps == least)[-1]
    columns[long][i], columns[short][j] = columns[short][j], columns[long][i]
    loads[long] -= moved[i, j]
    loads[short] += moved[i, j]
    return True
