"""A Hypothesis strategy that draws whole calls of attention: arrays, options and gradients."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.call.options import options_with
from tileattn.dtypes import DTYPES, QUERY_DTYPES, accum_dtype
from tileattn.oracle.dense import visibility
from tileattn.oracle.packed import packed as pack
from tileattn.testing.arrays import AMPLITUDES, FILLS, LAYOUTS, Fill, laid_out
from tileattn.testing.options import DRAW, EXTREMES, Choices
from tileattn.testing.quantised import quantise

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

Array = NDArray[Any]

AXES = ("Nq", "Nk", "B", "Hq", "D", "Dv")
UNPACKED = options_with(packed=False)
"""Options that do not go with packed sequences."""


class AttentionCase(NamedTuple):
    """One call of ``forward`` and ``backward``.

    Parameters
    ----------
    q, k, v : array
        Inputs: four, three or two axes, any strides.
    dout, dlse : array
        Upstream gradients of ``out`` and ``lse``; ``dlse`` may be None.
    options : dict
        Keyword arguments for both calls.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    options: dict[str, Any]

    def __repr__(self) -> str:
        """Describe the arrays without their contents, for reports of failing cases."""
        facts = {**self._asdict(), "options": None} | self.options
        shown = (f"{name}={_brief(x)}" for name, x in facts.items() if name != "options")
        return f"{type(self).__name__}({', '.join(shown)})"


def _brief(x: Any) -> str:
    if not isinstance(x, np.ndarray):
        return repr(x)
    values = f" {x.tolist()}" if x.size <= 8 else ""
    return f"<{x.dtype} {x.shape}{values}>"


def problems(
    *,
    dtypes: Sequence[Any] = DTYPES,
    options: Collection[str] = tuple(DRAW),
    max_length: int = 150,
    head_dims: Sequence[int] = (16, 20, 32, 24),
    edges: bool = True,
    poison: bool = True,
    extremes: bool = False,
    packed: bool = False,
    quantised: bool = False,
) -> "SearchStrategy[AttentionCase]":
    """Draw whole calls of attention.

    Parameters
    ----------
    dtypes : sequence of dtype
        Dtypes of the arrays to draw from.
    options : collection of str
        Names of the options that may be given, in any combination.
    max_length : int
        Largest Nq and Nk.
    head_dims : sequence of int
        Sizes of D and Dv, drawn independently.
    edges : bool
        If True, any axis may also be 0 or 1 long.
    poison : bool
        If True, masked-out keys, values and queries may hold NaN and infinities, and one attended
        key or value a NaN.
    extremes : bool
        If True, scores may have any size: queries and keys of 1e-3 to 1e4, additive masks in place
        of other biases, and softcaps, sinks, windows and offsets up to the limits of their types.
    packed : bool
        If True, draw packed sequences: up to five, or with ``edges`` none, of 0 to ``max_length``
        queries and keys each. ``cu_seqlens_q`` and ``cu_seqlens_k`` are always given, and options
        in `UNPACKED` never. The arrays have four axes, the first of length 1, or three or two.
    quantised : bool
        If True, k and v have 8 bits, with descales of any shape. ``dtypes`` are for q; float64 is
        not drawn. Such calls have no gradients.

    Returns
    -------
    SearchStrategy of AttentionCase
        Calls. Their axes have pairwise different lengths that no tile divides, except for
        ``edges``.

    Raises
    ------
    ModuleNotFoundError
        If Hypothesis is not installed.
    ValueError
        If an option is unknown.
    """
    try:
        from hypothesis import strategies as st
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tileattn.testing.problems needs Hypothesis: pip install hypothesis"
        ) from error
    for name in options:
        if name not in DRAW:
            raise ValueError(f"options must be among {', '.join(DRAW)}; got {name!r}")

    class Shrinkable(Choices):
        """Hypothesis makes the choices, and shrinks them."""

        def __init__(self, draw: "DrawFn") -> None:
            super().__init__(np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
            self._draw = draw

        def integer(self, low: int, high: int) -> int:
            return self._draw(st.integers(low, high))

        def one_of(self, *values: Any) -> Any:
            return self._draw(st.sampled_from(values))

    @st.composite
    def cases(draw: "DrawFn") -> AttentionCase:
        choices = Shrinkable(draw)
        fitting = [x for x in dtypes if not quantised or np.dtype(x) in QUERY_DTYPES]
        dtype = np.dtype(choices.one_of(*fitting))
        D, Dv = choices.one_of(*head_dims), choices.one_of(*head_dims)
        chosen = [name for name in DRAW if name in options and choices.coin()]
        case = draw_case(
            choices,
            (dtype, D, Dv, chosen),
            max_length=max_length,
            edges=AXES if edges else (),
            poison=poison,
            extremes=extremes,
            packed=packed,
        )
        if not quantised:
            return case
        k, v, descales = quantise(choices, case.k, case.v, case.options)
        return case._replace(k=k, v=v, options=case.options | descales)

    return cases()


# B, Hq, Nq and Nk come from disjoint lists, so that swapped axes do not match.
_HEADS = ((4, 2), (4, 4), (6, 2), (6, 1), (5, 1))
_QUERIES = (7, 11, 13, 17, 29, 37, 67, 131, 211)
_KEYS = (9, 15, 19, 27, 39, 71, 149, 233)


def draw_case(
    choices: Choices,
    family: tuple[np.dtype[Any], int, int, Collection[str]],
    *,
    max_length: int,
    edges: Sequence[str] = AXES,
    poison: bool = True,
    extremes: bool = False,
    ranks: Sequence[int] = (4, 4, 4, 3, 2),
    layouts: Sequence[str] = LAYOUTS,
    packed: bool = False,
) -> AttentionCase:
    """Draw a call, given its dtype, D, Dv and the names of its options.

    The axes of ``edges`` may be 0 or 1 long. ``ranks`` are numbers of axes: 3 has no batch, 2 no
    heads either. For the rest see `problems`. A packed call is drawn as its dense equivalent, in
    which B is the number of sequences.
    """
    dtype, D, Dv, names = family
    if packed:
        names = [name for name in names if name not in UNPACKED]
    axes = choices.one_of(*ranks)
    entries = (3, 2, 1, 4, 5) if packed else (2, 3) if axes == 4 else ()
    B = choices.one_of(*entries) if entries else 1
    Hq, Hkv = choices.one_of(*_HEADS) if axes > 2 else (1, 1)
    Nq, Nk = (choices.one_of(*(n for n in x if n <= max_length)) for x in (_QUERIES, _KEYS))
    sizes = {"B": B, "Hq": Hq, "Hkv": Hkv, "Nq": Nq, "Nk": Nk, "D": D, "Dv": Dv}
    if edges and choices.one_of(False, False, False, True):
        name, length = choices.one_of(*edges), choices.one_of(0, 1)
        fixed = ("B", "Hq")[: 4 - axes]
        if name not in fixed or (packed and name == "B"):
            sizes |= {"Hq": length, "Hkv": length} if name == "Hq" else {name: length}
    cu_seqlens = _pack_sizes(choices, sizes) if packed else None
    shape = (sizes["B"], sizes["Hq"], sizes["Nq"], sizes["Nk"])
    drawn_by = EXTREMES if extremes else DRAW
    options = {name: drawn_by[name](choices, shape, dtype) for name in names}
    if "prefix" in options:
        options["causal"] = True  # without it there is nothing to attend to both ways
    if cu_seqlens is not None:
        options |= _pack_options(choices, cu_seqlens, options)
    arrays = _arrays(choices, sizes, dtype, AMPLITUDES if extremes else FILLS)
    dlse = choices.rng.normal(size=shape[:3]).astype(accum_dtype(dtype)) if choices.coin() else None
    if poison and choices.coin():
        _poison(choices, arrays, visibility(shape, options), options)
    if cu_seqlens is not None:
        of_axes = [cu_seqlens[name] for name in ("Nq", "Nk", "Nk", "Nq")]
        arrays = [pack(x, ends) for x, ends in zip(arrays, of_axes, strict=True)]
        dlse = None if dlse is None else pack(dlse, cu_seqlens["Nq"])
    lead = (0,) * (4 - axes)
    q, k, v, dout = (laid_out(x, choices.one_of(*layouts))[lead] for x in arrays)
    return AttentionCase(q, k, v, dout, None if dlse is None else dlse[lead], options)


def _pack_sizes(choices: Choices, sizes: dict[str, int]) -> dict[str, Array]:
    """Draw the offsets of sequences; set Nq and Nk to the greatest lengths."""
    S = sizes["B"]
    lengths = {}
    for axis in ("Nq", "Nk"):
        most = sizes[axis]
        lengths[axis] = [
            choices.one_of(choices.integer(0, most), 0, min(1, most)) for _ in range(S)
        ]
        if S:
            lengths[axis][choices.integer(0, S - 1)] = most
    if choices.one_of(False, False, True):
        lengths["Nk"] = lengths["Nq"]
    sizes |= {axis: max(drawn, default=0) for axis, drawn in lengths.items()}
    return {axis: np.cumsum([0, *drawn]) for axis, drawn in lengths.items()}


def _pack_options(
    choices: Choices, cu_seqlens: dict[str, Array], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of packed tokens; cap ``kv_lengths`` at the keys of each sequence."""
    packing: dict[str, Any] = {}
    for name, axis in (("cu_seqlens_q", "Nq"), ("cu_seqlens_k", "Nk")):
        kind = choices.one_of(np.int32, np.int64, None)
        ends = cu_seqlens[axis]
        packing[name] = ends.tolist() if kind is None else ends.astype(kind)
    if "kv_lengths" in options:
        lengths = options["kv_lengths"]
        capped = np.minimum(lengths, np.diff(cu_seqlens["Nk"]))
        packing["kv_lengths"] = capped.astype(lengths.dtype)
    return packing


def _arrays(
    choices: Choices, sizes: dict[str, int], dtype: np.dtype[Any], fills: dict[str, Fill]
) -> list[Array]:
    """Fill q, k, v and dout, in the plain layout."""
    B, Hq, Hkv, Nq, Nk, D, Dv = sizes.values()
    fill, rng = fills[choices.one_of(*sorted(fills))], choices.rng
    return [
        fill(rng, (B, Hq, Nq, D)).astype(dtype),
        fill(rng, (B, Hkv, Nk, D)).astype(dtype),
        rng.normal(size=(B, Hkv, Nk, Dv)).astype(dtype),
        rng.normal(size=(B, Hq, Nq, Dv)).astype(dtype),
    ]


def _poison(
    choices: Choices,
    arrays: list[Array],
    visible: NDArray[np.bool_],
    options: dict[str, Any],
) -> None:
    """Write NaN and infinities to masked-out elements, and NaN to an attended key or value."""
    q, k, v, dout = arrays
    rng = choices.rng
    B, Hq, _, Nk = visible.shape
    Hkv = k.shape[1]
    group = Hq // Hkv if Hkv else 1
    wrong = np.array([np.nan, np.inf, -np.inf])
    unattended = ~visible.any(axis=2).reshape(B, Hkv, group, Nk).any(axis=2)
    without_key = ~visible.any(axis=3)
    k[unattended], v[unattended] = rng.choice(wrong), rng.choice(wrong)
    q[without_key] = rng.choice(wrong)
    if "sinks" not in options:  # the gradient for a sink reads dout of every row
        dout[without_key] = np.nan
    bias = options.get("bias")
    if bias is not None and bias.ndim == 4:
        repeated = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        bias[~visible.any(axis=repeated, keepdims=True)] = rng.choice(wrong)
    if k.size and v.size and choices.coin():
        b, h, j = (int(rng.integers(n)) for n in (B, Hkv, Nk))
        choices.one_of(k, v)[b, h, j, 0] = np.nan
