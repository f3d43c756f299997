"""Sizes of the tiles of each kernel, and the bytes of scratch memory that they take."""

from typing import Any

import numpy as np

from tileattn.kernels.llvm.target import Target

ROWS = 64
"""Queries of a tile of the backward pass."""

BLOCK = 128
"""Rows of a block of a transposed array; a tile lies in one block."""

TERMS, PAIR = 32, 4
"""Terms to which a bfloat16 dot product is padded with 0, and bytes of a pair of elements."""

DECODE_ROWS, DECODE_KEYS = 16, 128
"""Rows and keys of a tile of the decoding kernel."""

LISTED_AHEAD = 32
"""Distance, in rows of quantised keys, from a row that is read to the row that is prefetched."""

KEEP_SPARE = 32
"""Extra rows of bits beside a tile: dropout generates whole squares of 16 x 16 pairs."""

SPLIT = 1024
"""Keys of a split of the decoding kernel."""

SECTION = 4096
"""Keys, or queries, of a plain float32 sum, before it is added to the compensated total."""

ROW_FACTS = 7
"""Numbers that a forward task keeps of each query; a position takes two."""


def padded(target: Target, size: int, D: int) -> int:
    """Round D columns up to whole vectors."""
    lanes = target.vector_bytes // size
    return -(-D // lanes) * lanes


def few_queries(group: int) -> int:
    """Return the most queries per sequence that the decoding kernel takes, given the GQA group.

    Above half of its rows, it pays only for few key heads: other kernels do not split the keys.
    """
    return (DECODE_ROWS if group > 1 else DECODE_ROWS // 2) // max(1, group)


def state_bytes(target: Target, size: int, Dv: int) -> int:
    """Return the bytes of a row's softmax state in the decoding kernel: m, l and acc."""
    return 2 * target.vector_bytes + size * padded(target, size, Dv)


def scratch_bytes(
    name: str, target: Target, dtype: np.dtype[Any], accum_dtype: np.dtype[Any], D: int, Dv: int,
    *, learned: int = 0, paged: bool = False, quantised: bool = False,
) -> int:  # fmt: skip
    """Return the bytes of scratch memory of a worker, as the kernels hand it out.

    ``learned`` counts the differentiable elements of ``aux`` that a pair reads; ``paged`` and
    ``quantised`` are True for such keys and values.
    """
    size, width = accum_dtype.itemsize, target.width(accum_dtype.itemsize)
    if name == "decode":
        vectors = DECODE_KEYS * size // target.vector_bytes
        sums, words = 2 * DECODE_KEYS + padded(target, size, D), 8 * 2 * vectors
        rows = size * DECODE_KEYS * (D + Dv) if paged else 0
        rows = 2 * 8 * (DECODE_KEYS + LISTED_AHEAD) if quantised else rows
        states = state_bytes(target, size, Dv)
        return DECODE_ROWS * (size * sums + words + states) + rows
    if name == "forward":
        words = 8 * (2 * target.keys + KEEP_SPARE)
        common = 4 + ROW_FACTS + 3 * target.keys + 8 // size + 4 + 2 * Dv
    else:
        words, common = 8 * (2 * ROWS + KEEP_SPARE), 5 * ROWS + 5 + learned * ROWS * (1 + 8 // size)
        common += 2 * (D + Dv)
    if target.bf16:
        return words + size * common * width + _bf16_bytes(name, target, D, Dv)
    if name == "forward":
        tiles = D + Dv
        rows = target.keys * tiles if paged or quantised or dtype != accum_dtype else 0
    else:
        tiles, rows = 2 * (D + Dv), ROWS * (D + Dv) + width * padded(target, size, D)
    return words + size * ((common + tiles) * width + rows)


def _bf16_bytes(name: str, target: Target, D: int, Dv: int) -> int:
    """Return the bytes of scratch memory for bfloat16 operands and their sums."""
    width, (D, Dv) = target.width(4), (-(-n // TERMS) * TERMS for n in (D, Dv))
    if name == "forward":
        tiles, rows = D // 2 + Dv + target.keys // 2, 2 * (width + target.keys) * D
    else:
        tiles = (D + Dv) // 2 + D + Dv + ROWS
        rows = 2 * ROWS * (D + Dv) + 2 * width * max(D, Dv) + 4 * (width // 2 + ROWS) * D
    return max(4 * tiles * width + rows, PAIR * BLOCK // 2 * max(D, Dv))
