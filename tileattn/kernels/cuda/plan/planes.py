"""The planes of float32 arrays, which kernels write to the workspace: their layouts."""

from collections.abc import Iterable

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.float32 import plane_shape
from tileattn.kernels.cuda.plan.layout import ArrayLayout, contiguous

_SUFFIX = "_planes"


def plane_layouts(problem: Problem, launches: Iterable[KernelLaunch]) -> dict[str, ArrayLayout]:
    """Return the layouts of the planes that tensor maps of launches describe, by name."""
    mapped = {name: None for launch in launches for name, _ in launch.tensor_maps}
    return {
        name: contiguous(plane_shape(problem, name.removesuffix(_SUFFIX)), "float16")
        for name in mapped
        if name.endswith(_SUFFIX)
    }
