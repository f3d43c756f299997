"""The options of a call: one record for each. Every list of option names is derived from it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from tileattn.messages import must_be

Value = Literal[
    "number",  # Python number, or NumPy array without axes
    "integer",  # the same, of 64 bits
    "flag",
    "window",
    "array",  # on the device of q
    "integers",  # an integer, a sequence or an array of them, on the host or a device
    "block mask",
    "function",
    "arrays",  # a sequence of arrays on the device of q
    "descale",  # a number, or an array on the device of q
]
Role = Literal[
    "score",  # modifies scores
    "mask",  # masks out pairs of a query and a key
    "place",  # position of the queries and keys of each sequence
    "softmax",  # changes the denominator of the softmax
    "dropout",
    "origin",  # shifts the indices of dropout and functions
    "function input",
    "cache",  # how keys and values are stored
    "sums",  # fixes the order of sums
]


class Option(NamedTuple):
    """What the library knows about one option.

    Parameters
    ----------
    value : str
        Type of the value, besides None.
    role : str
        What the option does.
    axes : str
        Axes of the array: b for the batch, or for packed sequences the sequence, h for query heads,
        i for queries, j for keys, and a dot for any other. Arrays may lack leading axes.
    broadcasts : bool
        True if each axis may have length 1.
    gradient : bool
        True if ``backward`` computes a gradient for it.
    packed : bool
        True if it goes with packed sequences.
    shared : bool
        True if ranks may share a sequence that has it.
    by_index : bool
        True if its effect depends on the indices b and h themselves.
    host_only : bool
        True if integers must be on the host.
    lowered : bool
        True if it becomes a part of the mask function.
    """

    value: Value
    role: Role
    axes: str = ""
    broadcasts: bool = False
    gradient: bool = False
    packed: bool = True
    shared: bool = True
    by_index: bool = False
    host_only: bool = False
    lowered: bool = False


OPTIONS: dict[str, Option] = {
    "scale": Option("number", "score"),
    "softcap": Option("number", "score"),
    "alibi_slopes": Option("array", "score", "bh"),
    "bias": Option("array", "score", "bhij", broadcasts=True, gradient=True, packed=False),
    "causal": Option("flag", "mask"),
    "window": Option("window", "mask"),
    "mask": Option("array", "mask", "bhij", broadcasts=True, packed=False),
    "block_mask": Option("block mask", "mask", packed=False, shared=False, by_index=True),
    "kv_lengths": Option("integers", "place", "b"),
    "q_offset": Option("integers", "place", "b"),
    "cu_seqlens_q": Option("integers", "place", ".", shared=False),
    "cu_seqlens_k": Option("integers", "place", ".", shared=False),
    "block_table": Option("integers", "place", "b.", shared=False),
    "k_descale": Option("descale", "cache", shared=False),
    "v_descale": Option("descale", "cache", shared=False),
    "tree_mask": Option("array", "mask", "bi.", packed=False, shared=False, lowered=True),
    "prefix": Option("integers", "mask", "b", shared=False, lowered=True),
    "origin": Option("integers", "origin", "b.", host_only=True, by_index=True),
    "sinks": Option("array", "softmax", "h", gradient=True),
    "dropout_p": Option("number", "dropout", by_index=True),
    "seed": Option("integer", "dropout"),
    "score_mod": Option("function", "score", by_index=True),
    "mask_mod": Option("function", "mask", by_index=True),
    "aux": Option("arrays", "function input", gradient=True),
    "invariant": Option("flag", "sums", shared=False),
}
"""Records by name. A new option also needs a type in `Options`."""


class Options(TypedDict, total=False):
    """The options that ``forward`` and ``backward`` share; see ``tileattn.forward``."""

    scale: float | None
    softcap: float | None
    alibi_slopes: Any
    bias: Any
    causal: bool
    window: tuple[int | None, int | None] | None
    mask: Any
    block_mask: Any
    kv_lengths: Any
    q_offset: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    block_table: Any
    k_descale: Any
    v_descale: Any
    tree_mask: Any
    prefix: Any
    origin: Any
    sinks: Any
    dropout_p: float
    seed: int
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux: Sequence[Any]
    invariant: bool


def options_with(**facts: Any) -> tuple[str, ...]:
    """Name the options whose records have these facts, in the order of the table."""
    return tuple(
        name
        for name, option in OPTIONS.items()
        if all(getattr(option, fact) == expected for fact, expected in facts.items())
    )


_AXES = {"b": "B", "h": "Hq", "i": "Nq", "j": "Nk"}


def shapes_of(name: str) -> str:
    """Say which shapes the array of an option may have; empty for other arguments."""
    option = OPTIONS.get(name)
    if option is None or option.value != "array" or "." in option.axes:
        return ""
    shape = f"({', '.join(_AXES[axis] for axis in option.axes)}{',' * (len(option.axes) == 1)})"
    if option.broadcasts:
        return f" that broadcasts to {shape}"
    return f" of shape {shape}" + (" or (Hq,)" if option.axes == "bh" else "")


ROWS = ("q", "k", "v")
_LEARNED = options_with(gradient=True)
DIFFERENTIABLE = (*ROWS, *_LEARNED)
"""Names of the inputs that have a gradient."""

SEEDS = options_with(value="integer")
NUMBERS = (*options_with(value="number"), *SEEDS)
ARRAYS = options_with(value="array")
PAIR_ARRAYS = options_with(value="array", broadcasts=True)
"""Names of the arrays with an element for each pair."""

INTEGERS = options_with(value="integers")
DESCALES = options_with(value="descale")
"""Factors that dequantise k and v, in this order."""

FUNCTIONS = options_with(value="function")


def wanted(wrt: Any, options: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of the gradients that ``wrt`` asks for; None if these are all of a call."""
    if wrt is None:
        return None
    what = f"a sequence of names among {', '.join(DIFFERENTIABLE)}"
    names = tuple(wrt) if isinstance(wrt, Iterable) and not isinstance(wrt, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(must_be("wrt", what, wrt))
    for name in names:
        if name not in DIFFERENTIABLE:
            raise ValueError(must_be("wrt", what, wrt))
        if name in OPTIONS and options.get(name) is None:
            raise ValueError(f"wrt must not have {name!r}: the call has no {name}")
    found = frozenset(names)
    given = (name for name in _LEARNED if options.get(name) is not None)
    return None if found.issuperset((*ROWS, *given)) else found
