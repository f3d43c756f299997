"""Results over some of the keys on a GPU: joined, rounded and summed by a kernel each."""

from typing import Any

import numpy as np

from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.jit.load import load

_WARPS, _MOST_BLOCKS, _MOST_HEADS = 8, 132 * 64, 65535
_UNROLLED = 4  # elements of each thread


def keys(dtype: str) -> tuple[KernelKey, ...]:
    """List the kernels for parts of a dtype."""
    return tuple(KernelKey(x, dtype, warps_m=_WARPS) for x in _KERNELS)


_KERNELS = ("join_rows", "finish_rows", "add_rows")


def join_rows(sums: Any, lse: Any, part: Any, part_lse: Any, at: slice, *, is_first: bool) -> None:
    """Join a part (B, H, n, D) with the rows ``at`` of sums (B, H, N, D) and their logsumexp.

    The first part of a row is copied.
    """
    B, H, n, D = part.shape
    rows = B * H * n
    numbers = B * H, n, sums.shape[2], at.start, D, int(is_first)
    _launch("join_rows", part.dtype, (_blocks(rows),), (sums, lse, part, part_lse), numbers, rows)


def finish_rows(out: Any, lse: Any, sums: Any, sinks: Any | None) -> None:
    """Round sums to ``out``; sinks (H,) of the dtype of sums join the denominator."""
    B, H, N, D = out.shape
    rows = B * H * N
    _launch(
        "finish_rows", out.dtype, (_blocks(rows),), (out, lse, sums, sinks), (rows, N, H, D), rows
    )


def add_rows(sums: Any, part: Any, at: slice) -> None:
    """Add a part (B, H, n, D) to the rows ``at`` of sums (B, H, N, D)."""
    B, H, n, D = part.shape
    blocks = -(-n * D // (32 * _WARPS * _UNROLLED))
    grid = min(max(1, blocks), _MOST_BLOCKS), min(max(1, B * H), _MOST_HEADS)
    numbers = B * H, n, sums.shape[2], at.start, D
    _launch("add_rows", part.dtype, grid, (sums, part), numbers, part.size)


def _blocks(rows: int) -> int:
    return min(-(-rows // _WARPS), _MOST_BLOCKS)


def _launch(
    name: str,
    dtype: np.dtype[Any],
    grid: tuple[int, ...],
    arrays: tuple[Any, ...],
    numbers: tuple[int, ...],
    work: int,
) -> None:
    """Run a kernel on the current stream, if there is something to do; arrays are contiguous."""
    if not work:
        return
    kernel = load(KernelKey(name, dtype.name, warps_m=_WARPS))
    pointers = (np.uint64(0 if x is None else x.data.ptr) for x in arrays)
    arguments = (*pointers, *map(np.int64, numbers))
    kernel.function(grid, (32 * _WARPS,), arguments)
