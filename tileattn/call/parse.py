"""Validation: a call's arrays and options become a `Problem` and its `Operands`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tileattn.call import hints
from tileattn.call.block_mask import BlockMask
from tileattn.call.descale import (
    bring_descale,
    cache_dtype,
    descale_arrays,
    refuse_descales,
    token_descales,
)
from tileattn.call.lowering import (
    MASKS,
    aux_names,
    aux_of,
    from_origin,
    lowered_mask,
    lowered_window,
)
from tileattn.call.options import ARRAYS, DESCALES, FUNCTIONS, NUMBERS, OPTIONS, options_with
from tileattn.call.problem import Operands, Problem
from tileattn.call.scalars import dropout_of, scale_of, seed_of, softcap_of
from tileattn.call.sequences import Places, places_of
from tileattn.call.window import Window, window_of, without_far_sides
from tileattn.dtypes import DTYPES, one_of
from tileattn.errors import UnsupportedError
from tileattn.expressions.aux_arrays import check_kind
from tileattn.expressions.functions import check_indices, expression_of
from tileattn.expressions.nodes import Node, elements
from tileattn.expressions.parameters import Expression, renumbered
from tileattn.messages import called, must_be
from tileattn.validation import check_flags, require_array, scalar

_BOOLEAN = (np.dtype(np.bool_),)
_PLACES = options_with(role="place")
"""Without these options each sequence has all keys, and its last query is at the last key."""

_ON_DEVICE = options_with(value="integers", host_only=False)


class CallKind(NamedTuple):
    """What validation finds about a call, whatever its numbers are: see `at_numbers`.

    Most fields are as in `Problem`. ``reading`` has the names of the functions whose indices into
    arrays must be checked.
    """

    enabled_options: frozenset[str]
    score_mod: Node | None
    mask_mod: Node | None
    aux_names: tuple[str, ...]
    mask_options: tuple[str, ...]
    reading: tuple[str, ...]
    kv_dtype: np.dtype[Any] | None = None


def parse(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> tuple[Problem, Operands]:
    """Validate a call; absent options have their defaults."""
    return at_numbers(kind_of_call(q, k, v, options), q, k, v, options)


def kind_of_call(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> CallKind:
    """Validate what `tileattn.call.prepared.kind_signature` describes: names, dtypes, functions."""
    check_names(options)
    kv_dtype = cache_dtype(q, k, v, options)
    for name, x in (("q", q), ("k", k), ("v", v)) if kv_dtype is None else ():
        check_dtype(name, x)
        if x.dtype != q.dtype:
            raise TypeError(
                f"{called(name)} must have the dtype of {called('q')}, {q.dtype}; got {x.dtype}"
            )
    callers = aux_arrays(options)
    names = aux_names(options, callers)
    score_mod, mask_mod, reading = _functions(options, callers, names)
    return CallKind(
        frozenset(name for name, value in options.items() if _in_use(name, value)),
        *(score_mod, mask_mod, names),
        tuple(n for n in ("mask_mod", *MASKS) if options.get(n) is not None),
        reading,
        kv_dtype,
    )


class Scalars(NamedTuple):
    """The valid options of a call that are numbers; ``window`` has both sides, causal included."""

    scale: float | None
    softcap: float | None
    window: Window
    dropout_p: float
    seed: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Scalars":
        """Validate the numbers of a call."""
        get = options.get
        if type(get("invariant", False)) is not bool:
            check_flags(invariant=options["invariant"])
        return cls(
            None if get("scale") is None else scale_of(options["scale"], 1),
            softcap_of(get("softcap")),
            window_of(get("window"), get("causal", False)),
            dropout_of(options["dropout_p"]) if "dropout_p" in options else 0.0,
            seed_of(options["seed"]) if "seed" in options else 0,
        )


def at_numbers(
    kind: CallKind, q: Any, k: Any, v: Any, options: Mapping[str, Any]
) -> tuple[Problem, Operands]:
    """Validate the numbers of a call of a known kind: sizes, integers, scalars."""
    return at_scalars(kind, q, k, v, options, Scalars.of(options))


def at_scalars(
    kind: CallKind, q: Any, k: Any, v: Any, options: Mapping[str, Any], scalars: Scalars
) -> tuple[Problem, Operands]:
    """Validate the sizes and integers of a call whose scalars are valid.

    The path of a call through this function can be compiled, if its integers are on a device.
    """
    get = options.get
    ndim, (B, Hq, Hkv, Nq, Nk, D, Dv) = _sizes(q, k, v, paged=get("block_table") is not None)
    places = places_of(options, k, B, Nq, Nk)
    packed, paged = places.packing, places.paging
    Nk = Nk if paged is None else paged.capacity
    entries = B if packed is None else packed.sizes[0]
    if kind.enabled_options:
        shape = (entries, Hq, *((Nq, Nk) if packed is None else packed.longest(Nq, Nk)))
        _check_options(kind, options, shape, B, Nq)
    of_tokens = frozenset[str]()
    if kind.kv_dtype is not None:
        of_tokens = token_descales(k, v, options, entries, paged=paged is not None)
    window = lowered_window(scalars.window, options)
    if all(get(name) is None for name in _PLACES):
        window = without_far_sides(window, Nq, Nk)
    problem = Problem(
        *(B, Hq, Hkv, Nq, Nk, D, Dv),
        dtype=q.dtype,
        scale=scale_of(None, D) if scalars.scale is None else scalars.scale,
        softcap=scalars.softcap,
        window=window,
        dropout_p=scalars.dropout_p,
        seed=scalars.seed,
        ndim=ndim,
        enabled_options=kind.enabled_options,
        score_mod=kind.score_mod,
        mask_mod=kind.mask_mod,
        constants=constants_of(options),
        sequences=None if packed is None else entries,
        page=None if paged is None else paged.page,
        aux_names=kind.aux_names,
        mask_options=kind.mask_options,
        kv_dtype=kind.kv_dtype,
        token_descales=of_tokens,
    )
    return problem, operands_of(q, k, v, places, options)


def _check_options(
    kind: CallKind,
    options: Mapping[str, Any],
    shape: tuple[int, int, int, int],
    B: int,
    Nq: int,
) -> None:
    """Check the arrays and functions of a call against its ``shape``, (entries, Hq, Nq, Nk)."""
    get, (entries, Hq, *_) = options.get, shape
    _array("alibi_slopes", get("alibi_slopes"), ((Hq,), (entries, Hq)), DTYPES)
    _array("sinks", get("sinks"), ((Hq,),), DTYPES)
    _broadcastable("bias", get("bias"), shape, DTYPES)
    _broadcastable("mask", get("mask"), shape, _BOOLEAN)
    _array("tree_mask", get("tree_mask"), ((1, Nq, Nq), (B, Nq, Nq)), _BOOLEAN)
    block_mask = get("block_mask")
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            remedy = "BlockMask.from_mask makes one from a boolean array"
            raise TypeError(must_be("block_mask", "a tileattn.BlockMask", block_mask, remedy))
        block_mask.check(*shape)
    if kind.reading:
        shapes = tuple(x.shape for x in get("aux") or ())
        functions = _expressions(options)
        for name in kind.reading:
            check_indices(name, functions[name], shapes, shape)


def operands_of(q: Any, k: Any, v: Any, places: Places, options: Mapping[str, Any]) -> Operands:
    """View the arrays of a valid call with all four axes."""
    get = options.get
    bias, mask, slopes = get("bias"), get("mask"), get("alibi_slopes")
    return Operands(
        *(four_axes(q), four_axes(k), four_axes(v), places.kv_lengths, places.q_offset),
        bias=None if bias is None else four_axes(bias),
        mask=None if mask is None else four_axes(mask),
        block_mask=get("block_mask"),
        alibi_slopes=slopes
        if slopes is None or slopes.ndim == 2
        else slopes.reshape((1, *slopes.shape)),
        sinks=get("sinks"),
        aux=aux_of(options, places, q.shape[-2]),
        packing=places.packing,
        paging=places.paging,
        origin=places.origin,
        k_descale=bring_descale("k_descale", get("k_descale"), q, k, places),
        v_descale=bring_descale("v_descale", get("v_descale"), q, v, places),
    )


def arrays_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays among the options, by their names in messages."""
    given = {name: options[name] for name in ARRAYS if options.get(name) is not None}
    return given | descale_arrays(options) | aux_arrays(options)


def device_integers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the integer options that are arrays on a device."""
    given = ((name, options.get(name)) for name in _ON_DEVICE)
    host = np.ndarray | np.generic
    return {name: x for name, x in given if hasattr(x, "dtype") and not isinstance(x, host)}


def aux_arrays(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of ``aux`` by their names in messages; raise TypeError if not a tuple."""
    aux = options.get("aux")
    if aux is None:
        return {}
    if not isinstance(aux, tuple | list):
        raise TypeError(must_be("aux", "a tuple of arrays", aux, "aux=(array,) for one"))
    return {f"aux[{n}]": x for n, x in enumerate(aux)}


def check_array(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise TypeError or ValueError if an array does not have this dtype and shape."""
    require_array(name, x)
    if x.dtype != dtype:
        raise TypeError(f"{called(name)} must have dtype {dtype}; got {x.dtype}")
    check_shape(name, x, shape)


def check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError if an array does not have this shape."""
    if x.shape != shape:
        raise ValueError(f"{called(name)} must have shape {shape}; got {x.shape}")


def check_dtype(name: str, x: Any, dtypes: tuple[np.dtype[Any], ...] = DTYPES) -> None:
    """Raise TypeError if an argument is not an array of a supported dtype."""
    require_array(name, x)
    if x.dtype not in dtypes:
        hint = hints.dtype_hint(name, x, dtypes)
        raise TypeError(f"{called(name)} must have dtype {one_of(dtypes)}; got {x.dtype}{hint}")


def four_axes(x: Any) -> Any:
    """View an array of two to four axes as ``(B, H, N, D)``."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def refuse_caches(call: str, options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for pages and caches of 8 bits, which have no gradients."""
    refuse_descales(call, options)
    if options.get("block_table") is not None:
        raise UnsupportedError(
            f"{call} does not support block_table: pages have no gradients; gather them, and pass "
            "k and v of each sequence"
        )


def check_names(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown option."""
    for name in options:
        if name not in OPTIONS:
            hint = hints.option_hint(name, OPTIONS)
            known = ", ".join(OPTIONS)
            raise TypeError(f"unknown option {name!r}{hint}; the options are {known}")


def _sizes(
    q: Any, k: Any, v: Any, *, paged: bool
) -> tuple[int, tuple[int, int, int, int, int, int, int]]:
    """Check the shapes of q, k and v against each other; a page is a batch entry of k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not 2 <= x.ndim <= 4:
            raise ValueError(
                f"{called(name)} must have shape (N, D), (H, N, D) or (B, H, N, D); got {x.shape}"
            )
        if paged and name != "q" and x.ndim != 4:
            raise ValueError(
                f"{called(name)} must have shape (pages, Hkv, page, D) with "
                f"{called('block_table')}; got {x.shape}"
            )
        if not paged and x.ndim != q.ndim:
            raise ValueError(
                f"{called(name)} must have as many axes as {called('q')}, {q.ndim}; got shape "
                f"{x.shape}"
            )
    B, Hq, Nq, D = (1,) * (4 - q.ndim) + q.shape
    Bk, Hkv, Nk, Dk = (1,) * (4 - k.ndim) + k.shape
    Bv, Hv, Nv, Dv = (1,) * (4 - v.ndim) + v.shape
    batch = (("k", "batch size", Bk, "q", B), ("v", "batch size", Bv, "q", B))
    for name, axis, got, other, expected in (
        *((("v", "number of pages", Bv, "k", Bk),) if paged else batch),
        ("k", "head dimension", Dk, "q", D),
        ("v", "number of heads", Hv, "k", Hkv),
        ("v", "length", Nv, "k", Nk),
    ):
        if got != expected:
            raise ValueError(
                f"{called(name)} must have the {axis} of {called(other)}, {expected}; got {got}"
            )
    if Hq % Hkv if Hkv else Hq:
        raise ValueError(
            f"{called('k')} must have a number of heads that divides the {Hq} heads of "
            f"{called('q')}; got {Hkv}" + hints.heads_hint(q, k)
        )
    return q.ndim, (B, Hq, Hkv, Nq, Nk, D, Dv)


def _array(
    name: str, x: Any, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...]
) -> None:
    if x is None:
        return
    check_dtype(name, x, dtypes)
    if x.shape not in shapes:
        fitting = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{called(name)} must have shape {fitting}; got {x.shape}")


def _broadcastable(
    name: str, x: Any, shape: tuple[int, int, int, int], dtypes: tuple[np.dtype[Any], ...]
) -> None:
    if x is None:
        return
    check_dtype(name, x, dtypes)
    axes = shape[4 - x.ndim :] if x.ndim <= 4 else ()
    if x.ndim > 4 or any(n not in (1, m) for n, m in zip(x.shape, axes, strict=True)):
        raise ValueError(
            f"{called(name)} must broadcast to (B, Hq, Nq, Nk) = {shape}; got shape {x.shape}"
            + hints.broadcast_hint(name, x, shape)
        )


def _functions(
    options: Mapping[str, Any], callers: Mapping[str, Any], names: tuple[str, ...]
) -> tuple[Node | None, Node | None, tuple[str, ...]]:
    """Trace the functions of a call and lower its options; also return which read arrays.

    The parameters of ``mask_mod`` follow those of ``score_mod``.
    """
    for name, x in callers.items():
        require_array(name, x)
        check_kind(called(name), x)
    functions = _expressions(options)
    if callers and not functions:
        raise ValueError(
            f"aux must be empty without score_mod or mask_mod; got {len(callers)} arrays"
        )
    nodes: dict[str, Node] = {}
    count = 0
    for name, function in functions.items():
        nodes[name] = renumbered(function.node, count)
        count += len(function.constants)
    reading: tuple[str, ...] = ()
    if options.get("origin") is None:
        reading = tuple(name for name, node in nodes.items() if elements(node))
    else:
        nodes = {name: from_origin(node, names) for name, node in nodes.items()}
    mask = lowered_mask(nodes.get("mask_mod"), options, names)
    return nodes.get("score_mod"), mask, reading


def _expressions(options: Mapping[str, Any]) -> dict[str, Expression]:
    """Return the expressions of the functions of a call, by name."""
    aux = tuple(options.get("aux") or ())
    given = {name: options[name] for name in FUNCTIONS if options.get(name) is not None}
    return {name: expression_of(x, aux, name) for name, x in given.items()}


def constants_of(options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the cells of the parameters of a call's functions."""
    return tuple(cell for x in _expressions(options).values() for cell in x.constants)


def _in_use(name: str, value: Any) -> bool:
    """Return True if an option differs from its default of None, False or zero."""
    if name in DESCALES:
        return value is not None
    value = scalar(value) if name in NUMBERS else value
    plain = isinstance(value, int | float | np.generic | tuple | list)
    return value is not None and not (plain and not value)
