"""The validated call: sizes, dtypes and options, with every message in one place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np

from tileattn.call import hints
from tileattn.call.block_mask import BlockMask
from tileattn.call.origin import from_origin, origin_arrays
from tileattn.call.scalars import dropout_of, scale_of, seed_of, softcap_of
from tileattn.call.sequences import Packing, Paging, Places, places_of
from tileattn.call.tree_mask import tree_arrays, with_tree
from tileattn.call.window import window_of, without_far_sides
from tileattn.dtypes import DTYPES, accum_dtype, one_of
from tileattn.errors import UnsupportedError
from tileattn.expressions.arrays import check_kind
from tileattn.expressions.functions import check_indices, mask_expression, score_expression
from tileattn.expressions.nodes import Node
from tileattn.messages import called
from tileattn.validation import must_be, require_array, scalar

_ARRAYS = ("bias", "mask", "tree_mask", "alibi_slopes", "sinks")
_NUMBERS = ("scale", "softcap", "dropout_p", "seed")
_OF_ROWS = ("lse", "dlse")
_BOOLEAN = (np.dtype(np.bool_),)
# Where keys and queries are. With none of these each sequence has all keys, and ends with them.
_PLACES = ("kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "block_table")


class Options(TypedDict, total=False):
    """The options that ``forward`` and ``backward`` share; see ``tileattn.forward``."""

    scale: float | None
    softcap: float | None
    alibi_slopes: Any
    bias: Any
    causal: bool
    window: tuple[int | None, int | None] | None
    mask: Any
    block_mask: BlockMask | None
    kv_lengths: Any
    q_offset: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    block_table: Any
    tree_mask: Any
    origin: Any
    sinks: Any
    dropout_p: float
    seed: int
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """The facts of one call: hashable, and free of arrays.

    Parameters
    ----------
    B, Hq, Hkv, Nq, Nk, D, Dv : int
        Sizes: batch, query heads, key heads, queries, keys, head dimension of q and k, and of v.
    dtype : numpy.dtype
        Data type of q, k, v and out.
    scale : float
        Multiplies ``q @ k.T``.
    softcap : float or None
        Bound of the scaled products.
    window : (int or None, int or None)
        Keys to the left and right; causal is a right side of 0. Sides that hide no key are open.
    dropout_p : float
        Probability of dropping an entry.
    seed : int
        Seed of the dropout generator, below 2**64.
    ndim : int
        Rank of the caller's arrays, 2 to 4.
    enabled_options : frozenset of str
        Names of the options in use.
    score_mod, mask_mod : Node or None
        Expressions of the caller's own functions; a tree mask is a part of ``mask_mod``.
    sequences : int or None
        How many sequences are packed one behind the other, in arrays of one batch entry; None where
        batch entries are the sequences.
    page : int or None
        Keys of a page, where a block table says which pages a sequence has.
    """

    B: int
    Hq: int
    Hkv: int
    Nq: int
    Nk: int
    D: int
    Dv: int
    dtype: np.dtype[Any]
    scale: float
    softcap: float | None
    window: tuple[int | None, int | None]
    dropout_p: float
    seed: int
    ndim: int
    enabled_options: frozenset[str]
    score_mod: Node | None = None
    mask_mod: Node | None = None
    sequences: int | None = None
    page: int | None = None

    @property
    def features(self) -> frozenset[str]:
        """Return what a kernel must honour: the options in use, as this record carries them.

        A tree mask is a mask function here, whatever option it came from. Kernels are chosen by
        these names, never by `enabled_options`, which are the caller's.
        """
        functions = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        traced = {name for name, expression in functions.items() if expression is not None}
        return self.enabled_options - functions.keys() - {"tree_mask"} | traced

    @property
    def entries(self) -> int:
        """Sequences: entries of what has a batch axis."""
        return self.B if self.sequences is None else self.sequences

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.Hq // self.Hkv if self.Hkv else 0

    @property
    def accum_dtype(self) -> np.dtype[Any]:
        """Type in which sums are kept and in which ``lse`` is given."""
        return accum_dtype(self.dtype)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of ``out`` as the caller sees it."""
        return (self.B, self.Hq, self.Nq, self.Dv)[4 - self.ndim :]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a result or its upstream gradient, as the caller sees it."""
        return self.out_shape[:-1] if name in _OF_ROWS else self.out_shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Dtype of a result and its upstream gradient."""
        return self.accum_dtype if name in _OF_ROWS else self.dtype


class Operands(NamedTuple):
    """The arrays of one call, as views with all four axes, and which gradients are asked for.

    Parameters
    ----------
    q, k, v : array, shapes (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)
        The inputs.
    kv_lengths, q_offset : array of int64, or on a device of integers, shape (entries,), or None
        Keys that exist, and position of query 0, for each sequence; None as in `Places`.
    bias, mask : array or None, broadcastable to (B, Hq, Nq, Nk), four axes
        Added to the scores; booleans, True = attended.
    block_mask : BlockMask or None
        Its empty blocks are neither loaded nor computed.
    alibi_slopes : array or None, shape (entries or 1, Hq)
        Slope for each head.
    sinks : array or None, shape (Hq,)
        Logits that join the denominator only.
    aux : sequence of array
        Arrays that the caller's own functions read, in their own shapes; behind them those of a
        tree mask, and the origin.
    wrt : frozenset of str or None
        Names of the arrays whose gradients are asked for; None is all. A backend may compute
        others: they are dropped.
    packing : Packing or None
        Where packed sequences start.
    paging : Paging or None
        Where the keys of each sequence are, if k and v have pages in place of batch entries.
    origin : array of int64, shape (entries, 4), or None
        Indices (b, h, i, j) from which dropout counts, for each sequence.
    """

    q: Any
    k: Any
    v: Any
    kv_lengths: Any
    q_offset: Any
    bias: Any = None
    mask: Any = None
    block_mask: BlockMask | None = None
    alibi_slopes: Any = None
    sinks: Any = None
    aux: Sequence[Any] = ()
    wrt: frozenset[str] | None = None
    packing: Packing | None = None
    paging: Paging | None = None
    origin: Any = None

    def wants(self, name: str) -> bool:
        """Whether the gradient of an array is asked for."""
        return self.wrt is None or name in self.wrt


def parse(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> tuple[Problem, Operands]:
    """Validate a call; absent options have their defaults."""
    check_names(options)
    ndim, sizes = _sizes(q, k, v, paged=options.get("block_table") is not None)
    B, Hq, Hkv, Nq, Nk, D, Dv = sizes
    places = places_of(options, k, B, Nq, Nk)
    packed, paged = places.packing, places.paging
    Nk = Nk if paged is None else paged.capacity
    entries = B if packed is None else packed.sizes[0]
    shape = (entries, Hq, *((Nq, Nk) if packed is None else packed.longest(Nq, Nk)))
    _array("alibi_slopes", options.get("alibi_slopes"), ((Hq,), (entries, Hq)), DTYPES)
    _array("sinks", options.get("sinks"), ((Hq,),), DTYPES)
    _broadcastable("bias", options.get("bias"), shape, DTYPES)
    _broadcastable("mask", options.get("mask"), shape, _BOOLEAN)
    _array("tree_mask", options.get("tree_mask"), ((1, Nq, Nq), (B, Nq, Nq)), _BOOLEAN)
    block_mask = options.get("block_mask")
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            remedy = "BlockMask.from_mask makes one from a boolean array"
            raise TypeError(must_be("block_mask", "a tileattn.BlockMask", block_mask, remedy))
        block_mask.check(*shape)
    score_mod, mask_mod = _functions(options, shape)
    window = window_of(options.get("window"), options.get("causal", False))
    if all(options.get(name) is None for name in _PLACES):
        window = without_far_sides(window, Nq, Nk)
    problem = Problem(
        *(B, Hq, Hkv, Nq, Nk, D, Dv),
        dtype=q.dtype,
        scale=scale_of(options.get("scale"), D),
        softcap=softcap_of(options.get("softcap")),
        window=window,
        dropout_p=dropout_of(options.get("dropout_p", 0.0)),
        seed=seed_of(options.get("seed", 0)),
        ndim=ndim,
        enabled_options=frozenset(name for name, value in options.items() if _in_use(name, value)),
        score_mod=score_mod,
        mask_mod=mask_mod,
        sequences=None if packed is None else entries,
        page=None if paged is None else paged.page,
    )
    return problem, operands_of(q, k, v, places, options)


def operands_of(q: Any, k: Any, v: Any, places: Places, options: Mapping[str, Any]) -> Operands:
    """View the arrays of a valid call with all four axes."""
    get = options.get
    bias, mask, slopes = get("bias"), get("mask"), get("alibi_slopes")
    tree = tree_arrays(options, places.kv_lengths, q.shape[-2])
    origin = origin_arrays(places.origin, (get("score_mod"), get("mask_mod")))
    return Operands(
        *(four_axes(q), four_axes(k), four_axes(v), places.kv_lengths, places.q_offset),
        bias=None if bias is None else four_axes(bias),
        mask=None if mask is None else four_axes(mask),
        block_mask=get("block_mask"),
        alibi_slopes=slopes if slopes is None or slopes.ndim == 2 else slopes[None],
        sinks=get("sinks"),
        aux=(*(get("aux") or ()), *tree, *origin),
        packing=places.packing,
        paging=places.paging,
        origin=places.origin,
    )


def arrays_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the arrays among the options, by their names in messages."""
    given = {name: options[name] for name in _ARRAYS if options.get(name) is not None}
    return given | aux_arrays(options)


def device_integers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the lengths, offsets and tables that are arrays of another library than NumPy."""
    given = ((name, options.get(name)) for name in _PLACES)
    host = np.ndarray | np.generic
    return {name: x for name, x in given if hasattr(x, "dtype") and not isinstance(x, host)}


def aux_arrays(options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the arrays ``aux`` by their names in messages; raise TypeError if it is no sequence."""
    aux = options.get("aux")
    if aux is None:
        return {}
    if not isinstance(aux, tuple | list):
        raise TypeError(must_be("aux", "a tuple of arrays", aux, "aux=(array,) for one"))
    return {f"aux[{n}]": x for n, x in enumerate(aux)}


def check_array(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise if an array is not exactly of one shape and dtype."""
    require_array(name, x)
    if x.dtype != dtype:
        raise TypeError(f"{called(name)} must have dtype {dtype}; got {x.dtype}")
    check_shape(name, x, shape)


def check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError if an array is not exactly of one shape."""
    if x.shape != shape:
        raise ValueError(f"{called(name)} must have shape {shape}; got {x.shape}")


def check_dtype(name: str, x: Any, dtypes: tuple[np.dtype[Any], ...] = DTYPES) -> None:
    """Raise TypeError if an argument is not an array of one of some dtypes."""
    require_array(name, x)
    if x.dtype not in dtypes:
        hint = hints.of_dtype(name, x, dtypes)
        raise TypeError(f"{called(name)} must have dtype {one_of(dtypes)}; got {x.dtype}{hint}")


def four_axes(x: Any) -> Any:
    """View an array of two to four axes as ``(B, H, N, D)``."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def refuse_pages(call: str, options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if keys are in pages, which have no gradients."""
    if options.get("block_table") is not None:
        raise UnsupportedError(
            f"{call} does not support block_table: pages have no gradients; gather them, and pass "
            "k and v of each sequence"
        )


def check_names(options: Mapping[str, Any]) -> None:
    """Raise TypeError if there is no such option."""
    for name in options:
        if name not in Options.__annotations__:
            hint = hints.of_option(name, Options.__annotations__)
            known = ", ".join(Options.__annotations__)
            raise TypeError(f"unknown option {name!r}{hint}; the options are {known}")


def _sizes(
    q: Any, k: Any, v: Any, *, paged: bool
) -> tuple[int, tuple[int, int, int, int, int, int, int]]:
    """Check the shapes of q, k and v against each other; a page is a batch entry of k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, x)
        if x.dtype != q.dtype:
            raise TypeError(
                f"{called(name)} must have the dtype of {called('q')}, {q.dtype}; got {x.dtype}"
            )
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
            f"{called('q')}; got {Hkv}" + hints.of_heads(q, k)
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
            + hints.of_keys(name, x, shape)
        )


def _functions(
    options: Mapping[str, Any], shape: tuple[int, int, int, int]
) -> tuple[Node | None, Node | None]:
    """Trace the functions of a call, and check the indices into its arrays."""
    aux = aux_arrays(options)
    for name, x in aux.items():
        require_array(name, x)
        check_kind(called(name), x)
    score_mod, mask_mod = options.get("score_mod"), options.get("mask_mod")
    if aux and score_mod is None and mask_mod is None:
        raise ValueError(f"aux must be empty without score_mod or mask_mod; got {len(aux)} arrays")
    arrays = tuple(aux.values())
    score = None if score_mod is None else score_expression(score_mod, arrays)
    mask = None if mask_mod is None else mask_expression(mask_mod, arrays)
    shapes = tuple(x.shape for x in arrays)
    for name, node in (("score_mod", score), ("mask_mod", mask)):
        if node is not None and options.get("origin") is None:
            check_indices(name, node, shapes, shape)
    count = len(arrays) + 2 * (options.get("tree_mask") is not None)
    if options.get("origin") is not None:
        score, mask = (None if node is None else from_origin(node, count) for node in (score, mask))
    return score, with_tree(mask, options, len(arrays))


def _in_use(name: str, value: Any) -> bool:
    """Whether an option differs from its default of None, False or zero."""
    value = scalar(value) if name in _NUMBERS else value
    plain = isinstance(value, int | float | np.generic | tuple | list)
    return value is not None and not (plain and not value)
