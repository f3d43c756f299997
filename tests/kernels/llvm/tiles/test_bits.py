"""Bits of pairs: packed from booleans of every length and stride, transposed and moved."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

from tests.kernels.llvm.emitted import call, on_targets
from tileattn.kernels.llvm.instructions.code import I16, I64, Code, i64
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.tiles.bits import Bits, packed, put_column, transpose_bits
from tileattn.kernels.llvm.tiles.tile import Tile


@pytest.mark.parametrize("step", [0, 1, 3])
@on_targets
def test_booleans_are_packed(target: Target, step: int) -> None:
    counts = np.arange(1, 65)
    given = np.random.default_rng(step).integers(-2, 3, (64, 64 * max(1, step))).astype(np.int8)
    found = np.zeros(64, np.uint64)

    def body(c: Code, source: Any, to: Any, width: Any) -> None:
        def row(n: Any, _: Any) -> None:
            start, count = c.at(source, c.b.mul(n, width)), c.b.add(n, i64(1))
            c.store(packed(c, start, i64(step), count), c.at(to, c.b.mul(n, i64(8))))

        c.loop(i64(0), i64(64), row)

    call(target, "float32", body, given, found, given.shape[1])
    for count, row, bits in zip(counts, given, found, strict=True):
        seen = row[np.arange(count) * step] != 0
        assert [bool(int(bits) >> n & 1) for n in range(count)] == seen.tolist()


@pytest.mark.parametrize("rows", [1, 31, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@on_targets
def test_bits_of_lanes_become_bits_of_rows(target: Target, dtype: str, rows: int) -> None:
    vectors, size = 2, np.dtype(dtype).itemsize
    lanes = vectors * target.vector_bytes // size
    given = np.random.default_rng(rows).integers(0, 1 << 63, lanes).astype(np.uint64)
    words, found = np.zeros(lanes * 8, np.uint8), np.full(64, 7, np.uint64)

    def body(c: Code, source: Any, words: Any, to: Any, n: Any) -> None:
        tile = Tile(c, words, vectors)

        def lane(i: Any, _: Any) -> None:
            put_column(c, tile, i, c.load(c.row(source, i64(8), i), I64))

        c.loop(i64(0), i64(lanes), lane)
        transpose_bits(c, tile, n, Bits(c, to, vectors), i64(0))

    call(target, dtype, body, given, words, found, rows)
    expected = [sum((int(x) >> r & 1) << n for n, x in enumerate(given)) for r in range(rows)]
    assert [int(x) for x in found] == expected + [7] * (64 - rows)


@on_targets
def test_bits_are_set_from_any_lane_on(target: Target) -> None:
    found = np.full(80, 1 << 20, np.uint64)

    def body(c: Code, to: Any) -> None:
        bits = Bits(c, to, 2)

        def row(r: Any, _: Any) -> None:
            bits.add(r, c.b.sub(r, i64(16)), I16(0xB00D), i64(~6))

        c.loop(i64(0), i64(80), row)

    call(target, "float32", body, found)
    moved = [0xB00D << r >> 16 & (1 << 64) - 7 for r in range(80)]
    assert [int(x) for x in found] == [x | 1 << 20 for x in moved]
