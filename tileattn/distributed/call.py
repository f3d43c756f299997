"""The part of a call that one rank has, agreed on by all ranks before anything else is sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.backends import registry
from tileattn.call.options import DIFFERENTIABLE
from tileattn.call.parse import aux_arrays, four_axes, parse
from tileattn.call.problem import Operands, Problem
from tileattn.call.window import window_of
from tileattn.distributed.agreement import (
    Terms,
    check_supported,
    compare,
    on_all,
    shown,
    terms_of,
)
from tileattn.distributed.arrays import is_on_gpu, library
from tileattn.distributed.head_groups import Heads
from tileattn.distributed.layout import Layout, Segment
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.ranks import Communicator, Ranks
from tileattn.distributed.visibility import Visibility

Array = NDArray[Any]

_COMMON = ("softcap", "causal", "window", "dropout_p", "seed", "score_mod", "mask_mod", "aux")
_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")


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


def agreed(
    q: Any,
    k: Any,
    v: Any,
    comm: Ranks,
    layout: Any,
    layout_k: Any,
    options: Mapping[str, Any],
    *,
    step: str,
    backend: str,
    check: Callable[[], Mapping[str, Any]],
) -> Call:
    """Validate a call on all ranks: where one refuses it, or they differ, all raise.

    ``check`` validates other arguments, and returns what of them must be the same.
    """
    lengths = on_all(comm, step, lambda: _lengths(q, k, v, comm, options))
    kept: list[tuple[Layout, Layout, Problem, Operands]] = []

    def terms() -> Terms:
        """Validate this rank's arguments."""
        queries, keys = map(list, zip(*lengths, strict=True))
        q_layout = _own_layout("layout", layout, queries, comm.rank)
        of_keys = ("layout", layout) if layout_k is None else ("layout_k", layout_k)
        k_layout = _own_layout(*of_keys, keys, comm.rank)
        problem, operands = _parsed(q, k, v, q_layout.length, k_layout.length, options)
        _check_backend(backend, problem, q, k, v, options)
        kept.append((q_layout, k_layout, problem, operands))
        more = {"layout": q_layout, "layout_k": k_layout, "backend": backend, **check()}
        found = terms_of(problem, operands, options)
        return found._replace(facts=found.facts | {name: shown(x) for name, x in more.items()})

    of_bias, of_mask = compare(on_all(comm, step, terms))
    q_layout, k_layout, problem, operands = kept[0]
    visibility = Visibility(problem.window, operands.kv_lengths, operands.q_offset)
    blocks = RankBlocks(visibility, q_layout, k_layout, comm.rank)
    facts = problem, operands, options, backend, of_bias, of_mask, problem.accum_dtype
    return Call(comm, blocks, *facts)


def _lengths(q: Any, k: Any, v: Any, comm: Ranks, options: Mapping[str, Any]) -> tuple[int, int]:
    check_supported(options)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, np.ndarray) and not is_on_gpu(x):
            raise TypeError(f"{name} is {type(x).__name__}; NumPy and CuPy arrays are accepted")
        if is_on_gpu(x) != is_on_gpu(q):
            raise TypeError(f"{name} is {type(x).__name__}; it must be of the library of q")
    if comm.on_gpu is not None and comm.on_gpu != is_on_gpu(q):
        takes = "CuPy arrays" if comm.on_gpu else "NumPy arrays"
        raise TypeError(
            f"q must be of the kind that comm sends, {takes}; got {type(q).__name__} (CuPy arrays "
            "need a cupy.cuda.nccl.NcclCommunicator, or a torch.distributed.ProcessGroup of NCCL)"
        )
    problem, _ = parse(q, k, v, {})
    return problem.Nq, problem.Nk


def _check_backend(
    backend: str, problem: Problem, q: Any, k: Any, v: Any, options: Mapping[str, Any]
) -> None:
    """Raise if there is no backend for the blocks of this rank: other ranks would wait for it."""
    arrays = {"q": q, "k": k, "v": v} | {name: options.get(name) for name in _ARRAYS}
    able = registry.candidates(backend, arrays | aux_arrays(options))
    dtype = problem.dtype if is_on_gpu(q) else problem.accum_dtype
    registry.supporting(able, replace(problem, dtype=dtype))


def layout_of(name: str, layout: Any, lengths: list[int]) -> Layout:
    """Find out which tokens each rank holds, given how many there are."""
    if isinstance(layout, Layout):
        if layout.ranks != len(lengths):
            raise ValueError(f"{name} is of {layout.ranks} ranks, and there are {len(lengths)}")
        return layout
    if layout is None or (isinstance(layout, str) and layout == "contiguous"):
        return Layout.contiguous(lengths)
    if isinstance(layout, str) and layout == "zigzag":
        return Layout.zigzag(sum(lengths), len(lengths))
    raise (ValueError if isinstance(layout, str) else TypeError)(
        f"{name} is {layout!r}; 'contiguous', 'zigzag' and a tileattn.distributed.Layout are "
        "accepted"
    )


def _own_layout(name: str, layout: Any, lengths: list[int], rank: int) -> Layout:
    """Check the tokens of this rank, too."""
    found = layout_of(name, layout, lengths)
    if found.length_of(rank) != lengths[rank]:
        raise ValueError(
            f"{name} gives rank {rank} {found.length_of(rank)} tokens, and its arrays have "
            f"{lengths[rank]}"
        )
    return found


def parse_with_given_window(
    q: Array, k: Array, v: Array, options: Mapping[str, Any]
) -> tuple[Problem, Operands]:
    """Validate a call, and keep sides of the window that hide no key.

    The queries of a rank are not all: what hides none from them may hide some from others.
    """
    problem, x = parse(q, k, v, options)
    window = window_of(options.get("window"), options.get("causal", False))
    return replace(problem, window=window), x


def _parsed(
    q: Array, k: Array, v: Array, Nq: int, Nk: int, options: Mapping[str, Any]
) -> tuple[Problem, Operands]:
    """Validate this rank's queries with all keys, of which it has some; q_offset is of query 0."""
    xp = library(q)
    every_k, every_v = (
        xp.broadcast_to(xp.zeros((), q.dtype), (*x.shape[:-2], Nk, x.shape[-1])) for x in (k, v)
    )
    problem, x = parse_with_given_window(q, every_k, every_v, options)
    if is_on_gpu(q):
        _check_on_gpu(x)
    if options.get("q_offset") is None:
        x = x._replace(q_offset=x.kv_lengths - Nq)
    return problem, x._replace(k=four_axes(k), v=four_axes(v))


def _check_on_gpu(x: Operands) -> None:
    """Raise for what the host has to know."""
    for name, integers in (("kv_lengths", x.kv_lengths), ("q_offset", x.q_offset)):
        if is_on_gpu(integers):
            raise TypeError(
                f"{name} is a CuPy array; integers of the host are accepted, by which keys travel"
            )
