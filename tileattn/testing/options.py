"""Draw random values of each option of a call.

Every function takes `Choices`, the shape ``(B, Hq, Nq, Nk)`` and the dtype of the arrays. Values
that Hypothesis should shrink are choices; others come from ``choices.rng``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.call.block_mask import BlockMask
from tileattn.testing.arrays import largest

Array = NDArray[Any]
Shape = tuple[int, int, int, int]


class Choices:
    """Makes random choices with a generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def integer(self, low: int, high: int) -> int:
        """Choose one of ``low``, ..., ``high``."""
        return low + int(self.rng.integers(high - low, dtype=np.uint64, endpoint=True))

    def one_of(self, *values: Any) -> Any:
        """Choose one of some values."""
        return values[self.integer(0, len(values) - 1)]

    def coin(self) -> bool:
        """Choose False or True."""
        return bool(self.one_of(False, True))


Draw = Callable[[Choices, Shape, np.dtype[Any]], Any]


def _one_of(*values: Any) -> Draw:
    return lambda choices, _shape, _dtype: choices.one_of(*values)


def _alibi_slopes(choices: Choices, shape: Shape, _dtype: Any) -> Array:
    B, Hq = shape[:2]
    size = choices.one_of((Hq,), (B, Hq))
    return np.asarray(choices.rng.uniform(0.01, 0.5, size), np.float32)


def _broadcast_shape(choices: Choices, shape: Shape) -> tuple[int, ...]:
    """Draw a shape that broadcasts to ``shape``: axes of length 1, leading axes left out."""
    kept = [n if choices.coin() else 1 for n in shape]
    while kept and kept[0] == 1 and choices.coin():
        del kept[0]
    return tuple(kept)


def _bias(choices: Choices, shape: Shape, dtype: np.dtype[Any]) -> Array:
    bias = np.asarray(choices.rng.normal(size=_broadcast_shape(choices, shape)))
    if choices.coin():
        bias = np.where(choices.rng.random(bias.shape) < 0.2, -np.inf, bias)
    return np.asarray(bias, choices.one_of(dtype, np.dtype(np.float32), np.dtype(np.float64)))


def _window(choices: Choices, shape: Shape, _dtype: Any) -> tuple[int | None, int | None]:
    left, right = (
        choices.one_of(None, choices.one_of(0, 1, 3, 8), choices.integer(0, shape[3] + 2))
        for _ in range(2)
    )
    return left, right


def _mask(choices: Choices, shape: Shape, _dtype: Any) -> Array:
    density = choices.one_of(0.0, 0.1, 0.6, 0.95, 1.0)
    return np.asarray(choices.rng.random(_broadcast_shape(choices, shape)) < density)


def _block_mask(choices: Choices, shape: Shape, _dtype: Any) -> Any:
    B, Hq, Nq, Nk = shape
    size = choices.one_of((16, 8), (7, 5), (32, 32), (128, 128))
    lead = choices.one_of((B, Hq), (1, Hq), (B, 1), (1, 1))
    kind = choices.one_of("blocks", "mask", "predicate")
    if kind == "blocks":
        blocks = choices.rng.random((*lead, -(-Nq // size[0]), -(-Nk // size[1]))) < 0.6
        return BlockMask(blocks, block_size=size)
    if kind == "mask":
        return BlockMask.from_mask(choices.rng.random((*lead, Nq, Nk)) < 0.6, block_size=size)
    stride = choices.integer(2, 20)
    return BlockMask.from_predicate(
        lambda b, h, i, j: (i - j + h + b) % stride < (stride + 1) // 2,
        shape=(*lead, Nq, Nk),
        block_size=size,
    )


def _kv_lengths(choices: Choices, shape: Shape, _dtype: Any) -> Any:
    B, Nk = shape[0], shape[3]
    lengths = choices.rng.integers(0, Nk + 1, size=B)
    if B and choices.coin():
        lengths[0] = choices.one_of(0, min(1, Nk), Nk)
    return lengths.astype(choices.one_of(np.int64, np.int32))


def _q_offset(choices: Choices, shape: Shape, _dtype: Any) -> Any:
    B, _, Nq, Nk = shape
    low, high = -Nq - 2, Nk + 3
    if choices.coin():
        return choices.one_of(0, choices.integer(low, high))
    return choices.rng.integers(low, high, size=B)


def _sinks(choices: Choices, shape: Shape, dtype: np.dtype[Any]) -> Array:
    sinks = choices.rng.normal(size=shape[1]) * choices.one_of(1.0, 20.0)
    if shape[1] and choices.coin():
        sinks[0] = -np.inf
    return np.asarray(sinks, choices.one_of(dtype, np.dtype(np.float32)))


def _tree_mask(choices: Choices, shape: Shape, _dtype: Any) -> Array:
    """Draw the ancestors of each node of random trees, or any booleans."""
    B, _, Nq, _ = shape
    trees = choices.one_of(1, B)
    if choices.coin():
        return np.asarray(choices.rng.random((trees, Nq, Nq)) < 0.6)
    mask = np.zeros((trees, Nq, Nq), np.bool_)
    for tree in mask:
        for node in range(Nq):
            parent = choices.rng.integers(-1, node)
            tree[node] = tree[parent] if parent >= 0 else False
            tree[node, node] = True
    return mask


def _prefix(choices: Choices, shape: Shape, _dtype: Any) -> Any:
    B, Nk = shape[0], shape[3]
    if choices.coin():
        return choices.integer(0, Nk + 3)
    return choices.rng.integers(0, Nk + 4, size=B)


def _seed(choices: Choices, _shape: Shape, _dtype: Any) -> int:
    return choices.integer(0, 2**64 - 1)


def _origin(choices: Choices, shape: Shape, _dtype: Any) -> Any:
    # Heads and queries near 0, so that indices of functions stay close to their arrays.
    high = (3, 3, 70, 70)
    if choices.coin():
        return tuple(choices.integer(0, n) for n in high)
    return choices.rng.integers(0, high, (shape[0], 4))


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
    "tree_mask": _tree_mask,
    "prefix": _prefix,
    "origin": _origin,
    "invariant": _one_of(True, False),
}
"""The function that draws each option."""


# --- near the ends of the dtypes ----------------------------------------------------------------


def _lowest(kind: np.dtype[Any], dtype: np.dtype[Any]) -> float:
    """Return the lowest number that sums of a call can hold, and whose square the bounds can."""
    return -min(largest(kind), 1e100 if dtype == np.float64 else largest(np.dtype(np.float32)))


def _additive_mask(choices: Choices, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Draw an additive mask of a large number, as model libraries use: rows, keys, pairs or all."""
    kind = choices.one_of(dtype, np.dtype(np.float32), np.dtype(np.float64))
    lowest = _lowest(kind, dtype)
    value = max(choices.one_of(-1e4, -1e9, lowest), lowest)
    masked = choices.rng.random(_broadcast_shape(choices, shape)) < choices.one_of(0.1, 0.5, 1.0)
    shown = choices.rng.normal(size=masked.shape) if choices.coin() else 0.0
    return np.where(masked, value, shown).astype(kind)


def _far_window(choices: Choices, _shape: Shape, _dtype: Any) -> tuple[int | None, int | None]:
    reach = None, 0, 3, 2**60, 2**63 - 1
    return choices.one_of(*reach), choices.one_of(*reach)


def _far_offset(choices: Choices, shape: Shape, _dtype: Any) -> Any:
    far = [0, 3, 2**60, 2**60 - 5, -(2**60), 5 - 2**60]
    return choices.one_of(*far) if choices.coin() else choices.rng.choice(far, size=shape[0])


def _extreme_sinks(choices: Choices, shape: Shape, dtype: np.dtype[Any]) -> Array:
    kind = choices.one_of(dtype, np.dtype(np.float32))
    lowest = _lowest(kind, dtype)
    values = [0.5, 1e4, -1e4, max(-1e9, lowest), lowest, -np.inf, np.inf]
    return choices.rng.choice(values, size=shape[1]).astype(kind)


EXTREMES: dict[str, Draw] = DRAW | {
    "softcap": _one_of(1e-45, 1e-40, 1e-20, 1e-3, 1.0, 30.0, 1e4, 1e20, 1e38, 1e39),
    "bias": _additive_mask,
    "window": _far_window,
    "q_offset": _far_offset,
    "sinks": _extreme_sinks,
}
"""The same, with values near the limits of the dtypes for options that have a size."""
