"""Results over some of the keys on a GPU, joined or summed in place by one kernel each.

Sums have the accumulation dtype. Between the second part and the last, a float32 sum is split: its
upper half is stored in the 16-bit result, its lower half in an array of its own.
"""

from typing import Any

import numpy as np

from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.load import load
from tileattn.results import Attention

_WARPS, _MOST_BLOCKS, _MOST_HEADS = 8, 132 * 64, 65535
_UNROLLED = 4  # elements of each thread


def keys(dtype: str) -> tuple[KernelKey, ...]:
    """List the kernels for parts of a dtype."""
    return tuple(KernelKey(x, dtype, warps_m=_WARPS) for x in _KERNELS)


_KERNELS = ("join_rows", "add_halves", "add_rows")


def join_rows(
    to: Attention,
    low: Any | None,
    part: Attention | None,
    sinks: Any | None,
    at: slice,
    *,
    is_split: bool,
    splits: bool,
) -> None:
    """Join a part (B, H, n, D) with the rows ``at`` of ``to`` (B, H, N, D), heads of a result.

    A part and its lse are rows of contiguous arrays. ``is_split`` is true if the sums are in two
    halves before the call, ``splits`` if they are afterwards; ``low`` has the lower halves.
    ``sinks`` (H,) in the dtype of sums join the denominator.
    """
    parts = (None, None) if part is None else (part.out, part.lse)
    numbers = *_place(to.out, at, parts[0]), int(is_split), int(splits)
    rows = to.out.shape[0] * to.out.shape[1] * (at.stop - at.start)
    blocks = min(-(-rows // _WARPS), _MOST_BLOCKS)
    _launch("join_rows", to.out, (blocks,), (to.out, low, to.lse, *parts, sinks), numbers, rows)


def add_halves(
    to: Any, low: Any | None, part: Any, at: slice, *, is_split: bool, splits: bool
) -> None:
    """Add a part (B, H, n, D) to the rows ``at`` of sums (B, H, N, D), as in `join_rows`."""
    numbers = *_place(to, at, part), int(is_split), int(splits)
    _launch("add_halves", to, _grid(part.shape), (to, low, part), numbers, part.size)


def add_rows(sums: Any, part: Any, at: slice) -> None:
    """Add a part (B, H, n, D) to the rows ``at`` of contiguous sums (B, H, N, D)."""
    B, H, n, D = part.shape
    numbers = B * H, n, sums.shape[2], at.start, D
    _launch("add_rows", part, _grid(part.shape), (sums, part), numbers, part.size)


def _place(to: Any, at: slice, part: Any | None) -> tuple[int, ...]:
    """Return where the rows are among those of the heads of a contiguous array, and in the part."""
    B, H, N, D = to.shape
    row, n = D * to.itemsize, at.stop - at.start
    between = to.strides[0] // row if B > 1 else 0
    apart = n
    if part is not None and B * H > 1:
        apart = (part.strides[0] // H if B > 1 else part.strides[1]) // row
    return B, H, n, apart, N, at.start, between, D


def _grid(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the thread blocks for the elements of each head."""
    B, H, n, D = shape
    blocks = -(-n * D // (32 * _WARPS * _UNROLLED))
    return min(max(1, blocks), _MOST_BLOCKS), min(max(1, B * H), _MOST_HEADS)


def _launch(
    name: str,
    like: Any,
    grid: tuple[int, ...],
    arrays: tuple[Any, ...],
    numbers: tuple[int, ...],
    work: int,
) -> None:
    """Run a kernel on the current stream, unless there is no work."""
    if not work:
        return
    kernel = load(KernelKey(name, like.dtype.name, warps_m=_WARPS))
    pointers = (np.uint64(0 if x is None else _address(x)) for x in arrays)
    arguments = (*pointers, *map(np.int64, numbers))
    kernel.function(grid, (32 * _WARPS,), arguments)


def _address(x: Any) -> int:
    return int(x.data.ptr)
