"""What an assignment of work tiles amounts to, counted tile by tile; no GPU."""

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def loads_of(table: Array, costs: Array) -> Array:
    """Check that a table is one, and add up the costs of each column."""
    tiles = len(costs)
    assigned = table[table < tiles]
    assert np.array_equal(np.sort(assigned), np.arange(tiles))  # each of them once
    # After its tiles a column has only the end, at least once.
    assert ((table >= 0) & (table <= tiles)).all()
    assert (np.diff((table == tiles).astype(int), axis=0) >= 0).all()
    assert (table[-1] == tiles).all()
    assert table.dtype == np.int32
    assert table.flags.c_contiguous
    loads: Array = np.append(costs, 0)[table].sum(0)
    return loads


def ends_of(loads: Array, workers: int) -> Array:
    """When each of the workers ends, if the columns of others begin as they end."""
    free = loads[:workers].tolist()
    heapq.heapify(free)
    for load in loads[workers:].tolist():
        heapq.heapreplace(free, free[0] + load)
    return np.array(free)
