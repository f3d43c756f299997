"""What the CPU's dot products of bfloat16 need besides the arrays of a call."""

import numpy as np

from tileattn.backends.llvm.arrays import Array
from tileattn.call.problem import Problem
from tileattn.kernels.llvm.params import DOT_ARRAYS, DOT_TRANSPOSES
from tileattn.kernels.llvm.sizes import BLOCK, TERMS, padded
from tileattn.kernels.llvm.target import Target

_FEW_ROWS = 16  # of which a call is faster in float32


def serves(P: Problem) -> bool:
    """Whether a problem is one for dot products of bfloat16."""
    if any(x is not None for x in (P.score_mod, P.mask_mod, P.sequences, P.page)):
        return False
    return P.dtype.name == "bfloat16" and P.group * P.Nq >= _FEW_ROWS


def blocks(P: Problem, name: str) -> int:
    """Count the blocks of an operand, a task of ``dot_prepare`` each."""
    heads, length, _ = DOT_ARRAYS[name]
    return int(P.B * getattr(P, heads) * -(-getattr(P, length) // BLOCK))


def workspace(P: Problem, name: str, target: Target) -> dict[str, Array]:
    """Make room for the transposes that a pass reads.

    A transpose is cut into blocks of rows. Products may read up to TERMS numbers past the last one.
    """
    arrays: dict[str, Array] = {}
    for operand in DOT_TRANSPOSES[name]:
        columns = padded(target, P.accum_dtype.itemsize, getattr(P, DOT_ARRAYS[operand][2]))
        size = blocks(P, operand) * columns * BLOCK
        arrays[f"{operand}_t"] = x = np.empty(size + TERMS, np.uint16)
        x[size:] = 0
    return arrays
