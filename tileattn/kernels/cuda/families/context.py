"""What decides about kernels, and what is decided."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tileattn.call.problem import Problem
from tileattn.dtypes import NAMED
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.size_class import positive_scale
from tileattn.kernels.cuda.tuning import DEFAULT, Tuning

WARP = 32
ROW_WARPS = 4  # of a thread block, in kernels in which each warp takes rows
NON_FINITE, LARGE_SCORES, FAILED = 1, 2, 4  # flags of heads, as in src/head_flags.cuh
COUNT = 4  # bytes of a counter, u32
_CLUSTERS = 90  # from this compute capability on, times ten


class LaunchContext(NamedTuple):
    """What decides about kernels besides the problem."""

    alignment_bytes: int  # every row of every array is aligned to them
    shared_limit: int  # bytes of shared memory that a thread block may have
    bias: str = ""  # its element type; empty where there is none
    full_bias: bool = False  # whether it has an element for each pair of each head
    dbias: bool = False  # whether its gradient is wanted
    dqkv: bool = True  # whether that of q, k or v is
    mask_vector_width: int = 1  # neighbouring keys of the mask that can be read at once: 1, 2 or 16
    bias_alignment_bytes: int = 0  # of every row, at both ends; 0 where none can be copied
    arch: str = ""  # what kernels are compiled for, as in "sm_90a"
    tensor_maps: bool = True  # whether q, k, v and dout can have tensor maps
    sm_count: int = 1
    mask_block_k: int = 0  # keys of a block of the block mask; 0 where there is none
    functions: str = ""  # of the caller's own, in CUDA
    v_is_k: bool = False  # whether v is a view of the first columns of k
    learned: tuple["LearnedLaunch", ...] = ()  # elements whose gradients are wanted
    tuning: Tuning = DEFAULT


class LearnedLaunch(NamedTuple):
    """What the kernels of the gradient of an element are launched with."""

    functions: str  # with the derivative by that element
    own_rows: bool  # whether queries have elements of their own
    array: int


class Parts(NamedTuple):
    """Bytes of a workspace, by the names of its parts in the parameter block."""

    scratch: dict[str, int]
    zeros: dict[str, int]  # parts that kernels find at zero


@dataclass(frozen=True)
class KernelTraits:
    """What a kernel needs from the plan: tile order, tile lists, workspace, schedule.

    Parameters
    ----------
    main : bool
        True if it computes the result of its pass: its tile and its schedule stand for the pass.
    persistent : str
        Blocks that its persistent thread blocks take one after the other; empty if each thread
        block has one work tile. The blocks of packed sequences are put in order before.
    tile_lists : bool
        True if it skips tiles by lists: key tiles of a query tile, or the converse, as
        ``persistent`` says.
    split_keys : int
        Keys of a split, if it takes the rows that share a key head together, over splits of the
        keys; else 0.
    loads_v_with_k : bool
        True if values are columns of the keys that it loads.
    pair_by_pair : bool
        True if it has no tiles.
    beside_rows : bool
        True if it starts with heads whose delta is complete, and leaves flagged heads to others.
    ordered_dq : bool
        True if its key blocks can add to dq in lockstep, or from staggered heads.
    l2_share : float
        Part of the L2 cache that the keys and values of a head group may fill.
    workspace : callable or None
        Returns the parts of the workspace that it needs, for a problem and its key.
    """

    main: bool = False
    persistent: Literal["", "queries", "keys"] = ""
    tile_lists: bool = False
    split_keys: int = 0
    loads_v_with_k: bool = False
    pair_by_pair: bool = False
    beside_rows: bool = False
    ordered_dq: bool = False
    l2_share: float = 0.5
    workspace: Callable[[Problem, KernelKey], Parts] | None = field(default=None, repr=False)


PLAIN = KernelTraits()


def main_of(launches: "Iterable[KernelLaunch]") -> "KernelLaunch | None":
    """Return the launch whose tile and schedule stand for a pass; None if it has none."""
    return next((launch for launch in launches if launch.traits.main), None)


class KernelLaunch(NamedTuple):
    """One launch of a kernel, and why this one, in one clause."""

    key: KernelKey
    blocks: Grid  # how many thread blocks, whatever the sizes of the call
    shared_bytes: int = 0  # dynamic shared memory
    why: str = "one warp for each row"
    tensor_maps: tuple[tuple[str, int], ...] = ()  # arrays, each with the rows of a box
    in_order: bool = False  # whether its blocks add to dq in a fixed order
    traits: KernelTraits = PLAIN
    grid: int = 0  # thread blocks, once the sizes are known

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return (1, 1) if self.traits.pair_by_pair else self.key.tile

    @property
    def workers(self) -> int:
        """Groups of warps, each with work tiles of its own."""
        return self.grid * self.key.groups


def option_fields(problem: Problem, bias: str) -> dict[str, Any]:
    """Fields of a key that say which options are enabled; ``bias`` is its element type."""
    P = problem
    return {
        "bias": bias,
        "softcap": P.softcap is not None,
        "alibi": P.has_alibi,
        "mask": P.has_mask,
        "block_mask": P.has_block_mask,
        "dropout": P.has_dropout,
        "origin": P.has_dropout_origin,
        "packed": P.is_packed,
        "fold_scale": not bias and folds_scale(P),
    }


def refused(problem: Problem, *facts: str) -> str | None:
    """Name the option of the first fact that is true of a problem; None if there is none."""
    return next((problem.option_of(fact) for fact in facts if getattr(problem, fact)), None)


def function_fields(problem: Problem, context: LaunchContext) -> dict[str, Any]:
    """Fields of a key for the caller's own functions: none where there is no pair."""
    if not context.functions:
        return {}
    return {
        "score_mod": problem.score_mod is not None,
        "mask_mod": problem.mask_mod is not None,
        "functions": context.functions,
    }


def folds_scale(problem: Problem) -> bool:
    """Whether kernels hold ``q @ k.T`` for scores, and scale in the exponent."""
    return not problem.changes_scores and positive_scale(problem)


def rows_of_block(key: KernelKey, columns: int) -> int:
    """Rows of a thread block where a few lanes take each: counterpart of ``src/rows.cuh``."""
    itemsize = NAMED[key.dtype].itemsize
    elements = max(key.alignment_bytes, itemsize) // itemsize
    lanes = 1
    while lanes < WARP and lanes * elements < columns:
        lanes *= 2
    return key.threads // lanes


def has_clusters(arch: str) -> bool:
    """Whether a GPU has clusters, whose thread blocks reach each other's shared memory."""
    found = re.search(r"\d+", arch)
    return found is not None and int(found[0]) >= _CLUSTERS
