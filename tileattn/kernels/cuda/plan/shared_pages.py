"""Plan of the kernel that splits the block table of a cascade: ``src/cascade_tables.cu``."""

from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.single_launch import Layouts, SingleLaunch

POINTERS = (
    *("block_table", "kv_lengths", "shared_lengths"),
    *("table", "shared_table", "own_lengths", "whole_lengths"),
)
"""Arrays, in the order of their addresses. One number follows: ``shared``."""

KEY = KernelKey("cascade_tables", "float32", warps_m=4)

_STRIDED = POINTERS[:3]
CELLS = len(POINTERS) + 1 + 3 * len(_STRIDED) + 4
"""Fields of eight bytes of the parameter block."""


def plan_tables(layouts: Layouts, groups: int, page: int) -> SingleLaunch:
    """Plan ``cascade_tables``; arrays have their names in the parameter block."""
    x = dict(layouts)
    sequences, width = x["block_table"].shape
    cells: list[int] = []
    for name in _STRIDED:
        i, j = (*x[name].elements, 0)[:2] if name in x else (0, 0)
        cells += [x[name].itemsize if name in x else 0, i, j]
    cells += [sequences, width, sequences // groups, page]
    blocks = -(-sequences * max(width, 1) // KEY.threads)
    return SingleLaunch(KEY, (blocks, 1, 1), tuple(cells))
