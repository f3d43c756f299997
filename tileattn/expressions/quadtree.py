"""Find the blocks of a mask that are not empty, by interval arithmetic on a quadtree of them.

A square of blocks that is empty or full is done; any other is cut into four. All squares of one
size are evaluated together. The time is proportional to the blocks found and to the boundary
between visible and hidden regions, not to all blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.expressions.extrema import RangeExtrema
from tileattn.expressions.intervals import bounds
from tileattn.expressions.nodes import Node, depends_on

Ints = NDArray[np.int64]

START = 32  # squares along each axis to start from: one call of NumPy decides them all
_FLOAT = np.dtype(np.float64)  # masks are evaluated in it, whatever the dtype of the arrays


class BlockRuns(NamedTuple):
    """Runs of blocks of one kind along the keys, sorted; kinds as in ``BlockMask``."""

    row: Ints  # query block
    first: Ints  # key block
    stop: Ints
    kind: Ints  # 1 unknown, 2 full


def find_blocks(
    visible: Node,
    aux: Sequence[RangeExtrema | None],
    b: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    constants: Sequence[int] = (),
) -> BlockRuns:
    """Find the blocks that are not known to be empty, for all of some heads.

    ``heads`` are the first and the last of the query heads, ``lengths`` are Nq and Nk, and
    ``constants`` the cells of the parameters.
    """
    counts = [-(-n // size) for n, size in zip(lengths, block_size, strict=True)]
    step = 1 << max(0, (max(counts) - 1).bit_length() - START.bit_length() + 1)
    squares = [x.ravel() for x in np.indices([-(-n // step) for n in counts])]
    found: list[Ints] = []
    while squares[0].size:
        row, column = squares
        starts = row * step, column * step
        kind = _kinds(visible, aux, b, heads, lengths, block_size, starts, step, constants)
        found.append(_as_runs(row, column, kind, step, counts, every=step == 1))
        if step == 1:
            break
        step //= 2
        unknown = kind == 1
        squares = [
            (2 * x[unknown, None] + np.array(half)).ravel()
            for x, half in ((row, (0, 0, 1, 1)), (column, (0, 1, 0, 1)))
        ]
        inside = (squares[0] * step < counts[0]) & (squares[1] * step < counts[1])
        squares = [x[inside] for x in squares]
    return _merged(np.concatenate(found, axis=1) if found else np.zeros((4, 0), np.int64))


def all_kinds(
    visible: Node,
    aux: Sequence[RangeExtrema | None],
    shape: tuple[int, ...],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    constants: Sequence[int] = (),
) -> Any:
    """Return the kind of every block, for all batch entries and heads at once."""
    b, h, row, column = np.ogrid[tuple(map(slice, shape))]
    inputs = {"b": (b, b), "h": (h, h), **_ranges(lengths, block_size, (row, column), 1)}
    low, high = bounds(visible, inputs, aux, _FLOAT, constants)
    return np.broadcast_to(low + high, shape)


def _kinds(
    visible: Node,
    aux: Sequence[RangeExtrema | None],
    b: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    starts: tuple[Ints, Ints],
    step: int,
    constants: Sequence[int],
) -> Ints:
    """Return the kinds of squares of blocks: 0 empty, 2 full, 1 unknown."""
    inputs = {"b": (b, b), "h": heads, **_ranges(lengths, block_size, starts, step)}
    low, high = bounds(visible, inputs, aux, _FLOAT, constants)
    kind = np.broadcast_to(low + high, starts[0].shape)
    return np.asarray(kind, np.int64)


def _ranges(
    lengths: tuple[int, int], block_size: tuple[int, int], starts: tuple[Any, Any], step: int
) -> dict[str, tuple[Any, Any]]:
    """Return the first and last query and key of squares of blocks."""
    return {
        name: (start * size, np.minimum((start + step) * size, n) - 1)
        for name, start, size, n in zip("ij", starts, block_size, lengths, strict=True)
    }


def _as_runs(
    row: Ints, column: Ints, kind: Ints, step: int, counts: Sequence[int], *, every: bool
) -> Ints:
    """Cut full squares into runs, one for each query block; with ``every``, all non-empty ones."""
    chosen = kind > 0 if every else kind == 2
    rows = (row[chosen, None] * step + np.arange(step)).ravel()
    first = np.repeat(column[chosen] * step, step)
    runs = np.stack(
        [rows, first, np.minimum(first + step, counts[1]), np.repeat(kind[chosen], step)]
    )
    return runs[:, rows < counts[0]]


def _merged(runs: Ints) -> BlockRuns:
    """Sort runs, and join neighbours of one kind."""
    row, first, stop, kind = runs[:, np.lexsort((runs[1], runs[0]))]
    begins = np.ones(len(row), np.bool_)
    begins[1:] = (row[1:] != row[:-1]) | (first[1:] != stop[:-1]) | (kind[1:] != kind[:-1])
    ends = np.append(begins[1:], True)[: len(row)]
    return BlockRuns(row[begins], first[begins], stop[ends], kind[begins])


def kinds_by_intervals(
    visible: Node,
    shape: tuple[int, int, int, int],
    block_size: tuple[int, int],
    aux: Sequence[RangeExtrema | None] = (),
    constants: Sequence[int] = (),
) -> NDArray[np.int8]:
    """Classify the blocks of an expression, shape (B or 1, Hq or 1, ...).

    Blocks that intervals leave unknown are partial. ``constants`` are the cells of the parameters.
    """
    (B, Hq, Nq, Nk), (bq, bk) = shape, block_size
    own = [n if depends_on(visible, name) else min(n, 1) for n, name in ((B, "b"), (Hq, "h"))]
    kinds = np.zeros((*own, -(-Nq // bq), -(-Nk // bk)), np.int8)  # empty
    if kinds.size and max(kinds.shape[2:]) <= START:
        kinds[...] = all_kinds(visible, aux, kinds.shape, (Nq, Nk), block_size, constants)
        return kinds
    for b, h in np.ndindex(*own):
        runs = find_blocks(visible, aux, b, (h, h), (Nq, Nk), block_size, constants)
        for row, first, stop, kind in zip(*runs, strict=True):
            kinds[b, h, row, first:stop] = kind
    return kinds
