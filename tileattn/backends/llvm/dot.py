"""Whether the CPU's dot products of bfloat16 serve a call, and the transposes that they read."""

import numpy as np

from tileattn.backends.llvm.arrays import Array
from tileattn.backends.llvm.execute import multiply_adds, run
from tileattn.kernels.llvm.params import DOT_ARRAYS
from tileattn.kernels.llvm.target import BLOCK, TERMS, Target
from tileattn.problem import Problem

_FEW_ROWS = 16  # of which a call is faster in float32


def serves(P: Problem) -> bool:
    """Whether a problem is one for dot products of bfloat16."""
    return P.dtype.name == "bfloat16" and P.group * P.Nq >= _FEW_ROWS


def prepared(
    target: Target, P: Problem, arrays: dict[str, Array], names: tuple[str, ...]
) -> dict[str, Array] | None:
    """Transpose the named arrays; None if some number of an operand is not usual.

    A transpose is cut into blocks of rows; behind the last one are zeros.
    """
    shapes = {
        name: (P.B * getattr(P, heads) * -(-getattr(P, length) // BLOCK), getattr(P, columns))
        for name, (heads, length, columns) in DOT_ARRAYS.items()
        if name in arrays
    }
    transposes = {}
    for name in names:
        blocks, columns = shapes[name]
        transposes[f"{name}_t"] = x = np.empty(
            (blocks * -(-columns // TERMS) + 1) * TERMS * BLOCK, np.uint16
        )
        x[-BLOCK * TERMS :] = 0
    unusual = np.zeros(1, np.int64)
    tasks = sum(blocks for blocks, _ in shapes.values())
    given = {name: arrays[name] for name in (*shapes, "kv_lengths")}
    work = given | transposes | {"unusual": unusual}
    run("dot_prepare", target, P, work, {}, ((tasks, multiply_adds(P)),))
    return None if unusual[0] else transposes
