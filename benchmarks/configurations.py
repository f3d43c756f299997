"""Configurations of attention to measure, and their FLOPs."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tileattn import BlockMask

DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
PASSES = ("forward", "backward")
HEAD_DIMS, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
SHAPE_LENGTHS: Sequence[int] = (2048, 8192)
WINDOW_LENGTHS: Sequence[int] = (8192, 16384)
TOKENS = 16384  # B N
HIDDEN = {"bf16": 2048, "fp16": 2048, "f32": 2048, "f64": 512}  # H D: float64 N x N must fit

Call = Callable[[], Any]
Shapes = tuple[tuple[int, ...], ...]  # in the order of the Inputs


class Inputs(NamedTuple):
    """One set of arrays, each of four axes: (B, H, N, D) and the like."""

    q: Any
    k: Any
    v: Any
    dout: Any


class Mask(NamedTuple):
    """The options ``causal`` and ``window`` of tileattn."""

    causal: bool
    window: tuple[int, int] | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of a call, without defaults."""
        window = {} if self.window is None else {"window": self.window}
        return {"causal": self.causal, **window}


@dataclass(frozen=True)
class Configuration:
    """One pass over one problem."""

    kind: str  # forward, backward, or both: forward and then backward
    dtype: str  # a name of DTYPES
    B: int
    H: int  # query heads
    N: int  # queries, and keys
    D: int
    causal: bool = False
    Hkv: int | None = None  # if fewer than H
    Dv: int | None = None  # if not D
    window: int | None = None  # keys that a query attends to: around it, or up to it if causal

    @property
    def shapes(self) -> Shapes:
        heads, Dv = self.Hkv or self.H, self.Dv or self.D
        return (
            (self.B, self.H, self.N, self.D),
            (self.B, heads, self.N, self.D),
            (self.B, heads, self.N, Dv),
            (self.B, self.H, self.N, Dv),
        )

    @property
    def mask(self) -> Mask:
        if self.window is None:
            return Mask(self.causal)
        right = 0 if self.causal else (self.window - 1) // 2
        return Mask(self.causal, (self.window - 1 - right, right))

    @property
    def density(self) -> float:
        """Return the part of the N x N scores that is counted: half of them if causal."""
        _, window = self.mask
        return window_density(self.N, *window) if window else 0.5 if self.causal else 1.0

    @property
    def flops(self) -> float:
        """Return the FLOPs of a pass as the papers count them; with a window, those inside it."""
        forward = 2 * self.B * self.H * self.N**2 * (self.D + (self.Dv or self.D)) * self.density
        return forward * (2.5 if self.kind == "backward" else 1.0)

    def row(self) -> dict[str, Any]:
        """Return the fields for the results, without defaults."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return {"pass": fields.pop("kind"), **fields}


def grid_of(
    dtypes: Iterable[str],
    head_dims: Iterable[int],
    lengths: Iterable[int],
    passes: Iterable[str],
    causals: Iterable[bool],
) -> list[Configuration]:
    """Return all combinations, grouped by their inputs."""
    return [
        Configuration(kind, dtype, max(1, TOKENS // N), max(1, HIDDEN[dtype] // D), N, D, causal)
        for dtype, D, N, kind, causal in itertools.product(
            dtypes, head_dims, lengths, passes, causals
        )
    ]


def shapes_of(
    dtypes: Sequence[str],
    lengths: Sequence[int],
    windowed: Sequence[int],
    passes: Sequence[str],
    causals: Sequence[bool],
) -> Iterator[tuple[str, Configuration]]:
    """Yield named configurations outside the grid: GQA, another Dv, a window."""
    for group in (4, 8):
        for one in grid_of(dtypes, (128,), lengths, passes, causals):
            heads = max(1, one.H // group)
            yield f"GQA {group}:1", replace(one, H=group * heads, Hkv=heads)
    for one in grid_of(dtypes, (192,), lengths, passes, causals):
        yield "D 192, Dv 128", replace(one, Dv=128)
    for one in grid_of(dtypes, (128,), windowed, passes, causals):
        yield "window of 1024", replace(one, window=1024)


def window_density(N: int, left: int, right: int) -> float:
    """Return the part of the N x N scores inside a window."""
    i = np.arange(N)
    return float((np.minimum(i + right, N - 1) - np.maximum(i - left, 0) + 1).sum() / N**2)


def random_blocks(N: int, density: float) -> BlockMask:
    """Return a mask of about this density, of random full blocks of 128 x 128."""
    side = -(-N // 128)
    count = max(1, math.ceil(density * side**2 - 1e-9))  # a tenth of 100 is 10, despite rounding
    blocks = np.zeros(side**2, bool)
    blocks[np.random.default_rng(0).choice(side**2, count, replace=False)] = True
    return BlockMask(blocks.reshape(side, side), (128, 128))


def sparse_cases(N: int) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield masks of falling density: name, options, density."""
    W = N // 16  # 1024 of 16384
    yield "full", {}, 1.0
    for name, (left, right) in {
        "causal": (N - 1, 0),
        f"window of {W}": (W // 2, W // 2 - 1),
        f"causal window of {W}": (W - 1, 0),
    }.items():
        yield name, {"window": (left, right)}, window_density(N, left, right)
    mask = random_blocks(N, 0.1)
    yield "a tenth of the blocks", {"block_mask": mask}, mask.density


def option_cases(c: Configuration, xp: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return functions that make one option each; dense arrays are full, or broadcast over axes."""

    def bias(B: int) -> dict[str, Any]:
        values = normal(xp, (1, c.H, c.N, c.N), c.dtype)
        return {"bias": xp.broadcast_to(values, (B, *values.shape[1:])).copy()}

    def mask(B: int, H: int) -> dict[str, Any]:
        attended = normal(xp, (1, 1, c.N, c.N), "f32") > -1
        return {"mask": xp.broadcast_to(attended, (B, H, c.N, c.N)).copy()}

    slopes = xp.linspace(0.01, 0.5, c.H, dtype=np.float32)
    return {
        "plain": dict,
        "bias": partial(bias, c.B),
        "bias, one for the batch": partial(bias, 1),
        "mask": partial(mask, c.B, c.H),
        "mask, one for all heads": partial(mask, 1, 1),
        "alibi_slopes": lambda: {"alibi_slopes": slopes},
        "softcap": lambda: {"softcap": 20.0},
        "dropout": lambda: {"dropout_p": 0.1, "seed": 1},
        "sinks": lambda: {"sinks": normal(xp, (c.H,), "f32")},
    }


def normal(xp: Any, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Return standard-normal values of NumPy or CuPy; 16-bit types are rounded from float32."""
    drawn = np.float64 if dtype == "f64" else np.float32
    values = xp.random.default_rng(seed).standard_normal(shape, dtype=drawn)
    return values.astype(DTYPES[dtype], copy=False)


def draw(xp: Any, shapes: Shapes, dtype: str, seed: int = 0) -> Inputs:
    """Return one set of arrays, each with its own seed."""
    return Inputs(*(normal(xp, shape, dtype, seed + i) for i, shape in enumerate(shapes)))
