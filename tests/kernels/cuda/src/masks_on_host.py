"""Run the attention mask of mask.cuh on the CPU, pair by pair."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.cuda.src.on_host import built, kernel_texts, named, parameter_block, pointer
from tileattn.kernels.cuda.plan.plan import LaunchPlan

Array = NDArray[Any]

_VISIBLE = """\
#include "mask.cuh"

extern "C" void visible(const Params* p, int rows, int columns, bool* by_function, bool* seen) {
    for (i64 b = 0; b < p->B; ++b)
        for (i64 h = 0; h < p->Hq; ++h) {
            const AttentionMask mask(*p, b, h);
            for (int i = 0; i < rows; ++i)
                for (int j = 0; j < columns; ++j) {
                    *by_function++ = mask.by_function(i, j);
                    *seen++ = mask.visible(i, j);
                }
        }
}
"""


def visible(
    folder: Path, plan: LaunchPlan, aux: Sequence[Array], rows: int, columns: int
) -> tuple[Array, Array]:
    """Return the pairs that the mask_mod of a plan makes visible, and that its whole mask does.

    There may be more rows and columns than queries and keys.
    """
    block = parameter_block(plan.fields, named(aux), plan.aux)
    key = next(launch.key for launch in plan.launches if launch.key.mask_mod)
    texts = kernel_texts(replace(key, kernel="visible"), 1, "float32")
    library = built(folder, texts | {"visible.cpp": _VISIBLE}, "visible.cpp")
    P = plan.problem
    found, seen = (np.zeros((P.B, P.Hq, rows, columns), bool) for _ in range(2))
    library.visible(pointer(block), rows, columns, pointer(found), pointer(seen))
    return found, seen
