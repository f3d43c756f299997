"""Plans of kernels outside attention calls: one launch with its own parameter block."""

from typing import NamedTuple

from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.layout import ArrayLayout

Layouts = tuple[tuple[str, ArrayLayout], ...]
"""Arrays by their names in the parameter block."""


class SingleLaunch(NamedTuple):
    """A kernel, its grid, and the cells of its parameter block after addresses and numbers."""

    key: KernelKey
    grid: tuple[int, int, int]
    cells: tuple[int, ...]
