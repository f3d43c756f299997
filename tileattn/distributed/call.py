"""The part of a call that one rank has, and the options of its blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.call.options import DIFFERENTIABLE, OPTIONS, PAIR_ARRAYS, options_with
from tileattn.call.problem import Operands, Problem
from tileattn.distributed.arrays import is_on_gpu
from tileattn.distributed.comm.protocol import Communicator
from tileattn.distributed.layout import Segment
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.visibility import Visibility

Array = NDArray[Any]

SHARED_ARRAYS = options_with(value="array", shared=True)
"""Names of the options that are arrays."""

_BLOCK_INVARIANT = {"number", "integer", "flag", "window", "function", "arrays"}
_SAME_FOR_BLOCKS = tuple(
    name for name in options_with(shared=True) if OPTIONS[name].value in _BLOCK_INVARIANT
)


class Heads(NamedTuple):
    """A group of query heads and the key heads that they read, as indices into a rank's heads."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Call:
    """One rank's part of a call."""

    comm: Communicator  # all ranks, or the ranks of a group
    blocks: RankBlocks  # the blocks that this rank computes, and the layouts
    problem: Problem  # the call with this rank's queries and all keys
    operands: Operands  # this rank's arrays with four axes; bias and mask cover all keys
    options: Mapping[str, Any]  # as the caller gave them
    backend: str  # computes the blocks
    with_rows: tuple[str, ...]  # pair arrays of which each rank has the rows of its queries
    sums: np.dtype[Any]  # accumulation dtype; on a CPU also the dtype in which blocks are computed
    deterministic: bool = False  # on a CPU gradients are bitwise reproducible anyway
    splits: int = 1  # calls per block; each computes some query heads of all key heads

    @property
    def on_gpu(self) -> bool:
        """True if the arrays are on a GPU."""
        return is_on_gpu(self.operands.q)

    @property
    def has_indices(self) -> bool:
        """True if results depend on the indices b, h, i and j themselves."""
        P = self.problem
        return P.has_dropout or P.score_mod is not None or P.mask_mod is not None

    def common(self) -> dict[str, Any]:
        """Return the options that are the same for all blocks and heads."""
        given = {name: self.options[name] for name in _SAME_FOR_BLOCKS if name in self.options}
        return given | {"scale": self.problem.scale, "backend": self.backend}

    def wide(self, x: Array) -> Array:
        """Convert to the accumulation dtype: 16-bit partial results would be rounded repeatedly.

        On a GPU blocks keep their dtype, which Tensor Cores multiply.
        """
        return x if self.on_gpu else x.astype(self.sums, copy=False)

    def of_heads(self, heads: Heads, **arrays: Any) -> "Call":
        """Return the call of some heads, with ``arrays`` in place of operands."""
        x, P, own = self.operands, self.problem, heads.queries
        found: dict[str, Any] = {"q": x.q[:, own], "k": x.k[:, heads.keys], "v": x.v[:, heads.keys]}
        for name in SHARED_ARRAYS:
            array, axis = getattr(x, name), OPTIONS[name].axes.index("h")
            if array is not None and array.shape[axis] > 1:
                found[name] = array[(*[slice(None)] * axis, own)]
        if self.has_indices:
            start = np.array([0, own.start, 0, 0])
            found["origin"] = start if x.origin is None else x.origin + start
        found |= arrays
        _, Hq, Nq, _ = found["q"].shape
        return replace(
            self,
            problem=replace(P, Hq=Hq, Hkv=found["k"].shape[1], Nq=Nq),
            operands=x._replace(**found),
        )

    def block(self, queries: Segment, keys: Segment) -> dict[str, Any]:
        """Return the options of the call of a block, without sinks; indices are moved."""
        x, name = self.operands, (queries.start, queries.stop, keys.start, keys.stop)
        known = self.blocks.options.get(name)
        if known is None:
            known = self.blocks.options[name] = self._position_options(queries, keys)
        given = self.common() | known
        if x.alibi_slopes is not None:
            slopes = x.alibi_slopes
            given["alibi_slopes"] = slopes[0] if len(slopes) == 1 else slopes
        if self.has_indices:
            start = np.array([0, 0, queries.start, keys.start])
            given["origin"] = start if x.origin is None else x.origin + start
        # Inputs with a gradient are widened: the sum over blocks is rounded once.
        if "aux" in given:
            given["aux"] = tuple(map(self.wider, given["aux"]))
        for pair_name in PAIR_ARRAYS:
            array = getattr(x, pair_name)
            if array is not None:
                given[pair_name] = self.wider(array[(..., *self.cut(array, queries, keys))])
        return given

    def _position_options(self, queries: Segment, keys: Segment) -> dict[str, Any]:
        """Return the window, lengths and offset of a block; they are the same for all heads."""
        x, given = self.operands, dict[str, Any]()
        visibility = Visibility(self.problem.window, x.kv_lengths, x.q_offset)
        windows = visibility.windows(queries, keys)
        full = all(w.full_key_range(0, w.Nq) == (0, w.length) for w in windows)
        if full:
            given["causal"], given["window"] = False, None
        if any(w.length < keys.stop - keys.start for w in windows):
            given["kv_lengths"] = np.array([w.length for w in windows])
        moved = any(w.offset != w.length - w.Nq for w in windows)
        if moved and (not full or x.alibi_slopes is not None):
            given["q_offset"] = np.array([w.offset for w in windows])
        return given

    def wider(self, x: Array) -> Array:
        """Convert floats that are narrower than the accumulation dtype to it."""
        narrow = x.dtype.kind not in "biu" and x.dtype.itemsize < self.sums.itemsize
        return self.wide(x) if narrow else x

    @staticmethod
    def cut(x: Array, queries: Segment, keys: Segment) -> tuple[slice, slice]:
        """Return the rows and columns of a block in a pair array, which may broadcast."""
        rows = queries.rows if x.shape[2] > 1 else slice(None)
        return rows, slice(keys.start, keys.stop) if x.shape[3] > 1 else slice(None)


def gradients_of(options: Mapping[str, Any]) -> set[str]:
    """Return the names of all inputs of a call that have a gradient."""
    return {name for name in DIFFERENTIABLE if name in "qkv" or options.get(name) is not None}


def requested_gradients(wrt: frozenset[str], options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return ``wrt`` for a call; None, which is faster, if it covers all gradients of the call."""
    return None if wrt == gradients_of(options) else tuple(sorted(wrt))
