"""Which worker of a persistent kernel goes through which work tiles, decided on the host."""

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def assign(order: Array, cost: Array, workers: int, team: int = 1, late: int = 0) -> Array:
    """Assign work tiles as if each worker took the next one when it is free, then even that out.

    ``order`` has their numbers as they begin, ``cost`` how long each takes. The workers of a team
    take successive tiles, in step. The last ``late`` tiles go one by one to workers that begin as
    others end. The table of int32 has a column for each worker, filled up with the number of all
    tiles, which ends it. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17
    (1969).
    """
    tiles = len(order)
    early = tiles - late
    starts = np.arange(0, early, team)
    units = np.full((len(starts), team), tiles, np.int32)
    units.flat[:early] = order[:early]
    costs = np.maximum.reduceat(cost[:early], starts)
    columns: list[list[int]] = [[] for _ in range(workers // team)]
    # Time and team in one integer, which a heap compares faster than a pair.
    free = list(range(len(columns)))
    for unit, time in enumerate((len(columns) * costs).tolist()):
        soonest = free[0]
        columns[soonest % len(columns)].append(unit)
        heapq.heapreplace(free, soonest + time)
    _even_out(columns, costs)
    table = np.full((max(map(len, columns)) + 1, len(columns), team), tiles, np.int32)
    for n, column in enumerate(columns):
        table[: len(column), n] = units[sorted(column)]
    ends = np.full((len(table), late), tiles, np.int32)
    ends[0] = order[early:]
    return np.hstack([table.reshape(len(table), -1), ends])


def _even_out(columns: list[list[int]], cost: Array) -> None:
    """Exchange two tiles, of the longest column and of a shorter one, while that makes it shorter.

    Of equal exchanges the last ones in the columns are best: the order of the others is kept.
    """
    load = np.array([cost[column].sum() for column in columns])
    for _ in range(4 * len(columns)):
        longest = load.argmax()
        for other in load.argsort(kind="stable"):
            saved = cost[columns[longest]][:, None] - cost[columns[other]]
            after = np.maximum(load[longest] - saved, load[other] + saved)
            if not after.size or after.min() >= load[longest]:
                continue
            last = after.size - 1 - int(after[::-1, ::-1].argmin())
            i, j = divmod(last, after.shape[1])
            one, two = columns[longest], columns[other]
            one[i], two[j] = two[j], one[i]
            load[longest] -= saved[i, j]
            load[other] += saved[i, j]
            break
        else:
            return
