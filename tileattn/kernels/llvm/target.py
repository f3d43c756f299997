"""What a CPU can do: the width of its vectors, and the register block of a matrix product."""

from dataclasses import dataclass
from typing import Any

import numpy as np

KEYS, ROWS = 64, 64
"""Keys of a tile of the forward pass, and queries of a tile of the backward pass."""

ROW_FACTS = 7
"""Rows of numbers that a forward task keeps of its queries; a position takes two of them."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of CPU, told by its features.

    Parameters
    ----------
    name : str
        For messages.
    triple : str
        LLVM's name of the platform; empty for this machine's.
    cpu, features : str
        What LLVM generates code for.
    vector_bytes : int
        Bytes of a vector register.
    rows, vectors : int
        A matrix product keeps ``rows * vectors`` sums in registers.
    scalef : bool
        Whether one instruction multiplies by a power of two (AVX-512).
    fma : bool
        Whether there is a fused multiply-add.
    half : bool
        Whether instructions convert float16.
    """

    name: str
    triple: str
    cpu: str
    features: str
    vector_bytes: int
    rows: int
    vectors: int
    scalef: bool = False
    fma: bool = True
    half: bool = True

    def width(self, size: int) -> int:
        """Count the columns of a tile of sums of this size: rows forward, keys backward."""
        return self.vectors * self.vector_bytes // size


AVX512 = Target(
    "AVX-512",
    "x86_64-unknown-linux-gnu",
    "x86-64-v4",
    "-prefer-256-bit",
    vector_bytes=64,
    rows=8,
    vectors=3,
    scalef=True,
)
AVX2 = Target("AVX2", "x86_64-unknown-linux-gnu", "x86-64-v3", "", 32, rows=4, vectors=3)
NEON = Target("NEON", "aarch64-unknown-linux-gnu", "generic", "+neon", 16, rows=8, vectors=3)
GENERIC = Target(
    "generic",
    "x86_64-unknown-linux-gnu",
    "x86-64",
    "",
    vector_bytes=16,
    rows=4,
    vectors=2,
    fma=False,
    half=False,
)


def padded(target: Target, size: int, D: int) -> int:
    """Count the columns of a row of dQ's sum: whole vectors."""
    lanes = target.vector_bytes // size
    return -(-D // lanes) * lanes


def scratch_bytes(
    name: str, target: Target, dtype: np.dtype[Any], accum_dtype: np.dtype[Any], D: int, Dv: int
) -> int:
    """Count the scratch memory of a worker, as the kernels hand it out."""
    size, width = accum_dtype.itemsize, target.width(accum_dtype.itemsize)
    if name == "forward":
        tiles = 4 + ROW_FACTS + 3 * KEYS + KEYS + 16 + D + Dv
        rows = 0 if dtype == accum_dtype else KEYS * (D + Dv)
    else:
        tiles = 2 * (D + Dv) + 6 * ROWS + 2
        rows = ROWS * (D + Dv) + width * padded(target, size, D)
    return size * (tiles * width + rows)
