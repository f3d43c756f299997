"""A Hypothesis strategy that draws whole calls of attention: arrays, options and gradients."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.dtypes import DTYPES, accum_dtype
from tileattn.reference import visibility
from tileattn.testing import options as draw_options
from tileattn.testing.arrays import AMPLITUDES, FILLS, LAYOUTS, Fill, laid_out

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

Array = NDArray[Any]


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
        """Say what the arrays are, not what they hold: a failing case is reported by this."""
        facts = {**self._asdict(), "options": None} | self.options
        shown = (f"{name}={_brief(x)}" for name, x in facts.items() if name != "options")
        return f"{type(self).__name__}({', '.join(shown)})"


def _brief(x: Any) -> str:
    if not isinstance(x, np.ndarray):
        return repr(x)
    values = f" {x.tolist()}" if x.size <= 8 else ""
    return f"<{x.dtype} {x.shape}{values}>"


class _Sizes(NamedTuple):
    B: int
    Hq: int
    Hkv: int
    Nq: int
    Nk: int
    D: int
    Dv: int
    axes: int  # of the arrays: 4, or 3 with B = 1, or 2 with Hq = 1 also


def problems(
    *,
    dtypes: Sequence[Any] = DTYPES,
    options: Collection[str] = tuple(draw_options.DRAW),
    max_length: int = 150,
    head_dims: Sequence[int] = (16, 20, 32, 24),
    edges: bool = True,
    poison: bool = True,
    extremes: bool = False,
) -> "SearchStrategy[AttentionCase]":
    """Draw whole calls of attention.

    Parameters
    ----------
    dtypes : sequence of dtype
        Dtypes of the arrays to draw from.
    options : collection of str
        Names of the options that may be given; each of them is, or is not, in any combination.
    max_length : int
        Largest Nq and Nk.
    head_dims : sequence of int
        Sizes of D and Dv, which are drawn independently.
    edges : bool
        Whether any axis may also be 0 or 1 long.
    poison : bool
        Whether masked-out keys, values and queries may hold NaN and infinities, and one attended
        key or value a NaN.
    extremes : bool
        Whether scores may have any size: queries and keys of the order of 1e-3 to 1e4, additive
        masks in place of other biases, and softcaps, sinks, windows and offsets up to the ends of
        their types.

    Returns
    -------
    SearchStrategy of AttentionCase
        The arrays have pairwise different lengths that no tile divides, except where ``edges`` has
        it otherwise.

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
        if name not in draw_options.DRAW:
            raise ValueError(f"options has {name!r}; {', '.join(draw_options.DRAW)} are accepted")

    drawn_by = draw_options.EXTREMES if extremes else draw_options.DRAW
    fills = AMPLITUDES if extremes else FILLS

    @st.composite
    def cases(draw: "DrawFn") -> AttentionCase:
        sizes = draw(_sizes(max_length, head_dims, edges))
        dtype = np.dtype(draw(st.sampled_from(list(dtypes))))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        shape = (sizes.B, sizes.Hq, sizes.Nq, sizes.Nk)
        chosen: dict[str, Any] = {}
        for name in draw_options.DRAW:
            if name in options and draw(st.booleans()):
                chosen[name] = drawn_by[name](draw, rng, shape, dtype)
        arrays = _arrays(draw, rng, sizes, dtype, fills)
        dlse = None
        if draw(st.booleans()):
            dlse = rng.normal(size=shape[:3]).astype(accum_dtype(np.dtype(dtype)))
        if poison and draw(st.booleans()):
            _poison(draw, rng, arrays, visibility(shape, chosen), chosen)
        q, k, v, dout = (
            laid_out(x, draw(st.sampled_from(LAYOUTS)))[(0,) * (4 - sizes.axes)] for x in arrays
        )
        dlse = None if dlse is None else dlse[(0,) * (4 - sizes.axes)]
        return AttentionCase(q, k, v, dout, dlse, chosen)

    return cases()


def _sizes(max_length: int, head_dims: Sequence[int], edges: bool) -> "SearchStrategy[_Sizes]":
    from hypothesis import strategies as st

    # B, Hq, Nq, Nk, D and Dv come from disjoint lists where head_dims allows it, so that swapped
    # axes do not fit each other.
    heads = [(4, 2), (4, 4), (6, 2), (6, 1), (5, 1)]
    queries = [n for n in (7, 11, 13, 17, 29, 37, 67, 131) if n <= max_length]
    keys = [n for n in (9, 15, 19, 27, 39, 71, 149) if n <= max_length]

    @st.composite
    def sizes(draw: "DrawFn") -> _Sizes:
        axes = draw(st.sampled_from([4, 4, 4, 3, 2]))
        B = draw(st.sampled_from([2, 3])) if axes == 4 else 1
        Hq, Hkv = draw(st.sampled_from(heads)) if axes > 2 else (1, 1)
        Nq, Nk = draw(st.sampled_from(queries)), draw(st.sampled_from(keys))
        D, Dv = draw(st.sampled_from(list(head_dims))), draw(st.sampled_from(list(head_dims)))
        drawn = _Sizes(B, Hq, Hkv, Nq, Nk, D, Dv, axes)
        if not edges or not draw(st.sampled_from([False, False, False, True])):
            return drawn
        name = draw(st.sampled_from(["Nq", "Nk", "B", "Hq", "D", "Dv"]))
        length = draw(st.sampled_from([0, 1]))
        if name == "Hq":
            return drawn._replace(Hq=length, Hkv=length) if axes > 2 else drawn
        if name == "B" and axes < 4:
            return drawn
        return drawn._replace(**{name: length})

    return sizes()


def _arrays(
    draw: "DrawFn",
    rng: np.random.Generator,
    s: _Sizes,
    dtype: np.dtype[Any],
    fills: dict[str, Fill],
) -> list[Array]:
    """Fill q, k, v and dout, in the plain layout."""
    from hypothesis import strategies as st

    fill = fills[draw(st.sampled_from(sorted(fills)))]
    return [
        fill(rng, (s.B, s.Hq, s.Nq, s.D)).astype(dtype),
        fill(rng, (s.B, s.Hkv, s.Nk, s.D)).astype(dtype),
        rng.normal(size=(s.B, s.Hkv, s.Nk, s.Dv)).astype(dtype),
        rng.normal(size=(s.B, s.Hq, s.Nq, s.Dv)).astype(dtype),
    ]


def _poison(
    draw: "DrawFn",
    rng: np.random.Generator,
    arrays: list[Array],
    visible: NDArray[np.bool_],
    options: dict[str, Any],
) -> None:
    """Write NaN and infinities where they are masked out, and NaN into a key that is attended."""
    from hypothesis import strategies as st

    q, k, v, dout = arrays
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
    if k.size and v.size and draw(st.booleans()):
        b, h, j = (int(rng.integers(n)) for n in (B, Hkv, Nk))
        draw(st.sampled_from([k, v]))[b, h, j, 0] = np.nan
