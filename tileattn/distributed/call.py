"""The part of a call that one rank has, agreed on by all ranks before anything else is sent."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.call.options import DIFFERENTIABLE
from tileattn.call.problem import Operands, Problem
from tileattn.distributed.arrays import is_on_gpu
from tileattn.distributed.comm.protocol import Communicator
from tileattn.distributed.layout import Segment
from tileattn.distributed.rank_blocks import RankBlocks

Array = NDArray[Any]

_COMMON = ("softcap", "causal", "window", "dropout_p", "seed", "score_mod", "mask_mod", "aux")


class Heads(NamedTuple):
    """Heads of queries, and the heads of keys that they read, among those of a rank."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Call:
    """One rank's part of a call.

    Parameters
    ----------
    comm : Communicator
        The ranks: all of them, or those of a group.
    blocks : RankBlocks
        What this rank computes; it has the layouts.
    problem : Problem
        Of this rank's queries and all keys.
    operands : Operands
        This rank's arrays, with four axes; bias and mask have all keys.
    options : mapping
        Those of the caller.
    backend : str
        Runs the blocks.
    bias_rows, mask_rows : bool
        Whether each rank has rows of the bias, or of the mask, of its own.
    sums : numpy.dtype
        In which results of blocks are summed, and on the CPU blocks are computed.
    deterministic : bool
        Whether the gradients of a block have the same bits on every run; on the CPU they do.
    splits : int
        Calls of a block, each of some of the query heads of all key heads.
    """

    comm: Communicator
    blocks: RankBlocks
    problem: Problem
    operands: Operands
    options: Mapping[str, Any]
    backend: str
    bias_rows: bool
    mask_rows: bool
    sums: np.dtype[Any]
    deterministic: bool = False
    splits: int = 1

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are on a GPU."""
        return is_on_gpu(self.operands.q)

    @property
    def has_indices(self) -> bool:
        """Whether the indices of batch entry, head, query and key matter themselves."""
        P = self.problem
        return bool(P.dropout_p) or P.score_mod is not None or P.mask_mod is not None

    def common(self) -> dict[str, Any]:
        """Give the options that are the same for all blocks and heads."""
        given = {name: self.options[name] for name in _COMMON if name in self.options}
        return given | {"scale": self.problem.scale, "backend": self.backend}

    def wide(self, x: Array) -> Array:
        """Convert to the dtype of sums: partial results of 16 bits would be rounded often.

        On a GPU blocks keep their dtype, in which Tensor Cores multiply.
        """
        return x if self.on_gpu else x.astype(self.sums, copy=False)

    def of_heads(self, heads: Heads, **arrays: Any) -> "Call":
        """Give the call of some of its heads; ``arrays`` are in the place of those that it has.

        Indices of heads are moved.
        """
        x, P = self.operands, self.problem
        own = heads.queries
        found: dict[str, Any] = {"q": x.q[:, own], "k": x.k[:, heads.keys], "v": x.v[:, heads.keys]}
        for name in ("bias", "mask"):
            array = getattr(x, name)
            if array is not None and array.shape[1] > 1:
                found[name] = array[:, own]
        if x.alibi_slopes is not None:
            found["alibi_slopes"] = x.alibi_slopes[:, own]
        if x.sinks is not None:
            found["sinks"] = x.sinks[own]
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
        """Give the options of the call of a block, sinks left out: indices are moved there."""
        x, name = self.operands, (queries.start, queries.stop, keys.start, keys.stop)
        known = self.blocks.options.get(name)
        if known is None:
            known = self.blocks.options[name] = self._placed(queries, keys)
        given = self.common() | known
        if x.alibi_slopes is not None:
            slopes = x.alibi_slopes
            given["alibi_slopes"] = slopes[0] if len(slopes) == 1 else slopes
        if self.has_indices:
            start = np.array([0, 0, queries.start, keys.start])
            given["origin"] = start if x.origin is None else x.origin + start
        # What has a gradient is wide: the sum over blocks is rounded once.
        if "aux" in given:
            given["aux"] = tuple(map(self.wider, given["aux"]))
        if x.bias is not None:
            given["bias"] = self.wider(x.bias[(..., *self.cut(x.bias, queries, keys))])
        if x.mask is not None:
            given["mask"] = x.mask[(..., *self.cut(x.mask, queries, keys))]
        return given

    def _placed(self, queries: Segment, keys: Segment) -> dict[str, Any]:
        """Give what of these options is the same for all heads."""
        x, given = self.operands, dict[str, Any]()
        full = self.blocks.visibility.is_full(queries, keys)
        if full:
            given["causal"], given["window"] = False, None
        Nk = keys.stop - keys.start
        lengths = np.clip(x.kv_lengths - keys.start, 0, Nk)
        offset = x.q_offset + queries.start - keys.start
        if (lengths != Nk).any():
            given["kv_lengths"] = lengths
        moved = (offset != lengths - (queries.stop - queries.start)).any()
        if moved and (not full or x.alibi_slopes is not None):
            given["q_offset"] = offset
        return given

    def wider(self, x: Array) -> Array:
        """Convert floats that are narrower than sums to their dtype."""
        narrow = x.dtype.kind not in "biu" and x.dtype.itemsize < self.sums.itemsize
        return self.wide(x) if narrow else x

    @staticmethod
    def cut(x: Array, queries: Segment, keys: Segment) -> tuple[slice, slice]:
        """Give the part of a block in an array that broadcasts to (B, Hq, Nq, Nk)."""
        rows = queries.rows if x.shape[2] > 1 else slice(None)
        return rows, slice(keys.start, keys.stop) if x.shape[3] > 1 else slice(None)


def asked(wrt: frozenset[str], options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Name the gradients of a call; None if it has no others, for then it is launched sooner."""
    found = {name for name in DIFFERENTIABLE if name in "qkv" or options.get(name) is not None}
    return None if wrt == found else tuple(sorted(wrt))
