"""Plan of the kernel that merges results over disjoint sets of keys: ``src/merge_rows.cu``."""

import math

from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.layout import ArrayLayout
from tileattn.kernels.cuda.plan.single_launch import Layouts, SingleLaunch

MAX_PARTS = 8
MAX_ROWS = (1 << 31) - 1
ROW_AXES = 4
"""Most axes of rows. Arrays with more axes must be contiguous, so that two axes are enough."""

OUTS = tuple(f"outs[{n}]" for n in range(MAX_PARTS))
LSES = tuple(f"lses[{n}]" for n in range(MAX_PARTS))
POINTERS = (*OUTS, *LSES, "out", "lse")
"""Arrays, in the order of their addresses."""

CELLS = len(POINTERS) + ROW_AXES * (2 * MAX_PARTS + 1) + 4
"""Fields of eight bytes of the parameter block."""

_WARPS = 4
_BLOCKS_PER_SM = 5  # at most 102 registers a thread: more blocks would spill


def plan_merge(layouts: Layouts) -> SingleLaunch:
    """Plan ``merge`` of arrays with contiguous columns."""
    x = dict(layouts)
    parts = [name for name in OUTS if name in x]
    first = x[parts[0]]
    *sizes, columns = (1,) * (ROW_AXES + 1 - len(first.shape)) + first.shape
    rows, itemsize = math.prod(sizes), first.itemsize
    widths = [max(x[name].row_alignment, itemsize) for name in (*parts, "out")]  # in bytes
    key = KernelKey(
        *("merge_rows", first.dtype),
        warps_m=_WARPS,
        min_blocks_per_sm=_BLOCKS_PER_SM,
        alignment_bytes=math.gcd(*widths),
    )
    row_threads = min(max(columns // (key.alignment_bytes // itemsize), 1), key.threads)
    strides = [_strides(x.get(name), is_out=True) for name in OUTS]
    strides += [_strides(x.get(name), is_out=False) for name in LSES]
    cells = [n for each in (*strides, sizes) for n in each]
    cells += [len(parts), rows, columns, row_threads]
    blocks = max(1, -(-rows // (key.threads // row_threads)))
    return SingleLaunch(key, (blocks, 1, 1), tuple(cells))


def _strides(x: ArrayLayout | None, *, is_out: bool) -> tuple[int, ...]:
    """Return strides in elements along the axes of rows; 0 along axes that are added in front."""
    own = () if x is None else x.elements[:-1] if is_out else x.elements
    return (0,) * (ROW_AXES - len(own)) + own
