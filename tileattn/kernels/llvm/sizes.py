"""Sizes of the tiles of each kernel, and the bytes of scratch memory that they take."""

from typing import Any

import numpy as np

from tileattn.kernels.llvm.target import Target

ROWS = 64
"""Queries of a tile of the backward pass."""

BLOCK = 128
"""Rows of a block of a transposed array; those of a tile lie in one block."""

TERMS, PAIR = 32, 4
"""Terms that a dot product of bfloat16 is filled up to, and bytes of a pair of numbers."""

DECODE_ROWS, DECODE_KEYS = 16, 128
"""Rows and keys of a tile of the decoding kernel."""

KEEP_SPARE = 32
"""Rows of bits besides those of a tile: dropout counts whole squares of 16 x 16 pairs."""

SPLIT = 1024
"""Keys of a split of the decoding kernel."""

SECTION = 4096
"""Keys, or queries, that are summed up before the sum joins that of all; whole tiles."""

ROW_FACTS = 7
"""Rows of numbers that a forward task keeps of its queries; a position takes two of them."""


def padded(target: Target, size: int, D: int) -> int:
    """Count the columns of a row that takes whole vectors."""
    lanes = target.vector_bytes // size
    return -(-D // lanes) * lanes


def few_queries(group: int) -> int:
    """Give the most queries of a sequence that the decoding kernel takes, by heads of a group.

    From half of its rows on, it pays only where key heads are few: other kernels do not split their
    keys.
    """
    return (DECODE_ROWS if group > 1 else DECODE_ROWS // 2) // max(1, group)


def state_bytes(target: Target, size: int, Dv: int) -> int:
    """Count the bytes that the decoding kernel keeps of a row: m, l and a sum of values."""
    return 2 * target.vector_bytes + size * padded(target, size, Dv)


def scratch_bytes(
    name: str, target: Target, dtype: np.dtype[Any], accum_dtype: np.dtype[Any], D: int, Dv: int,
    *, learned: int = 0, paged: bool = False,
) -> int:  # fmt: skip
    """Count the scratch memory of a worker, as the kernels hand it out.

    ``learned`` is how many elements of the caller's arrays a pair reads, and ``paged`` whether keys
    are in pages.
    """
    size, width = accum_dtype.itemsize, target.width(accum_dtype.itemsize)
    if name == "decode":
        vectors = DECODE_KEYS * size // target.vector_bytes
        sums, words = 2 * DECODE_KEYS + padded(target, size, D), 8 * 2 * vectors
        rows = DECODE_KEYS * (D + Dv) if paged else 0
        states = state_bytes(target, size, Dv)
        return DECODE_ROWS * (size * sums + words + states) + size * rows
    if name == "forward":
        words = 8 * (2 * target.keys + KEEP_SPARE)
        common = 4 + ROW_FACTS + 3 * target.keys + 8 // size + 4 + 2 * Dv
    else:
        words, common = 8 * (2 * ROWS + KEEP_SPARE), 5 * ROWS + 5 + learned * ROWS * (1 + 8 // size)
        common += 2 * (D + Dv)
    if target.bf16:
        return words + size * common * width + _bf16_bytes(name, target, D, Dv)
    if name == "forward":
        tiles, copied = D + Dv, paged or dtype != accum_dtype
        rows = target.keys * (D + Dv) if copied else 0
    else:
        tiles, rows = 2 * (D + Dv), ROWS * (D + Dv) + width * padded(target, size, D)
    return words + size * ((common + tiles) * width + rows)


def _bf16_bytes(name: str, target: Target, D: int, Dv: int) -> int:
    """Count the scratch memory for operands in bfloat16, and for their sums."""
    width, (D, Dv) = target.width(4), (-(-n // TERMS) * TERMS for n in (D, Dv))
    if name == "forward":
        tiles, rows = D // 2 + Dv + target.keys // 2, 2 * (width + target.keys) * D
    else:
        tiles = (D + Dv) // 2 + D + Dv + ROWS
        rows = 2 * ROWS * (D + Dv) + 2 * width * max(D, Dv) + 4 * (width // 2 + ROWS) * D
    return max(4 * tiles * width + rows, PAIR * BLOCK // 2 * max(D, Dv))
