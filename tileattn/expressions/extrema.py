"""Range minimum and maximum queries on an array, for many ranges at once."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_MOST = 1 << 26  # elements; larger tables are not built


class RangeExtrema:
    """Answers ranges of an array from tables over ranges whose lengths are powers of 2.

    A table is built on first use from the table of half the length; quadtrees need few of them.

    Parameters
    ----------
    array : array
        The elements; a copy is not made.
    """

    def __init__(self, array: Array) -> None:
        levels = 1 + sum(max(n, 1).bit_length() for n in array.shape)
        self.is_small = array.size * levels <= _MOST
        array = array.astype(np.float32) if array.dtype.kind == "V" else array
        start = (0,) * array.ndim
        self._tables: list[tuple[Callable[..., Array], dict[tuple[int, ...], Array]]] = [
            (np.minimum, {start: array}),
            (np.maximum, {start: array}),
        ]
        self.shape = array.shape

    def bounds(self, first: Sequence[Array], last: Sequence[Array]) -> tuple[Array, Array]:
        """Return the smallest and largest elements, given first and last indices of each axis."""
        if not self.shape:
            return self._tables[0][1][()], self._tables[1][1][()]
        first, last = np.broadcast_arrays(*first), np.broadcast_arrays(*last)
        levels = [np.frexp(b - a + 1)[1] - 1 for a, b in zip(first, last, strict=True)]
        shape = first[0].shape
        low, high = (np.empty(shape, table[(0,) * len(levels)].dtype) for _, table in self._tables)
        level_code = np.zeros(shape, np.int64)
        for level in levels:
            level_code = level_code * 64 + level
        for unique_code in np.unique(level_code):
            chosen = level_code == unique_code
            key = tuple(int(level[chosen][0]) for level in levels)
            for out, (choose, tables) in zip((low, high), self._tables, strict=True):
                table = self._table(choose, tables, key)
                ends = [
                    (a[chosen], b[chosen] + 1 - (1 << n))
                    for a, b, n in zip(first, last, key, strict=True)
                ]
                out[chosen] = _reduced(choose, [table[at] for at in itertools.product(*ends)])
        return low, high

    def _table(
        self,
        choose: Callable[..., Array],
        tables: dict[tuple[int, ...], Array],
        key: tuple[int, ...],
    ) -> Array:
        if key not in tables:
            axis = next(n for n, level in enumerate(key) if level)
            half = (*key[:axis], key[axis] - 1, *key[axis + 1 :])
            below, step = self._table(choose, tables, half), 1 << (key[axis] - 1)
            start = [slice(None)] * below.ndim
            stop = [*start]
            start[axis], stop[axis] = slice(None, below.shape[axis] - step), slice(step, None)
            tables[key] = choose(below[tuple(start)], below[tuple(stop)])
        return tables[key]


def _reduced(choose: Callable[..., Array], arrays: list[Array]) -> Array:
    total = arrays[0]
    for x in arrays[1:]:
        total = choose(total, x)
    return total
