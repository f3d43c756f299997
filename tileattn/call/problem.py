"""A call that was found valid: `Problem`, what is asked, and `Operands`, its arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.block_mask import BlockMask
from tileattn.call.options import options_with
from tileattn.call.sequences import Packing, Paging
from tileattn.dtypes import NAMED, accum_dtype
from tileattn.expressions.nodes import Node

_OF_ROWS = ("lse", "dlse")
_PLACES = options_with(role="place")
_OPTION_OF = {
    "has_alibi": "alibi_slopes",
    "has_dropout": "dropout_p",
    "is_invariant": "invariant",
}
ARRAY_OPTIONS = options_with(value="array", lowered=False)
"""Options whose arrays are fields of `Operands` of the same names."""


class Kind(NamedTuple):
    """The facts that decide which kernels run and how parameters are filled.

    Calls of one kind differ only in their `Numbers`. The other fields are as in `Problem`.

    Parameters
    ----------
    group : int
        Query heads that read one key head.
    bounded : (bool, bool)
        True for each side of the window that has a bound.
    has_softcap, has_dropout, is_packed : bool
        As the properties of `Problem`.
    """

    dtype: np.dtype[Any]
    D: int
    Dv: int
    ndim: int
    group: int
    bounded: tuple[bool, bool]
    has_softcap: bool
    has_dropout: bool
    is_packed: bool
    page: int | None
    enabled_options: frozenset[str]
    score_mod: Node | None
    mask_mod: Node | None
    aux_names: tuple[str, ...]
    mask_options: tuple[str, ...]
    kv_dtype: np.dtype[Any] | None
    token_descales: frozenset[str]


class Numbers(NamedTuple):
    """The facts that may differ between calls of one kind. The fields are as in `Problem`."""

    B: int
    Hq: int
    Hkv: int
    Nq: int
    Nk: int
    scale: float
    softcap: float | None
    window: tuple[int | None, int | None]
    dropout_p: float
    seed: int
    sequences: int | None
    constants: tuple[int, ...]


class _Enabled:
    """A property that is true if an option is in use."""

    def __init__(self, option: str) -> None:
        self._option = option

    def __get__(self, problem: "Problem", _: Any = None) -> bool:
        return self._option in problem.enabled_options


@dataclass(slots=True, unsafe_hash=True)
class Problem:
    """The facts of one call: hashable, and free of arrays. It is a `Kind` and its `Numbers`.

    Its fields are never assigned. It is not frozen because each call with new numbers makes one,
    and the constructor of a frozen class takes three times as long.

    Parameters
    ----------
    B, Hq, Hkv, Nq, Nk, D, Dv : int
        Sizes: batch, query heads, key heads, queries, keys, head dimension of q and k, and of v.
    dtype : numpy.dtype
        Data type of q and out, and of k and v without ``kv_dtype``.
    scale : float
        Multiplies ``q @ k.T``.
    softcap : float or None
        Bound of the scaled products; None for no bound.
    window : (int or None, int or None)
        Keys to the left and right; causal is a right side of 0. None for a side that masks nothing.
    dropout_p : float
        Probability of dropping an entry.
    seed : int
        Seed of the dropout generator, below 2**64.
    ndim : int
        Rank of the caller's arrays, 2 to 4.
    enabled_options : frozenset of str
        Names of the options in use.
    score_mod, mask_mod : Node or None
        Expressions of the caller's own functions; ``tree_mask`` and ``prefix`` are parts of
        ``mask_mod``.
    constants : tuple of int
        The cells of the parameters of both, which they count together.
    sequences : int or None
        Number of sequences that are packed in arrays of one batch entry; None if batch entries are
        the sequences.
    page : int or None
        Keys of a page; None if keys and values are not in pages.
    aux_names : tuple of str
        Names of the arrays that the functions read, in the order of ``Operands.aux``.
    mask_options : tuple of str
        Names of the options that ``mask_mod`` expresses, for messages.
    kv_dtype : numpy.dtype or None
        Data type of quantised k and v; None if they have the dtype of q.
    token_descales : frozenset of str
        Names of the descales with a number for each token; the others have one for each head.
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
    constants: tuple[int, ...] = ()
    sequences: int | None = None
    page: int | None = None
    aux_names: tuple[str, ...] = ()
    mask_options: tuple[str, ...] = ()
    kv_dtype: np.dtype[Any] | None = None
    token_descales: frozenset[str] = frozenset()

    @property
    def place_options(self) -> tuple[str, ...]:
        """Name the options in use that say where the queries and keys of each sequence are."""
        return tuple(name for name in _PLACES if name in self.enabled_options)

    def option_of(self, fact: str) -> str:
        """Return the option that messages name for a fact that is true, such as ``has_bias``."""
        if fact == "mask_mod":
            return next(iter(self.mask_options), fact)
        return _OPTION_OF.get(fact, fact.removeprefix("has_"))

    def without_block_mask(self) -> "Problem":
        """Return the problem of a call in which ``mask_mod`` stands for the block mask."""
        return replace(self, enabled_options=self.enabled_options - {"block_mask"})

    @property
    def kind(self) -> Kind:
        """Return the part that calls which run the same kernels share."""
        left, right = self.window
        return Kind(
            *(self.dtype, self.D, self.Dv, self.ndim, self.group),
            bounded=(left is not None, right is not None),
            has_softcap=self.has_softcap,
            has_dropout=self.has_dropout,
            is_packed=self.is_packed,
            page=self.page,
            enabled_options=self.enabled_options,
            score_mod=self.score_mod,
            mask_mod=self.mask_mod,
            aux_names=self.aux_names,
            mask_options=self.mask_options,
            kv_dtype=self.kv_dtype,
            token_descales=self.token_descales,
        )

    @property
    def numbers(self) -> Numbers:
        """Return the part that `kind` leaves out."""
        return Numbers(
            *(self.B, self.Hq, self.Hkv, self.Nq, self.Nk, self.scale, self.softcap),
            *(self.window, self.dropout_p, self.seed, self.sequences, self.constants),
        )

    @classmethod
    def of(cls, kind: Kind, numbers: Numbers) -> "Problem":
        """Return the problem of a kind and numbers."""
        shared = ("dtype", "D", "Dv", "ndim", "page", "enabled_options", "score_mod", "mask_mod")
        names = (*shared, "aux_names", "mask_options", "kv_dtype", "token_descales")
        return cls(**numbers._asdict(), **{name: getattr(kind, name) for name in names})

    has_bias = _Enabled("bias")
    has_alibi = _Enabled("alibi_slopes")
    has_mask = _Enabled("mask")
    has_block_mask = _Enabled("block_mask")
    has_sinks = _Enabled("sinks")
    has_lengths = _Enabled("kv_lengths")
    has_offset = _Enabled("q_offset")
    is_invariant = _Enabled("invariant")

    @property
    def has_softcap(self) -> bool:
        """True if scaled products are capped."""
        return self.softcap is not None

    @property
    def has_dropout(self) -> bool:
        """True if entries are dropped."""
        return self.dropout_p > 0

    @property
    def has_dropout_origin(self) -> bool:
        """True if dropout counts from the indices of a larger call."""
        return self.has_dropout and "origin" in self.enabled_options

    @property
    def is_packed(self) -> bool:
        """True if sequences are packed along one axis of tokens."""
        return self.sequences is not None

    @property
    def is_paged(self) -> bool:
        """True if keys and values are in pages."""
        return self.page is not None

    @property
    def is_quantised(self) -> bool:
        """True if k and v have 8 bits, and descales."""
        return self.kv_dtype is not None

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of k and v."""
        return (self.kv_dtype or self.dtype).itemsize

    @property
    def changes_scores(self) -> bool:
        """True if something modifies the scores ``scale * q @ k.T``."""
        modified = self.has_softcap or self.score_mod is not None
        return modified or self.has_alibi or self.has_bias

    @property
    def has_pair_mask(self) -> bool:
        """True if the mask depends on more than positions and lengths."""
        return self.has_mask or self.has_block_mask or self.mask_mod is not None

    @property
    def entries(self) -> int:
        """Number of sequences: the length of the batch axis of options."""
        return self.B if self.sequences is None else self.sequences

    @property
    def group(self) -> int:
        """Query heads per key head."""
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


def problem_of(dtype: str, dim: int, enabled_options: Iterable[str] = ()) -> Problem:
    """Make a problem of one query and two keys that needs the kernels for some options."""
    names = frozenset(enabled_options)
    return Problem(
        *(1, 1, 1, 1, 2, dim, dim),
        dtype=NAMED[dtype],
        scale=1.0,
        softcap=1.0 if "softcap" in names else None,
        window=(None, None),
        dropout_p=0.5 if "dropout_p" in names else 0.0,
        seed=0,
        ndim=4,
        enabled_options=names,
        sequences=1 if "cu_seqlens_q" in names else None,
    )


class Operands(NamedTuple):
    """The arrays of one call, as views with all four axes, and the requested gradients.

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
        Arrays that the functions read, in their own shapes, as ``Problem.aux_names`` names them:
        the caller's, then the ones that options such as ``tree_mask`` bring.
    wrt : frozenset of str or None
        Names of the arrays whose gradients are requested; None for all. A backend may compute
        more: they are dropped.
    packing : Packing or None
        Where packed sequences start.
    paging : Paging or None
        Where the keys of each sequence are, if k and v have pages in place of batch entries.
    origin : array of int64, shape (entries, 4), or None
        Indices (b, h, i, j) from which dropout counts, for each sequence.
    k_descale, v_descale : array of float32, three axes, or None
        Factors of quantised k and v: for each head (entries, Hkv, 1), or for each token
        (B, Hkv, Nk), with the B and Nk of k. Views of the caller's arrays, with strides of 0
        where they broadcast.
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
    k_descale: Any = None
    v_descale: Any = None

    @property
    def option_arrays(self) -> dict[str, Any]:
        """Return the arrays of options that kernels read, by the names of the options."""
        given = ((name, getattr(self, name)) for name in ARRAY_OPTIONS)
        return {name: x for name, x in given if x is not None}

    @property
    def descales(self) -> dict[str, Any]:
        """Return the factors of quantised k and v, by the names of the options."""
        given = {"k_descale": self.k_descale, "v_descale": self.v_descale}
        return {name: x for name, x in given.items() if x is not None}

    def wants(self, name: str) -> bool:
        """Return True if the gradient of an array is requested."""
        return self.wrt is None or name in self.wrt
