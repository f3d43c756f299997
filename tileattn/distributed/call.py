"""The part of a call that one rank has, agreed on by all ranks before anything else is sent."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.distributed.arrays import is_on_gpu, library
from tileattn.distributed.comm import Communicator
from tileattn.distributed.head_groups import Heads
from tileattn.distributed.layout import Layout, Segment
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.visibility import Visibility
from tileattn.errors import UnsupportedError
from tileattn.problem import Operands, Problem, four_axes, parse
from tileattn.results import DIFFERENTIABLE
from tileattn.window import window_of

Array = NDArray[Any]

_REFUSED = ("block_mask", "tree_mask", "block_table", "cu_seqlens_q", "cu_seqlens_k")
_COMMON = ("softcap", "causal", "window", "dropout_p", "seed", "score_mod", "mask_mod", "aux")
_OWN = ("Nq", "ndim", "enabled_options")  # facts of a problem in which ranks may differ


@dataclass(frozen=True)
class Call:
    """One rank's part of a call.

    Parameters
    ----------
    comm : Communicator
        The ranks.
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

    def checked(self, make: Callable[[], Any]) -> Any:
        """Make something on every rank, and keep this rank's; raise on all where one raises."""
        return _checked(self.comm, make)

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
    comm: Communicator,
    layout: Any,
    layout_k: Any,
    options: Mapping[str, Any],
    **more: str,
) -> Call:
    """Validate a call on all ranks: where one refuses it, all raise.

    ``more`` are facts in which ranks agree, too: the backend and others.
    """
    lengths = on_all(comm, lambda: _lengths(q, k, v, options))
    layout_k = layout if layout_k is None else layout_k

    def layouts() -> tuple[Layout, Layout]:
        queries, keys = map(list, zip(*lengths, strict=True))
        return (
            _own_layout("layout", layout, queries, comm.rank),
            _own_layout("layout_k", layout_k, keys, comm.rank),
        )

    q_layout, k_layout = _checked(comm, layouts)
    total = q_layout.length, k_layout.length
    problem, operands = _checked(comm, lambda: _parsed(q, k, v, *total, options))
    same(comm, _facts(problem, operands, options, q_layout, k_layout) | more)
    rows = comm.gather([x is not None and x.shape[2] > 1 for x in (operands.bias, operands.mask)])
    of_bias, of_mask = map(any, zip(*rows, strict=True))
    visibility = Visibility(problem.window, operands.kv_lengths, operands.q_offset)
    blocks = RankBlocks(visibility, q_layout, k_layout, comm.rank)
    facts = problem, operands, options, more["backend"], of_bias, of_mask, problem.accum_dtype
    return Call(comm, blocks, *facts)


def same(comm: Communicator, facts: Mapping[str, str]) -> None:
    """Raise ValueError on all ranks if they differ in some fact."""
    found = comm.gather(dict(facts))
    for rank, others in enumerate(found):
        for name, first in found[0].items():
            if others[name] != first:
                raise ValueError(
                    f"{name} is {others[name]} on rank {rank}, and {first} on rank 0; all ranks "
                    "give the same"
                )


def check_supported(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for an option that does not go with parts of a sequence."""
    for name in _REFUSED:
        if options.get(name) is not None:
            raise UnsupportedError(
                f"{name} does not go with a sequence that ranks or devices share; mask_mod= does"
            )


def on_all(comm: Communicator, make: Callable[[], Any]) -> list[Any]:
    """Make something on every rank, and give all of them; raise where one rank has raised."""
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # of any kind: the other ranks wait for this one
        failure = error
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    found = comm.gather((made, message))
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(found):
        if message is not None:
            raise RuntimeError(f"rank {rank} has failed: {message}")
    return [x for x, _ in found]


def _checked(comm: Communicator, make: Callable[[], Any]) -> Any:
    """Make something on every rank, and keep this rank's."""
    kept: list[Any] = []
    on_all(comm, lambda: kept.append(make()))
    return kept[0]


def _lengths(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> tuple[int, int]:
    check_supported(options)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, np.ndarray) and not is_on_gpu(x):
            raise TypeError(f"{name} is {type(x).__name__}; NumPy and CuPy arrays are accepted")
        if is_on_gpu(x) != is_on_gpu(q):
            raise TypeError(f"{name} is {type(x).__name__}; it must be of the library of q")
    problem, _ = parse(q, k, v, {})
    return problem.Nq, problem.Nk


def layout_of(name: str, layout: Any, lengths: list[int]) -> Layout:
    """Find out which tokens each rank holds, given how many there are."""
    if layout is None or layout == "contiguous":
        return Layout.contiguous(lengths)
    if layout == "zigzag":
        return Layout.zigzag(sum(lengths), len(lengths))
    if not isinstance(layout, Layout):
        raise TypeError(
            f"{name} is {layout!r}; 'contiguous', 'zigzag' and a tileattn.distributed.Layout are "
            "accepted"
        )
    if layout.ranks != len(lengths):
        raise ValueError(f"{name} is of {layout.ranks} ranks, and there are {len(lengths)}")
    return layout


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


def _facts(
    problem: Problem,
    x: Operands,
    options: Mapping[str, Any],
    q_layout: Layout,
    k_layout: Layout,
) -> dict[str, str]:
    """Write down in what all ranks agree."""
    facts = {f.name: getattr(problem, f.name) for f in fields(problem) if f.name not in _OWN}
    for name in ("score_mod", "mask_mod"):
        facts[name] = None if facts[name] is None else facts[name].digest.hex()
    facts |= {"layout": q_layout, "layout_k": k_layout}
    arrays = {n: getattr(x, n) for n in ("kv_lengths", "q_offset", "alibi_slopes", "sinks")}
    arrays |= {f"aux[{n}]": array for n, array in enumerate(options.get("aux") or ())}
    facts |= {name: None if a is None else _digest(a) for name, a in arrays.items()}
    return {name: str(x) for name, x in facts.items()}


def _digest(x: Any) -> str:
    if is_on_gpu(x):
        x = x.get()
    return (
        f"{x.dtype} {x.shape} {hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]}"
    )
