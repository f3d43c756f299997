"""Replace the caller's functions by expressions, and validate them.

Each entry of the library calls `read_functions` once. An expression is a value, independent of the
caller's objects, and may be passed in place of a function.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tileattn.expressions import build
from tileattn.expressions.aux_arrays import AuxArrays, kind_of
from tileattn.expressions.captured_numbers import Recorder, Traces
from tileattn.expressions.captures import with_stand_ins
from tileattn.expressions.intervals import all_bounds
from tileattn.expressions.nodes import INDICES, Kind, Node, constant, elements
from tileattn.expressions.parameters import Expression, index_cells, lifted
from tileattn.expressions.state import State, literals_of, state_of
from tileattn.expressions.trace import Source, Traced, TracedArray, node_of, trace
from tileattn.lru import Lru
from tileattn.messages import must_be

_MOST = 384  # traced functions that are kept

Aux = Sequence[Any]


def read_functions(options: Mapping[str, Any], aux: Aux | None = None) -> Any:
    """Return options with functions replaced by their expressions.

    Captured arrays are appended to ``aux``. The parameter ``aux`` may replace the arrays of the
    options by any objects with dtypes and shapes; then captured arrays are refused. Options with
    invalid arrays are returned unchanged: ``parse`` reports the error.
    """
    score_mod, mask_mod = options.get("score_mod"), options.get("mask_mod")
    if score_mod is None and mask_mod is None:
        return options
    given = options.get("aux") if aux is None else aux
    kinds = _kinds(given)
    if kinds is None:
        return options
    found, arrays = dict(options), aux
    for name in ("score_mod", "mask_mod"):
        function = options.get(name)
        if function is None or type(function) is Expression:
            continue
        known = _known(state_of(function), name, kinds)
        if known is None:
            arrays = AuxArrays(given or ()) if arrays is None else arrays
            known = expression_of(function, arrays, name)
        found[name] = known
    if isinstance(arrays, AuxArrays) and len(arrays) > len(arrays.parameters):
        found["aux"] = tuple(arrays)
    return found


def read_valid_functions(options: Mapping[str, Any], aux: Aux | None = None) -> Any:
    """Run `read_functions`, but keep functions that cannot be traced.

    If one rank raised here, the others would wait for it. ``parse`` raises later, on all ranks.
    """
    try:
        return read_functions(options, aux)
    except Exception:  # a function may raise anything
        return options


def expression_of(function: Any, aux: Aux, name: str) -> Expression:
    """Trace a function of a call; raise TypeError if it is none.

    Parameters
    ----------
    function : callable or Expression
        ``score_mod(s, b, h, i, j, *aux)``, or a function of b, h, i, j and ``aux`` that returns
        booleans. An expression is returned as it is.
    aux : sequence of array
        The arrays.
    name : str
        ``"score_mod"``, or the name of a mask in messages.
    """
    if type(function) is Expression:
        return function
    if type(function) is Node:
        return Expression(function)
    if not callable(function) or isinstance(function, type):
        raise TypeError(must_be(name, "a function", function))
    parameters = aux.parameters if isinstance(aux, AuxArrays) else aux
    kinds = _kinds(parameters) or ()
    state = state_of(function)
    known = _known(state, name, kinds)
    if known is None and state is not None:
        known = _with_parameters(function, aux, name, kinds, state)
    if known is not None:
        return known
    node, literals = _traced(function, aux, name, kinds), literals_of(function)
    found = Expression(node) if literals is None else lifted(node, _LITERALS | literals)
    if state is not None:
        _EXACT.keep((state.key, name, kinds), found)
    return found


def score_expression(function: Any, aux: Aux) -> Node:
    """Trace ``score_mod(s, b, h, i, j, *aux)`` with constants; raise TypeError if it is none."""
    return _traced(function, aux, "score_mod", _kinds(aux) or ())


def mask_expression(function: Any, aux: Aux, name: str = "mask_mod") -> Node:
    """Trace ``mask_mod(b, h, i, j, *aux)`` with constants; raise TypeError if it is none."""
    return _traced(function, aux, name, _kinds(aux) or ())


def _score(node: Node, name: str) -> Node:
    if node.kind == Kind.BOOLEAN:
        raise TypeError(
            f"{name} must return the new score; got booleans (mask_mod= takes a function that "
            "returns which pairs are visible)"
        )
    return build.cast(node, Kind.FLOAT)


def _mask(node: Node, name: str) -> Node:
    if node.kind != Kind.BOOLEAN:
        kinds = {Kind.INTEGER: "integers", Kind.FLOAT: "floats"}
        raise TypeError(
            f"{name} must return booleans, True where the pair is visible; got "
            f"{kinds[node.kind]} (a comparison makes booleans)"
        )
    return node


def check_indices(
    name: str,
    function: Expression,
    shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, int, int, int],
) -> None:
    """Raise ValueError if no index of a call of ``sizes`` (B, Hq, Nq, Nk) is within its axis.

    Negative indices count from the end; an index outside its axis is clamped.
    """
    if not all(sizes):
        return
    # Indices that reach an axis also reach a longer one, and more indices reach it too. So calls
    # share what is found for the powers of two below their sizes.
    smaller = tuple(map(_power_of_two_below, shapes)), _power_of_two_below(sizes)
    node = function.node
    function = Expression(node, index_cells(node, function.constants))
    if not _outside(function, *smaller):
        return
    for number, axis, n, low, high in _outside(function, shapes, sizes):
        given = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        accepted = f"indices must be within {-n} to {n - 1}" if n else "it has no elements"
        raise ValueError(
            f"{name} indexes axis {axis} of aux[{number}], of shape {shapes[number]}, with "
            f"{given}; {accepted}"
        )


def _power_of_two_below(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the largest power of two up to each size; 0 for 0."""
    return tuple([1 << n.bit_length() >> 1 for n in sizes])


@lru_cache(maxsize=256)
def _outside(
    function: Expression, shapes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, int, int, float, float], ...]:
    """List the indices outside their axes: array, axis, its length, first and last index."""
    inputs = {index: (0.0, n - 1.0) for index, n in zip(INDICES, sizes, strict=True)}
    reads = elements(function.node)
    indices = [x for read in reads for x in read.inputs]
    arrays = [None] * len(shapes)
    bounds = all_bounds(indices, inputs, arrays, np.dtype(float), function.constants)
    found = []
    for read in reads:
        number = int(read.value or 0)
        for axis, (x, n) in enumerate(zip(read.inputs, shapes[number], strict=True)):
            low, high = (float(end) for end in bounds[x])
            if n == 0 or low > n - 1 or high < -n:
                found.append((number, axis, n, low, high))
    return tuple(found)


def _known(state: State | None, name: str, kinds: Any) -> Expression | None:
    """Look up the expression of a function of known state."""
    traces = None if state is None else _TRACES.get((state.structure, name, kinds))
    if state is None or traces is None:
        return None
    try:
        known: Expression | None = traces.find(state.numbers)
    except Exception:  # arithmetic on these numbers may raise anything
        known = None
    return known or _EXACT.get((state.key, name, kinds))


def _with_parameters(
    function: Any, aux: Aux, name: str, kinds: Any, state: State
) -> Expression | None:
    """Trace a function with parameters for the numbers that it captures; None if that fails."""
    key = state.structure, name, kinds
    traces = _TRACES.get(key)
    if traces is None:
        traces = Traces()
        _TRACES.keep(key, traces)
    recorder = Recorder(traces, state.numbers)
    numbers = {place: recorder.number(n) for place, n in state.places.items()}
    try:
        return recorder.keep(_traced(function, aux, name, kinds, numbers))
    except Exception:  # a function may raise anything
        return None


def _traced(
    function: Any, aux: Aux, name: str, kinds: Any, numbers: Mapping[Any, Any] | None = None
) -> Node:
    """Trace a function; ``numbers`` are stand-ins for the numbers that it captures, by place."""
    if type(function) is Node:
        return function
    if not callable(function) or isinstance(function, type):
        raise TypeError(must_be(name, "a function", function))
    inputs = ("s", *INDICES) if name == "score_mod" else INDICES
    try:
        source = Source(name, aux if isinstance(aux, AuxArrays) else None)
        value = trace(with_stand_ins(function, source, numbers or {}), source, inputs, kinds)
    except TypeError:
        check_parameters(function, name, inputs, len(kinds))
        raise
    node = _result(value, name)
    return _score(node, name) if name == "score_mod" else _mask(node, name)


def _kinds(aux: Any) -> tuple[tuple[Kind, int], ...] | None:
    """Return kind and number of axes of each array; None if some object is unsupported."""
    if aux is None:
        return ()
    if not isinstance(aux, tuple | list):
        return None
    kinds = [(_kind(x), x) for x in aux]
    found = [(kind, len(x.shape)) for kind, x in kinds if kind is not None]
    return tuple(found) if len(found) == len(kinds) else None


def _kind(x: Any) -> Kind | None:
    is_array = hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, type)
    return kind_of(x) if is_array else None


def check_parameters(function: Any, name: str, inputs: tuple[str, ...], count: int = 0) -> None:
    """Raise TypeError if a function cannot be called with its inputs and ``count`` arrays."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # the callable has no signature
        return
    try:
        signature.bind(*inputs, *range(count))
    except TypeError:
        arrays = "" if not count else f" and {count} array{'s' if count > 1 else ''} of aux"
        raise TypeError(
            f"{name} has the parameters {signature}; it is called with "
            f"({', '.join(inputs)}){arrays}"
        ) from None


def _result(value: Any, name: str) -> Node:
    plain = isinstance(value, bool | int | float | np.generic)
    if isinstance(value, Traced) or (plain and not isinstance(value, complex)):
        return node_of(value, Traced(constant(0), name))
    kind = "an array of aux" if isinstance(value, TracedArray) else type(value).__name__
    kind = "ndarray" if isinstance(value, np.ndarray) else kind
    raise TypeError(
        f"{name} must return one value computed from its parameters; got {kind}"
        + (" (is there a return?)" if value is None else "")
    )


_TRACES, _EXACT = Lru(_MOST), Lru(_MOST)
"""The traces of functions of known state, and the expressions of those with constants alone."""

_LITERALS = frozenset({-1, 0, 1, math.inf})
"""Constants that are no parameters: operations such as ``isinf`` bring them."""
