"""``merge`` of CuPy arrays: one launch, on the current stream."""

import math
from typing import Any

from tileattn.backends.cupy.single_launch import run
from tileattn.kernels.cuda.plan import merged_rows
from tileattn.kernels.cuda.plan.merged_rows import LSES, OUTS
from tileattn.results import Attention


def merge(outs: list[Any], lses: list[Any]) -> Attention | None:
    """Run a validated call; return None if there are more parts or rows than the kernel takes."""
    if len(outs) > merged_rows.MAX_PARTS or lses[0].size > merged_rows.MAX_ROWS:
        return None
    import cupy

    out = cupy.ndarray(outs[0].shape, outs[0].dtype)
    lse = cupy.ndarray(lses[0].shape, lses[0].dtype)
    if lse.size:
        flat = lse.ndim > merged_rows.ROW_AXES
        arrays = {name: _rows(x, 1, flat=flat) for name, x in zip(OUTS, outs, strict=False)}
        arrays |= {name: _rows(x, 0, flat=flat) for name, x in zip(LSES, lses, strict=False)}
        arrays |= {"out": out, "lse": lse}
        run(merged_rows.plan_merge, merged_rows.POINTERS, arrays, ())
    return Attention(out, lse)


def _rows(x: Any, columns: int, *, flat: bool) -> Any:
    """Return an array as the kernel takes it: with contiguous columns, and few axes of rows.

    ``columns`` is the number of axes of columns. ``flat`` asks for one axis of rows.
    """
    strided = columns and x.shape[-1] > 1 and x.strides[-1] != x.itemsize
    if (flat or strided) and not x.flags.c_contiguous:
        import cupy

        copy = cupy.ndarray(x.shape, x.dtype)
        cupy.copyto(copy, x, casting="no")
        x = copy
    cut = x.ndim - columns
    return x.reshape(math.prod(x.shape[:cut]), *x.shape[cut:]) if flat else x
