"""What benchmarks/gpu.py times: the problems, and how their work is counted."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.gpu_device import Shapes
from benchmarks.gpu_peers import Mask
from tileattn import BlockMask

PASSES = ("forward", "backward")
HEAD_DIMS, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
SHAPE_LENGTHS: Sequence[int] = (2048, 8192)
WINDOW_LENGTHS: Sequence[int] = (8192, 16384)
TOKENS = 16384  # B N
HIDDEN = {"bf16": 2048, "fp16": 2048, "f32": 2048, "f64": 512}  # H D: float64 N x N must fit


@dataclass(frozen=True)
class Cell:
    """One pass over one problem.

    Parameters
    ----------
    kind : str
        ``forward`` or ``backward``.
    dtype : str
        A name of ``gpu_device.DTYPES``.
    B, H, N, D : int
        Entries, query heads, queries (and as many keys), and the width of a head.
    causal : bool
        Whether keys after a query are hidden.
    Hkv : int, optional
        Heads of keys and values, where they are fewer.
    Dv : int, optional
        Width of the values, where it is another.
    window : int, optional
        Keys that a query sees around it, or where causal up to it.
    """

    kind: str
    dtype: str
    B: int
    H: int
    N: int
    D: int
    causal: bool
    Hkv: int | None = None
    Dv: int | None = None
    window: int | None = None

    @property
    def shapes(self) -> Shapes:
        """Shapes of q, k, v and of the output."""
        heads, width = self.Hkv or self.H, self.Dv or self.D
        return (
            (self.B, self.H, self.N, self.D),
            (self.B, heads, self.N, self.D),
            (self.B, heads, self.N, width),
            (self.B, self.H, self.N, width),
        )

    @property
    def mask(self) -> Mask:
        """What is seen."""
        if self.window is None:
            return Mask(self.causal)
        right = 0 if self.causal else (self.window - 1) // 2
        return Mask(self.causal, (self.window - 1 - right, right))

    @property
    def share(self) -> float:
        """Share of the pairs that is counted as seen."""
        _, window = self.mask
        return window_share(self.N, *window) if window else 0.5 if self.causal else 1.0

    @property
    def flops(self) -> float:
        """Operations as the papers count them; under a window, those of the pairs that it shows."""
        forward = 2 * self.B * self.H * self.N**2 * (self.D + (self.Dv or self.D)) * self.share
        return forward * (2.5 if self.kind == "backward" else 1.0)

    def row(self) -> dict[str, Any]:
        """Fields as they stand in the results; what is as always is left out."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return {"pass": fields.pop("kind"), **fields}


def cells_of(
    dtypes: Iterable[str],
    head_dims: Iterable[int],
    lengths: Iterable[int],
    passes: Iterable[str],
    causals: Iterable[bool],
) -> list[Cell]:
    """All combinations; those that share their inputs stand together."""
    return [
        Cell(kind, dtype, max(1, TOKENS // N), max(1, HIDDEN[dtype] // D), N, D, causal)
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
) -> Iterator[tuple[str, Cell]]:
    """Problems that are not those of the grid, with their names."""
    for group in (4, 8):
        for cell in cells_of(dtypes, (128,), lengths, passes, causals):
            heads = max(1, cell.H // group)
            yield f"GQA {group}:1", replace(cell, H=group * heads, Hkv=heads)
    for cell in cells_of(dtypes, (192,), lengths, passes, causals):
        yield "D 192, Dv 128", replace(cell, Dv=128)
    for cell in cells_of(dtypes, (128,), windowed, passes, causals):
        yield "window of 1024", replace(cell, window=1024)


def window_share(N: int, left: int, right: int) -> float:
    """Share of the pairs that a window shows."""
    i = np.arange(N)
    return float((np.minimum(i + right, N - 1) - np.maximum(i - left, 0) + 1).sum() / N**2)


def random_blocks(N: int, share: float) -> BlockMask:
    """Mask that shows about a share of the blocks of 128 queries and 128 keys, drawn at random."""
    side = -(-N // 128)
    count = max(1, math.ceil(share * side**2 - 1e-9))  # a tenth of 100 is 10, whatever floats say
    blocks = np.zeros(side**2, bool)
    blocks[np.random.default_rng(0).choice(side**2, count, replace=False)] = True
    return BlockMask(blocks.reshape(side, side), (128, 128))
