"""What ranks agree on before anything else is sent: every option, by one table."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.backends import registry
from tileattn.call.options import Options, options_with
from tileattn.call.parse import aux_arrays, four_axes, parse
from tileattn.call.problem import Operands, Problem
from tileattn.call.window import window_of
from tileattn.distributed.arrays import is_on_gpu, library
from tileattn.distributed.call import Call
from tileattn.distributed.comm.agreement import on_all, same, shown
from tileattn.distributed.comm.failures import CheckedComm
from tileattn.distributed.layout import Layout
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.visibility import Visibility
from tileattn.errors import UnsupportedError
from tileattn.expressions.nodes import Node

Array = NDArray[Any]

Facts = dict[str, str]

REFUSED = options_with(shared=False)
"""Options that do not go with parts of a sequence."""


def check_supported(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for an option that does not go with parts of a sequence."""
    for name in REFUSED:
        if options.get(name) is not None:
            raise UnsupportedError(
                f"{name} does not go with a sequence that ranks or devices share; mask_mod= does"
            )


class Terms(NamedTuple):
    """What one rank has to say of a call.

    Parameters
    ----------
    facts : dict of str to str
        What must be the same on all ranks, by the name of the argument.
    rows : dict of str to bool
        For ``bias`` and ``mask``, whether this rank has rows of its own.
    values : dict of str to str
        Their values where this rank has none: they must be the same if no rank has.
    one_row : bool
        Whether this rank has a mask and at most one query: its one row may be its own.
    """

    facts: Facts
    rows: dict[str, bool]
    values: Facts
    one_row: bool


def terms_of(problem: Problem, x: Operands, options: Mapping[str, Any]) -> Terms:
    """Say what this rank's arguments are."""
    P = problem
    facts = {"dtype": str(P.dtype), "q": f"({P.B}, {P.Hq}, Nq, {P.D})"}
    facts |= {"k": f"({P.B}, {P.Hkv}, Nk, {P.D})", "v": f"({P.B}, {P.Hkv}, Nk, {P.Dv})"}
    facts |= {
        name: shown(OPTIONS[name](P, x, options))
        for name in Options.__annotations__
        if name not in REFUSED
    }
    rows, values = dict[str, bool](), dict[str, str]()
    for name in ("bias", "mask"):
        array = getattr(x, name)
        rows[name] = array is not None and array.shape[2] != 1
        values[name] = "" if rows[name] else shown(array)
    return Terms(facts, rows, values, x.mask is not None and P.Nq <= 1)


def compare(found: list[Terms]) -> tuple[bool, bool]:
    """Raise ValueError if ranks differ; return whether they have rows of bias, and of mask."""
    same([terms.facts for terms in found])
    of_bias, of_mask = (any(terms.rows[name] for terms in found) for name in ("bias", "mask"))
    # A mask has no gradient that is summed over ranks, so each may as well be its rank's own.
    of_mask = of_mask or all(terms.one_row for terms in found)
    shared = [name for name, rows in (("bias", of_bias), ("mask", of_mask)) if not rows]
    same([{name: terms.values[name] for name in shared} for terms in found])
    return of_bias, of_mask


def _rows(x: Any) -> Any:
    """Describe a bias or mask, but for its rows."""
    if x is None:
        return None
    B, H, _, Nk = x.shape
    return f"{x.dtype} of shape ({B}, {H}, rows, {Nk})"


def _function(node: Node | None) -> Any:
    return None if node is None else f"an expression with digest {node.digest.hex()[:16]}"


OPTIONS: dict[str, Callable[[Problem, Operands, Mapping[str, Any]], Any]] = {
    "scale": lambda P, _, __: P.scale,
    "softcap": lambda P, _, __: P.softcap,
    "alibi_slopes": lambda _, x, __: x.alibi_slopes,
    "bias": lambda _, x, __: _rows(x.bias),
    "causal": lambda _, __, options: bool(options.get("causal", False)),
    "window": lambda _, __, options: window_of(options.get("window"), False),
    "mask": lambda _, x, __: _rows(x.mask),
    "kv_lengths": lambda _, x, __: x.kv_lengths,
    "q_offset": lambda _, x, __: x.q_offset,
    "origin": lambda _, x, __: x.origin,
    "sinks": lambda _, x, __: x.sinks,
    "dropout_p": lambda P, _, __: P.dropout_p,
    "seed": lambda P, _, __: P.seed,
    "score_mod": lambda P, _, __: _function(P.score_mod),
    "mask_mod": lambda P, _, __: _function(P.mask_mod),
    "aux": lambda _, x, __: [shown(array) for array in x.aux] or None,
}
"""What of each option must be the same on all ranks."""


def agreed(
    q: Any,
    k: Any,
    v: Any,
    comm: CheckedComm,
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


def _lengths(
    q: Any, k: Any, v: Any, comm: CheckedComm, options: Mapping[str, Any]
) -> tuple[int, int]:
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


_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")
