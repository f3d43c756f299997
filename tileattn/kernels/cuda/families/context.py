"""`LaunchContext`, the input of a kernel family, and `KernelLaunch`, its output."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from tileattn.call.problem import Problem
from tileattn.dtypes import NAMED
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.size_class import positive_scale
from tileattn.kernels.cuda.tuning import DEFAULT, Tuning

WARP = 32
ROW_WARPS = 4  # warps of a thread block in kernels without tiles: each warp takes rows
NON_FINITE, LARGE_SCORES, FAILED = 1, 2, 4  # flags of heads, as in src/head_flags.cuh
COUNT = 4  # bytes of a counter, u32
_CLUSTERS = 90  # first compute capability with clusters, times ten


class LaunchContext(NamedTuple):
    """What decides about kernels besides the problem: arrays, GPU, wanted gradients."""

    alignment_bytes: int  # alignment of every row of every array
    shared_limit: int  # bytes of shared memory per thread block
    bias: str = ""  # dtype of the bias; "" if there is none
    full_bias: bool = False  # the bias has an element for each pair of each head
    entry_copies: bool = False  # it has one for each pair of a batch entry; copies of these fit
    dbias: bool = False  # the gradient of the bias is wanted
    dqkv: bool = True  # the gradient of q, k or v is wanted
    mask_vector_width: int = 1  # neighbouring mask elements that can be read at once: 1, 2 or 16
    bias_alignment_bytes: int = 0  # alignment of both ends of its rows; 0: too low for copies
    arch: str = ""  # compilation target, like "sm_90a"
    tensor_maps: bool = True  # q, k, v and dout can have tensor maps
    sm_count: int = 1
    mask_block_k: int = 0  # keys of a block of the block mask; 0 if there is none
    functions: str = ""  # the caller's functions as CUDA
    v_is_k: bool = False  # v is a view of the first columns of k
    learned: tuple["LearnedLaunch", ...] = ()  # array elements whose gradients are wanted
    tuning: Tuning = DEFAULT
    deterministic: bool = False  # sum dq in a fixed order


class LearnedLaunch(NamedTuple):
    """What decides about the kernels of the gradient of an array element."""

    functions: str  # CUDA text with the derivative by that element
    own_rows: bool  # each query has elements of its own
    array: int  # number of the array


class Parts(NamedTuple):
    """Bytes of the parts of a workspace, by their names in the parameter block."""

    scratch: dict[str, int]
    zeros: dict[str, int]  # parts that are zeroed before the kernel


@dataclass(frozen=True)
class KernelTraits:
    """What a kernel needs from the plan: tile order, tile lists, workspace, schedule.

    Parameters
    ----------
    main : bool
        True for the kernel whose tile and schedule stand for the pass.
    persistent : str
        Blocks that a persistent thread block takes one after another; "" if each thread block has
        one work tile. In packed sequences a kernel orders these blocks first.
    tile_lists : bool
        True if it skips tiles by lists. The lists hold the key tiles of a query tile if
        ``persistent`` is "queries", the query tiles of a key tile if it is "keys".
    split_keys : int
        Keys of a split if it splits the keys; else 0.
    piece_keys, group_keys : int
        Keys of the pieces of a split, and of a group of splits, whose sums are added one after the
        other; 0 if a split is one piece, and a group of its own.
    part_keys : int
        Keys of a part if it adds up the sums over parts of the keys, as splits are joined; else 0.
    loads_v_with_k : bool
        True if values are columns of the keys that it loads.
    pair_by_pair : bool
        True if it has no tiles.
    beside_rows : bool
        True if it can run right after, or beside, the kernel that computes delta: it starts with
        heads whose delta is complete, and leaves flagged heads to other kernels.
    ordered_dq : bool
        True if its key blocks can add to dq in lockstep, or from staggered heads.
    l2_share : float
        Share of the L2 cache that the keys and values of a head group may fill.
    workspace : callable or None
        Returns the parts of the workspace that it needs, for a problem and its key.
    """

    main: bool = False
    persistent: Literal["", "queries", "keys"] = ""
    tile_lists: bool = False
    split_keys: int = 0
    piece_keys: int = 0
    group_keys: int = 0
    part_keys: int = 0
    loads_v_with_k: bool = False
    pair_by_pair: bool = False
    beside_rows: bool = False
    ordered_dq: bool = False
    l2_share: float = 0.5
    workspace: Callable[[Problem, KernelKey], Parts] | None = field(default=None, repr=False)


PLAIN = KernelTraits()


def main_of(launches: "Iterable[KernelLaunch]") -> "KernelLaunch | None":
    """Return the main launch of a pass; None if there is none."""
    return next((launch for launch in launches if launch.traits.main), None)


class KernelLaunch(NamedTuple):
    """One launch of a kernel."""

    key: KernelKey
    blocks: Grid  # the rule for the number of thread blocks
    shared_bytes: int = 0  # dynamic shared memory
    why: str = "one warp for each row"  # why this kernel, in one clause
    tensor_maps: tuple[tuple[str, int], ...] = ()  # arrays, each with the rows of a box
    in_order: bool = False  # its blocks add to dq in a fixed order
    traits: KernelTraits = PLAIN
    grid: int = 0  # thread blocks, once the sizes are known

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return (1, 1) if self.traits.pair_by_pair else self.key.tile

    def split(self) -> "KernelLaunch":
        """Return the launch of a kernel over keys with several work tiles for each key block."""
        blocks = self.blocks._replace(over="splits of keys")
        return self._replace(key=replace(self.key, split_q=True), blocks=blocks)

    @property
    def workers(self) -> int:
        """Groups of warps, or pairs of thread blocks, each with work tiles of its own."""
        return self.grid * self.key.groups // (1 + self.key.pair)


def option_fields(problem: Problem, context: LaunchContext) -> dict[str, Any]:
    """Return the fields of a key for the enabled options and the caller's functions."""
    P = problem
    found = {
        "bias": context.bias,
        "softcap": P.softcap is not None,
        "alibi": P.has_alibi,
        "mask": P.has_mask,
        "block_mask": P.has_block_mask,
        "dropout": P.has_dropout,
        "origin": P.has_dropout_origin,
        "packed": P.is_packed,
        "fold_scale": not context.bias and folds_scale(P),
    }
    if context.functions:  # empty if there is no pair
        found["functions"] = context.functions
        found["score_mod"] = P.score_mod is not None
        found["mask_mod"] = P.mask_mod is not None
    return found


def refused(problem: Problem, *facts: str) -> str | None:
    """Name the option of the first fact that is true of a problem; None if there is none."""
    return next((problem.option_of(fact) for fact in facts if getattr(problem, fact)), None)


def folds_scale(problem: Problem) -> bool:
    """Return True if the scale is folded into the exponent, so that scores are ``q @ k.T``."""
    return not problem.changes_scores and positive_scale(problem)


def rows_of_block(key: KernelKey, columns: int) -> int:
    """Return the rows of a thread block if a few lanes share each; as in ``src/rows.cuh``."""
    itemsize = NAMED[key.dtype].itemsize
    elements = max(key.alignment_bytes, itemsize) // itemsize
    lanes = 1
    while lanes < WARP and lanes * elements < columns:
        lanes *= 2
    return key.threads // lanes


def capability(arch: str) -> int:
    """Return the compute capability of a target, times ten; 0 if it names none."""
    found = re.search(r"\d+", arch)
    return int(found[0]) if found else 0


def has_clusters(arch: str) -> bool:
    """Return True if a GPU has clusters of thread blocks with distributed shared memory."""
    return capability(arch) >= _CLUSTERS
