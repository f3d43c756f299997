"""How each option of a call is drawn.

Every function takes ``draw``, a random generator for the contents of arrays, the shape
``(B, Hq, Nq, Nk)`` and the dtype of the arrays. What Hypothesis should shrink is drawn; what it
need not is random.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.block_mask import BlockMask
from tileattn.testing.arrays import largest

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

Array = NDArray[Any]
Shape = tuple[int, int, int, int]
Draw = Callable[["DrawFn", np.random.Generator, Shape, np.dtype[Any]], Any]


def _pick(draw: "DrawFn", *values: Any) -> Any:
    from hypothesis import strategies as st

    return draw(st.sampled_from(values))


def _integer(draw: "DrawFn", low: int, high: int) -> int:
    from hypothesis import strategies as st

    return draw(st.integers(low, high))


def _coin(draw: "DrawFn") -> bool:
    from hypothesis import strategies as st

    return draw(st.booleans())


def _one_of(*values: Any) -> Draw:
    return lambda draw, _rng, _shape, _dtype: _pick(draw, *values)


def _alibi_slopes(draw: "DrawFn", rng: np.random.Generator, shape: Shape, _dtype: Any) -> Array:
    B, Hq = shape[:2]
    size = _pick(draw, (Hq,), (B, Hq))
    return np.asarray(rng.uniform(0.01, 0.5, size), np.float32)


def _broadcast_shape(draw: "DrawFn", shape: Shape) -> tuple[int, ...]:
    """Any shape that broadcasts to ``shape``: axes of length 1, leading axes left out."""
    kept = [n if _coin(draw) else 1 for n in shape]
    while kept and kept[0] == 1 and _coin(draw):
        del kept[0]
    return tuple(kept)


def _bias(draw: "DrawFn", rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Array:
    bias = np.asarray(rng.normal(size=_broadcast_shape(draw, shape)))
    if _coin(draw):
        bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
    return np.asarray(bias, _pick(draw, dtype, np.dtype(np.float32), np.dtype(np.float64)))


def _window(
    draw: "DrawFn", _rng: np.random.Generator, shape: Shape, _dtype: Any
) -> tuple[int | None, int | None]:
    from hypothesis import strategies as st

    reach = st.none() | st.sampled_from([0, 1, 3, 8]) | st.integers(0, shape[3] + 2)
    return draw(reach), draw(reach)


def _mask(draw: "DrawFn", rng: np.random.Generator, shape: Shape, _dtype: Any) -> Array:
    density = _pick(draw, 0.0, 0.1, 0.6, 0.95, 1.0)
    return np.asarray(rng.random(_broadcast_shape(draw, shape)) < density)


def _block_mask(draw: "DrawFn", rng: np.random.Generator, shape: Shape, _dtype: Any) -> Any:
    B, Hq, Nq, Nk = shape
    size = _pick(draw, (16, 8), (7, 5), (32, 32), (128, 128))
    lead = _pick(draw, (B, Hq), (1, Hq), (B, 1), (1, 1))
    kind = _pick(draw, "blocks", "mask", "predicate")
    if kind == "blocks":
        blocks = rng.random((*lead, -(-Nq // size[0]), -(-Nk // size[1]))) < 0.6
        return BlockMask(blocks, block_size=size)
    if kind == "mask":
        return BlockMask.from_mask(rng.random((*lead, Nq, Nk)) < 0.6, block_size=size)
    stride = _integer(draw, 2, 20)
    return BlockMask.from_predicate(
        lambda b, h, i, j: (i - j + h + b) % stride < (stride + 1) // 2,
        shape=(*lead, Nq, Nk),
        block_size=size,
    )


def _kv_lengths(draw: "DrawFn", rng: np.random.Generator, shape: Shape, _dtype: Any) -> Any:
    B, Nk = shape[0], shape[3]
    lengths = rng.integers(0, Nk + 1, size=B)
    if B and _coin(draw):
        lengths[0] = _pick(draw, 0, min(1, Nk), Nk)
    return lengths.astype(_pick(draw, np.int64, np.int32))


def _q_offset(draw: "DrawFn", rng: np.random.Generator, shape: Shape, _dtype: Any) -> Any:
    B, _, Nq, Nk = shape
    low, high = -Nq - 2, Nk + 3
    if _coin(draw):
        from hypothesis import strategies as st

        return draw(st.just(0) | st.integers(low, high))
    return rng.integers(low, high, size=B)


def _sinks(draw: "DrawFn", rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Array:
    sinks = rng.normal(size=shape[1]) * _pick(draw, 1.0, 20.0)
    if shape[1] and _coin(draw):
        sinks[0] = -np.inf
    return np.asarray(sinks, _pick(draw, dtype, np.dtype(np.float32)))


def _seed(draw: "DrawFn", _rng: np.random.Generator, _shape: Shape, _dtype: Any) -> int:
    return _integer(draw, 0, 2**64 - 1)


DRAW: dict[str, Draw] = {
    "scale": _one_of(0.125, 1.0, 0.3, -0.2, 0.0),
    "softcap": _one_of(15.0, 2.0, 50.0),
    "alibi_slopes": _alibi_slopes,
    "bias": _bias,
    "causal": _one_of(True, False),
    "window": _window,
    "mask": _mask,
    "block_mask": _block_mask,
    "kv_lengths": _kv_lengths,
    "q_offset": _q_offset,
    "sinks": _sinks,
    "dropout_p": _one_of(0.1, 0.5, 0.9, 0.0),
    "seed": _seed,
}
"""By name of the option: the function that draws it."""


# --- near the ends of the dtypes ----------------------------------------------------------------


def _lowest(kind: np.dtype[Any], dtype: np.dtype[Any]) -> float:
    """Lowest number of a dtype that sums of a call hold, and whose square the bounds hold."""
    return -min(largest(kind), 1e100 if dtype == np.float64 else largest(np.dtype(np.float32)))


def _additive_mask(
    draw: "DrawFn", rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]
) -> Array:
    """Mask by a large number, as libraries of models do: whole rows, whole keys, pairs or all."""
    kind = _pick(draw, dtype, np.dtype(np.float32), np.dtype(np.float64))
    lowest = _lowest(kind, dtype)
    value = max(_pick(draw, -1e4, -1e9, lowest), lowest)
    masked = rng.random(_broadcast_shape(draw, shape)) < _pick(draw, 0.1, 0.5, 1.0)
    shown = rng.normal(size=masked.shape) if _coin(draw) else 0.0
    return np.where(masked, value, shown).astype(kind)


def _far_window(
    draw: "DrawFn", _rng: np.random.Generator, _shape: Shape, _dtype: Any
) -> tuple[int | None, int | None]:
    reach = None, 0, 3, 2**60, 2**63 - 1
    return _pick(draw, *reach), _pick(draw, *reach)


def _far_offset(draw: "DrawFn", rng: np.random.Generator, shape: Shape, _dtype: Any) -> Any:
    far = [0, 3, 2**60, 2**60 - 5, -(2**60), 5 - 2**60]
    return _pick(draw, *far) if _coin(draw) else rng.choice(far, size=shape[0])


def _extreme_sinks(
    draw: "DrawFn", rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]
) -> Array:
    kind = _pick(draw, dtype, np.dtype(np.float32))
    lowest = _lowest(kind, dtype)
    values = [0.5, 1e4, -1e4, max(-1e9, lowest), lowest, -np.inf, np.inf]
    return rng.choice(values, size=shape[1]).astype(kind)


EXTREMES: dict[str, Draw] = DRAW | {
    "softcap": _one_of(1e-45, 1e-40, 1e-20, 1e-3, 1.0, 30.0, 1e4, 1e20, 1e38, 1e39),
    "bias": _additive_mask,
    "window": _far_window,
    "q_offset": _far_offset,
    "sinks": _extreme_sinks,
}
"""The same, with values near the ends of the dtypes where an option has a size."""
