"""What ranks agree on before anything else is sent: every option, by one table."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tileattn.call.options import Options
from tileattn.call.problem import Operands, Problem
from tileattn.call.window import window_of
from tileattn.distributed.arrays import is_on_gpu
from tileattn.distributed.ranks import Communicator
from tileattn.errors import UnsupportedError
from tileattn.expressions.nodes import Node

Made = TypeVar("Made")
Facts = dict[str, str]

REFUSED = ("block_mask", "tree_mask", "block_table", "cu_seqlens_q", "cu_seqlens_k")
"""Options that do not go with parts of a sequence."""

_FEW = 16  # elements of an array that a message shows; of longer ones it shows a digest
_LONG = 200  # characters of another value that a message shows


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


def same(found: list[Facts]) -> None:
    """Raise ValueError if ranks differ in a fact."""
    for name in dict.fromkeys(name for facts in found for name in facts):
        first = found[0].get(name, "None")
        for rank, facts in enumerate(found):
            other = facts.get(name, "None")
            if other != first:
                raise ValueError(
                    f"{name} is {other} on rank {rank}, and {first} on rank 0; all ranks give the "
                    "same"
                )


def on_all(comm: Communicator, step: str, make: Callable[[], Made]) -> list[Made]:
    """Make something on every rank, and give all of them; raise on all if one rank has raised.

    ``step`` names the call, which must be the same on all ranks.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # of any kind: the other ranks wait for this one
        failure = error
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    found = comm.gather((step, made, message))
    if failure is not None:
        raise failure
    for rank, (_, _, message) in enumerate(found):
        if message is not None:
            raise RuntimeError(f"rank {rank} has failed: {message}")
    same([{"the call": step} for step, _, _ in found])
    return [x for _, x, _ in found]


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


def shown(x: Any) -> str:
    """Write a value down, equal ones alike and others otherwise; long ones by a digest."""
    if not hasattr(x, "dtype"):
        text = str(x)
        return text if len(text) < _LONG else f"{text[:_LONG]}... with digest {_digest(text)}"
    if is_on_gpu(x):
        x = x.get()
    if x.size <= _FEW:
        return f"{x.dtype} {x.tolist()}"
    return f"{x.dtype} of shape {x.shape} with digest {_digest(np.ascontiguousarray(x))}"


def _digest(x: Any) -> str:
    data = x.encode() if isinstance(x, str) else x.tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
