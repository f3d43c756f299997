"""Options that become parts of the mask function, and the arrays that it reads.

Kernels see one mask function. Each option that becomes a part of it is a row of `MASKS`. An origin
shifts the indices of the caller's functions.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.options import FUNCTIONS
from tileattn.call.sequences import Places, integers
from tileattn.call.window import Window
from tileattn.expressions.build import apply, element
from tileattn.expressions.nodes import INDICES, Kind, Node, constant, replaced
from tileattn.messages import called

_B, _H, _I, _J = (Node("input", Kind.INTEGER, (), name) for name in INDICES)
_FAR = 1 << 40  # above all indices: larger offsets mask the same pairs, and floats represent it


class LoweredMask(NamedTuple):
    """How an option becomes a part of the mask function.

    Parameters
    ----------
    reads : dict of str to Kind
        Names of the arrays that the expression reads, and what they hold.
    visible : callable
        ``visible(*reads)`` returns the expression of the visible pairs. Each argument is a function
        of indices that reads one of the arrays.
    arrays : callable
        ``arrays(value, places, Nq)`` makes the arrays from the value of the option.
    window : callable
        ``window(window)`` returns the part of the window that the expression does not cover; raises
        ValueError for a window that the option does not support.
    """

    reads: dict[str, Kind]
    visible: Callable[..., Node]
    arrays: Callable[[Any, Places, int], tuple[Any, ...]]
    window: Callable[[Window], Window] = lambda window: window


def _tree(tree: Callable[..., Node], start: Callable[..., Node]) -> Node:
    """Let query i attend to key j where ``j < start[b] or tree[b, i, j - start[b]]``.

    The last Nq keys of a sequence are the nodes of its tree, as its queries are. Indices are
    clamped, so b becomes 0 if all sequences share one tree.
    """
    first = start(_B)
    node = apply("maximum", apply("subtract", _J, first), constant(0))
    return apply("bitwise_or", apply("less", _J, first), tree(_B, _I, node))


def _tree_arrays(tree: Any, places: Places, Nq: int) -> tuple[Any, Any]:
    return tree, _int64(places.kv_lengths) - Nq


def _prefix(prefix: Callable[..., Node], offset: Callable[..., Node]) -> Node:
    """Let query i attend to key j where ``j <= i + offset[b] or j < prefix[b]``."""
    causal = apply("less_equal", _J, apply("add", _I, offset(_B)))
    return apply("bitwise_or", causal, apply("less", _J, prefix(_B)))


def _prefix_arrays(prefix: Any, places: Places, Nq: int) -> tuple[Any, Any]:
    offsets = _offsets(places, Nq)
    found = integers("prefix", prefix, len(offsets))
    if isinstance(found, np.ndarray):
        for wrong in found[found < 0]:
            raise ValueError(f"{called('prefix')} must hold non-negative integers; got {wrong}")
    return _int64(found).clip(0, _FAR), _int64(offsets).clip(-_FAR, _FAR)


def _offsets(places: Places, Nq: int) -> Any:
    """Return the position of query 0 of each sequence, computed on the device of the lengths."""
    if places.q_offset is not None:
        return places.q_offset
    packing, keys = places.packing, places.kv_lengths
    if packing is None:
        return _int64(keys) - Nq
    queries = _int64(packing.cu_seqlens_q[1:]) - _int64(packing.cu_seqlens_q[:-1])
    if keys is None:
        keys = _int64(packing.cu_seqlens_k[1:]) - _int64(packing.cu_seqlens_k[:-1])
    if isinstance(keys, np.ndarray) and not isinstance(queries, np.ndarray):
        keys = _like(queries, keys)
    elif isinstance(queries, np.ndarray) and not isinstance(keys, np.ndarray):
        queries = _like(keys, queries)
    return _int64(keys) - queries


def _like(array: Any, x: Any) -> Any:
    """Copy an array of the host to the library and device of another array."""
    return sys.modules[type(array).__module__.partition(".")[0]].asarray(x)


def _int64(x: Any) -> Any:
    return x.astype(np.int64, copy=False)


def _beside_prefix(window: Window) -> Window:
    """Open the right side of a causal window, which the expression covers."""
    left, right = window
    if right != 0:
        raise ValueError(f"{called('causal')} must be True with {called('prefix')}; got False")
    return left, None


MASKS: dict[str, LoweredMask] = {
    "tree_mask": LoweredMask(
        {"tree_mask": Kind.BOOLEAN, "tree_start": Kind.INTEGER}, _tree, _tree_arrays
    ),
    "prefix": LoweredMask(
        {"prefix": Kind.INTEGER, "query_offset": Kind.INTEGER},
        _prefix,
        _prefix_arrays,
        _beside_prefix,
    ),
}
"""Lowered options by name."""


def aux_names(options: Mapping[str, Any], callers: Iterable[str]) -> tuple[str, ...]:
    """Name the arrays that functions read: of the caller, of lowered options, the origin."""
    reads = (name for option in _used(options) for name in MASKS[option].reads)
    return (*callers, *reads, *(("origin",) if _moves_functions(options) else ()))


def aux_of(options: Mapping[str, Any], places: Places, Nq: int) -> tuple[Any, ...]:
    """Return the arrays that `aux_names` names."""
    made = (x for name in _used(options) for x in MASKS[name].arrays(options[name], places, Nq))
    origin = (places.origin,) if _moves_functions(options) else ()
    return (*(options.get("aux") or ()), *made, *origin)


def lowered_mask(
    mask: Node | None, options: Mapping[str, Any], names: tuple[str, ...]
) -> Node | None:
    """Join the mask function with the lowered options."""
    for option in _used(options):
        reads = (reader(names, name, kind) for name, kind in MASKS[option].reads.items())
        visible = MASKS[option].visible(*reads)
        mask = visible if mask is None else apply("bitwise_and", mask, visible)
    return mask


def lowered_window(window: Window, options: Mapping[str, Any]) -> Window:
    """Open the sides of the window that lowered options cover."""
    for option in _used(options):
        window = MASKS[option].window(window)
    return window


def from_origin(function: Node, names: tuple[str, ...]) -> Node:
    """Shift the indices of a function by the origin."""
    # b is shifted first, so that the b of the origin itself is not shifted.
    origin = reader(names, "origin", Kind.INTEGER)
    for n, (name, index) in enumerate(zip(INDICES, (_B, _H, _I, _J), strict=True)):
        function = replaced(function, name, apply("add", index, origin(_B, constant(n))))
    return function


def reader(names: tuple[str, ...], name: str, kind: Kind) -> Callable[..., Node]:
    """Return a function that makes an element of a named array from indices."""
    number = names.index(name)
    return lambda *indices: element(number, kind, indices)


def _used(options: Mapping[str, Any]) -> list[str]:
    return [name for name in MASKS if options.get(name) is not None]


def _moves_functions(options: Mapping[str, Any]) -> bool:
    return options.get("origin") is not None and any(
        options.get(name) is not None for name in FUNCTIONS
    )
