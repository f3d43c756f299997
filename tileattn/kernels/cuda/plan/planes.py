"""The planes of float32 keys and values, which a kernel writes to the workspace: their layouts."""

from collections.abc import Iterable

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.float32 import planes
from tileattn.kernels.cuda.plan.layout import ArrayLayout, contiguous


def plane_layouts(problem: Problem, launches: Iterable[KernelLaunch]) -> dict[str, ArrayLayout]:
    """Return the layouts of the planes that tensor maps of launches describe, by name."""
    mapped = {name for launch in launches for name, _ in launch.tensor_maps}
    shapes = planes(problem)
    return {name: contiguous(shapes[name], "float16") for name in shapes if name in mapped}
