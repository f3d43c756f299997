"""Layouts: which tokens of a sequence each rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import index
from typing import Any, NamedTuple

import numpy as np

from tileattn.distributed.arrays import library


class Segment(NamedTuple):
    """Consecutive tokens of a rank.

    Parameters
    ----------
    start, stop : int
        Range of tokens in the whole sequence.
    rows : slice
        The rows of the tokens in the arrays of the rank.
    """

    start: int
    stop: int
    rows: slice


@dataclass(frozen=True)
class Layout:
    """Which tokens each rank holds: ranges, stored one after another in its arrays.

    Parameters
    ----------
    parts : sequence of sequence of (int, int)
        For each rank its ranges ``(start, stop)``; all together hold each token once.

    Raises
    ------
    ValueError
        If a token is missing, or in two ranges.

    Examples
    --------
    >>> from tileattn.distributed import Layout
    >>> Layout.zigzag(16, ranks=2).parts
    (((0, 4), (12, 16)), ((4, 8), (8, 12)))
    """

    parts: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        try:
            parts = tuple(tuple((index(a), index(b)) for a, b in part) for part in self.parts)
        except (TypeError, ValueError):
            raise TypeError(
                "parts must have, for each rank, a sequence of ranges (start, stop) of integers; "
                f"got {self.parts!r}"
            ) from None
        object.__setattr__(self, "parts", parts)
        at = 0
        for start, stop in sorted(x for part in parts for x in part if x[0] != x[1]):
            if start != at or stop < start:
                raise ValueError(
                    f"parts must hold each token once: expected a range from {at} on; got "
                    f"({start}, {stop})"
                )
            at = stop

    @classmethod
    def contiguous(cls, lengths: Sequence[int]) -> "Layout":
        """Give each rank one range.

        Parameters
        ----------
        lengths : sequence of int
            Tokens of each rank.

        Returns
        -------
        Layout
            The ranges in the order of the ranks.
        """
        if not isinstance(lengths, Sequence | np.ndarray):
            raise TypeError(f"lengths must be a sequence of integers; got {lengths!r}")
        counts = [count("lengths", n, 0) for n in lengths]
        return cls(tuple((ends,) for ends in pairwise(accumulate(counts, initial=0))))

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> "Layout":
        """Give each rank two ranges: one near the start, one equally near the end.

        With a causal mask all ranks then have the same work.

        Parameters
        ----------
        length : int
            Tokens of the sequence.
        ranks : int
            Number of ranks.

        Returns
        -------
        Layout
            Of ``2 * ranks`` equal ranges, rank r has r and ``2 * ranks - 1 - r``.
        """
        length, ranks = count("length", length, 0), count("ranks", ranks, 1)
        chunks = list(pairwise(n * length // (2 * ranks) for n in range(2 * ranks + 1)))
        return cls(tuple((chunks[r], chunks[-1 - r]) for r in range(ranks)))

    @classmethod
    def striped(cls, length: int, ranks: int, width: int) -> "Layout":
        """Give ranges of one width to the ranks in turn.

        Parameters
        ----------
        length : int
            Tokens of the sequence.
        ranks : int
            How many ranks there are.
        width : int
            Tokens of a range, at least 1. Each range is a separate call: wide ranges are faster.

        Returns
        -------
        Layout
            Rank r has the ranges r, ``r + ranks``, ``r + 2 * ranks`` and so on.

        Raises
        ------
        ValueError
            If length is negative, or ranks or width is less than 1.

        References
        ----------
        Brandon et al., Striped Attention, arXiv:2311.09431.
        """
        length, ranks = count("length", length, 0), count("ranks", ranks, 1)
        width = count("width", width, 1)
        stripes = [(start, min(start + width, length)) for start in range(0, length, width)]
        return cls(tuple(tuple(stripes[r::ranks]) for r in range(ranks)))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.length_of(rank) for rank in range(self.ranks))

    def length_of(self, rank: int) -> int:
        """Count the tokens of a rank."""
        return sum(stop - start for start, stop in self.parts[rank])

    def segments(self, rank: int) -> list[Segment]:
        """List the segments of a rank; adjacent ranges are joined."""
        found, at = list[Segment](), 0
        for start, stop in self.parts[rank]:
            rows = slice(at, at := at + stop - start)
            if found and found[-1].stop == start:
                start, rows = found[-1].start, slice(found.pop().rows.start, at)  # noqa: PLW2901 - of both
            found.append(Segment(start, stop, rows))
        return found

    def take(self, x: Any, rank: int, axis: int = -2) -> Any:
        """Copy the tokens of a rank from an array that holds all tokens.

        Parameters
        ----------
        x : array or torch.Tensor
            Array with all tokens along an axis.
        rank : int
            The rank.
        axis : int
            The axis of the tokens.

        Returns
        -------
        array or torch.Tensor
            A copy.
        """
        found = _empty_like(x, axis, self.length_of(rank))
        for start, stop, rows in self.segments(rank):
            found[_along(x, axis, rows)] = x[_along(x, axis, slice(start, stop))]
        return found

    def join(self, parts: Sequence[Any], axis: int = -2) -> Any:
        """Join the parts of all ranks: the inverse of ``take``.

        Parameters
        ----------
        parts : sequence of array or of torch.Tensor
            The parts of all ranks, in rank order.
        axis : int
            The axis of the tokens.

        Returns
        -------
        array or torch.Tensor
            All tokens in their order.
        """
        found = _empty_like(parts[0], axis, self.length)
        for rank, x in enumerate(parts):
            for start, stop, rows in self.segments(rank):
                found[_along(x, axis, slice(start, stop))] = x[_along(x, axis, rows)]
        return found


def count(name: str, x: Any, least: int) -> int:
    """Validate a count."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be an integer of at least {least}; got {x!r}")
    if x < least:
        raise ValueError(f"{name} must be an integer of at least {least}; got {x}")
    return int(x)


def _empty_like(x: Any, axis: int, length: int) -> Any:
    shape = list(x.shape)
    shape[axis] = length
    if hasattr(x, "new_empty"):  # a tensor
        return x.new_empty(shape)
    return library(x).empty(shape, x.dtype)


def _along(x: Any, axis: int, which: slice) -> tuple[slice, ...]:
    """Return the index of a slice along an axis."""
    index = [slice(None)] * x.ndim
    index[axis] = which
    return tuple(index)


def layout_inside(layout: Layout, group: int, n: int) -> Layout:
    """Return the layout of one group of n ranks, with indices into the tokens of the group."""
    parts = layout.parts[group * n : group * n + n]
    ranges = sorted(x for part in parts for x in part)
    found, at = dict[tuple[int, int], tuple[int, int]](), 0
    for start, stop in ranges:
        found[start, stop] = at, at + stop - start
        at += stop - start
    return Layout(tuple(tuple(found[x] for x in part) for part in parts))


def layout_across(layout: Layout, n: int) -> Layout:
    """Return the layout whose ranks are groups of n ranks."""
    groups = (layout.parts[first : first + n] for first in range(0, layout.ranks, n))
    return Layout(tuple(tuple(sorted(x for part in group for x in part)) for group in groups))
