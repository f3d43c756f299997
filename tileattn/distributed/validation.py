"""Validate a call on all ranks and compare their arguments, before any other message."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.backends import registry
from tileattn.call.options import DESCALES, OPTIONS, PAIR_ARRAYS, options_with
from tileattn.call.parse import aux_arrays, four_axes, parse
from tileattn.call.problem import Operands, Problem
from tileattn.call.window import window_of
from tileattn.distributed.arrays import is_on_gpu, library
from tileattn.distributed.call import SHARED_ARRAYS, Call
from tileattn.distributed.comm.agreement import on_all, same, shown
from tileattn.distributed.comm.failures import CheckedComm
from tileattn.distributed.layout import Layout
from tileattn.distributed.rank_blocks import RankBlocks
from tileattn.distributed.visibility import Visibility
from tileattn.errors import UnsupportedError

Array = NDArray[Any]

REFUSED = options_with(shared=False)
"""Names of the options that are not supported if ranks share a sequence."""
COMPARED = options_with(shared=True)
"""Names of the options that must be the same on all ranks."""

_HOST_INTEGERS = options_with(value="integers", shared=True, host_only=False)


def check_supported(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for an option that is not supported if ranks share a sequence."""
    remedies = dict.fromkeys(DESCALES, "dequantise k and v")
    remedies["invariant"] = "compute the sequence on one device"
    for name in REFUSED:
        value = options.get(name)
        if value is not None and value is not False:
            remedy = remedies.get(name, "mask_mod= does")
            raise UnsupportedError(
                f"{name} does not go with a sequence that ranks or devices share; {remedy}"
            )


class Arguments(NamedTuple):
    """The arguments of one rank, as text that can be compared."""

    common: dict[str, str]  # must be the same on all ranks
    has_rows: dict[str, bool]  # of bias and mask: True if this rank has rows of its own
    values: dict[str, str]  # of bias and mask without rows: the same if no rank has rows
    has_one_row: bool  # True if there is a mask and at most one query: the row may be its own


def arguments_of(problem: Problem, x: Operands, options: Mapping[str, Any]) -> Arguments:
    """Describe the arguments of this rank."""
    P = problem
    common = {"dtype": str(P.dtype), "q": f"({P.B}, {P.Hq}, Nq, {P.D})"}
    common |= {"k": f"({P.B}, {P.Hkv}, Nk, {P.D})", "v": f"({P.B}, {P.Hkv}, Nk, {P.Dv})"}
    common |= {name: shown(_compared(name, P, x, options)) for name in COMPARED}
    arrays = {name: getattr(x, name) for name in PAIR_ARRAYS}
    has_rows = {name: array is not None and array.shape[2] != 1 for name, array in arrays.items()}
    values = {name: "" if has_rows[name] else shown(array) for name, array in arrays.items()}
    return Arguments(common, has_rows, values, x.mask is not None and P.Nq <= 1)


def _compared(name: str, P: Problem, x: Operands, options: Mapping[str, Any]) -> Any:
    """Return the value of an option that must be the same on all ranks."""
    match OPTIONS[name].value:
        case "number" | "integer":
            return getattr(P, name)
        case "flag":
            return bool(options.get(name, False))
        case "window":
            return window_of(options.get(name), False)
        case "function":
            node = getattr(P, name)
            numbers = getattr(options.get(name), "constants", ())
            captured = f" and the numbers {numbers}" if numbers else ""
            return node and f"an expression with digest {node.digest.hex()[:16]}{captured}"
        case "arrays":
            return [shown(array) for array in getattr(x, name)] or None
    array = getattr(x, name)
    if name in PAIR_ARRAYS and array is not None:
        B, H, _, Nk = array.shape
        return f"{array.dtype} of shape ({B}, {H}, rows, {Nk})"
    return array


def compare(found: list[Arguments]) -> tuple[str, ...]:
    """Raise ValueError if ranks differ; name the pair arrays of which each rank has own rows."""
    same([x.common for x in found])
    has_rows = {name: any(x.has_rows[name] for x in found) for name in PAIR_ARRAYS}
    # A mask has no gradient to sum over ranks, so single rows may be different on each rank.
    has_rows["mask"] = has_rows["mask"] or all(x.has_one_row for x in found)
    shared = [name for name, rows in has_rows.items() if not rows]
    same([{name: x.values[name] for name in shared} for x in found])
    return tuple(name for name, rows in has_rows.items() if rows)


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
    """Validate a call on all ranks: all raise if one rank refuses it, or arguments differ.

    ``check`` validates other arguments, and returns those that must be the same on all ranks.
    """
    lengths = on_all(comm, step, lambda: _lengths(q, k, v, comm, options))
    kept: list[tuple[Layout, Layout, Problem, Operands]] = []

    def arguments() -> Arguments:
        """Validate this rank's arguments."""
        queries, keys = map(list, zip(*lengths, strict=True))
        q_layout = _own_layout("layout", layout, queries, comm.rank)
        of_keys = ("layout", layout) if layout_k is None else ("layout_k", layout_k)
        k_layout = _own_layout(*of_keys, keys, comm.rank)
        problem, operands = _parsed(q, k, v, q_layout.length, k_layout.length, options)
        _check_backend(backend, problem, q, k, v, options)
        kept.append((q_layout, k_layout, problem, operands))
        more = {"layout": q_layout, "layout_k": k_layout, "backend": backend, **check()}
        found = arguments_of(problem, operands, options)
        return found._replace(common=found.common | {name: shown(x) for name, x in more.items()})

    with_rows = compare(on_all(comm, step, arguments))
    q_layout, k_layout, problem, operands = kept[0]
    visibility = Visibility(problem.window, operands.kv_lengths, operands.q_offset)
    blocks = RankBlocks(visibility, q_layout, k_layout, comm.rank)
    facts = problem, operands, options, backend, with_rows, problem.accum_dtype
    return Call(comm, blocks, *facts)


def _lengths(
    q: Any, k: Any, v: Any, comm: CheckedComm, options: Mapping[str, Any]
) -> tuple[int, int]:
    check_supported(options)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, np.ndarray) and not is_on_gpu(x):
            raise TypeError(f"{name} must be a NumPy or CuPy array; got {type(x).__name__}")
        if is_on_gpu(x) != is_on_gpu(q):
            raise TypeError(
                f"{name} must be an array of the same library as q; got {type(x).__name__}"
            )
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
    """Raise if no backend can compute the blocks of this rank: other ranks would wait for it."""
    arrays = {"q": q, "k": k, "v": v} | {name: options.get(name) for name in SHARED_ARRAYS}
    able = registry.candidates(backend, arrays | aux_arrays(options))
    dtype = problem.dtype if is_on_gpu(q) else problem.accum_dtype
    registry.supporting(able, replace(problem, dtype=dtype))


def layout_of(name: str, layout: Any, lengths: list[int]) -> Layout:
    """Return the layout for the token counts of all ranks."""
    if isinstance(layout, Layout):
        if layout.ranks != len(lengths):
            raise ValueError(f"{name} must be for {len(lengths)} ranks; got one for {layout.ranks}")
        return layout
    if layout is None or (isinstance(layout, str) and layout == "contiguous"):
        return Layout.contiguous(lengths)
    if isinstance(layout, str) and layout == "zigzag":
        return Layout.zigzag(sum(lengths), len(lengths))
    raise (ValueError if isinstance(layout, str) else TypeError)(
        f"{name} must be 'contiguous', 'zigzag' or a tileattn.distributed.Layout; got {layout!r}"
    )


def _own_layout(name: str, layout: Any, lengths: list[int], rank: int) -> Layout:
    """Return the layout; raise if this rank has another number of tokens."""
    found = layout_of(name, layout, lengths)
    if found.length_of(rank) != lengths[rank]:
        raise ValueError(
            f"{name} must give rank {rank} the {lengths[rank]} tokens of its arrays; got "
            f"{found.length_of(rank)}"
        )
    return found


def parse_with_given_window(
    q: Array, k: Array, v: Array, options: Mapping[str, Any]
) -> tuple[Problem, Operands]:
    """Validate a call, but keep window bounds that mask nothing.

    They may mask keys for the queries of other ranks.
    """
    problem, x = parse(q, k, v, options)
    window = window_of(options.get("window"), options.get("causal", False))
    return replace(problem, window=window), x


def _parsed(
    q: Array, k: Array, v: Array, Nq: int, Nk: int, options: Mapping[str, Any]
) -> tuple[Problem, Operands]:
    """Validate this rank's queries with all keys; q_offset is the position of query 0."""
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
    """Raise if integers are on the GPU: the host needs them to send keys."""
    for name in _HOST_INTEGERS:
        if is_on_gpu(getattr(x, name)):
            raise TypeError(
                f"{name} must be on the host, which decides from it where keys are sent; got a "
                "CuPy array"
            )
