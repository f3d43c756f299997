"""What decides about kernels, and what is decided."""

from typing import Any, NamedTuple

from tileattn.dtypes import NAMED
from tileattn.kernels.config.key import KernelKey
from tileattn.problem import Problem

WARP = 32
ROW_WARPS = 4
"""Warps of a thread block, in kernels in which each warp takes rows."""

NON_FINITE, LARGE, FAILED = 1, 2, 4
"""Flags of heads, as in ``src/head_flags.cuh``."""

_ROW_PAD = 128  # no query block is longer, and all divide it


class LaunchContext(NamedTuple):
    """What decides about kernels besides the problem.

    Parameters
    ----------
    alignment_bytes : int
        Every row of every array is aligned to them.
    shared_limit : int
        Bytes of shared memory that a thread block may have.
    bias : str
        Element type of the bias; empty where there is none.
    bias_shape : tuple of int
        Its four axes.
    mask_vector_width : int
        Neighbouring keys of the mask that can be read at once: 1, 2 or 16.
    bias_alignment_bytes : int
        Every row of the bias starts and ends aligned to them; 0 where rows cannot be copied.
    arch : str
        What kernels are compiled for, as in ``"sm_90a"``.
    tensor_maps : bool
        Whether q, k and v, and in the backward pass dout, can have tensor maps.
    sm_count : int
        SMs of the device.
    mask_block_k : int
        Keys of a block of the block mask; 0 where there is none.
    """

    alignment_bytes: int
    shared_limit: int
    bias: str = ""
    bias_shape: tuple[int, ...] = ()
    mask_vector_width: int = 1
    bias_alignment_bytes: int = 0
    arch: str = ""
    tensor_maps: bool = True
    sm_count: int = 1
    mask_block_k: int = 0


class KernelConfig(NamedTuple):
    """A kernel, its shared memory, and why it was chosen.

    Parameters
    ----------
    key : KernelKey
        What is compiled.
    shared_bytes : int
        Dynamic shared memory.
    tuned : bool
        Whether its tiles were chosen by measurement, and its registers suffice.
    why : str
        One clause.
    """

    key: KernelKey
    shared_bytes: int
    tuned: bool
    why: str


class KernelLaunch(NamedTuple):
    """One launch of a kernel.

    Parameters
    ----------
    key : KernelKey
        What is compiled.
    grid : int
        Thread blocks.
    shared_bytes : int
        Dynamic shared memory.
    why : str
        Why this kernel, in one clause.
    tensor_maps : tuple of (str, int)
        Arrays of which the kernel takes tensor maps, each with the rows of a box.
    in_order : bool
        Whether its thread blocks add to dq one after the other, in a fixed order.
    """

    key: KernelKey
    grid: int
    shared_bytes: int = 0
    why: str = "one warp for each row"
    tensor_maps: tuple[tuple[str, int], ...] = ()
    in_order: bool = False


def option_fields(problem: Problem, bias: str) -> dict[str, Any]:
    """Fields of a key that say which options are enabled; ``bias`` is its element type."""
    uses = problem.uses
    return {
        "bias": bias,
        "softcap": "softcap" in uses,
        "alibi": "alibi_slopes" in uses,
        "mask": "mask" in uses,
        "block_mask": "block_mask" in uses,
        "dropout": problem.dropout_p > 0,
        "fold_scale": not bias and folds_scale(problem),
    }


def folds_scale(problem: Problem) -> bool:
    """Whether kernels hold ``q @ k.T`` for scores, and scale in the exponent."""
    modifiers = {"softcap", "alibi_slopes", "bias"}
    return problem.uses.isdisjoint(modifiers) and problem.scale > 0


def padded_rows(queries: int) -> int:
    """Rows of a head in the arrays that kernels of the backward pass exchange."""
    return -(-queries // _ROW_PAD) * _ROW_PAD


def rows_of_block(key: KernelKey, columns: int) -> int:
    """Rows of a thread block where a few lanes take each: counterpart of ``src/rows.cuh``."""
    itemsize = NAMED[key.dtype].itemsize
    elements = max(key.alignment_bytes, itemsize) // itemsize
    lanes = 1
    while lanes < WARP and lanes * elements < columns:
        lanes *= 2
    return key.threads // lanes


def row_grid(rows: int) -> int:
    """Thread blocks for rows of which each warp takes one."""
    return -(-rows // ROW_WARPS)
