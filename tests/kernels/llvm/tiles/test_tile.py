"""Transposes through registers: every dtype and target, and rows and columns no vector divides."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

from tests.kernels.llvm.emitted import call, on_targets
from tileattn.dtypes import DTYPES, accum_dtype
from tileattn.kernels.llvm.instructions.code import Code
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.tiles.tile import Tile, store_columns, transpose_rows

Array = NDArray[Any]
SIZES = [(1, 1), (1, 64), (3, 5), (16, 16), (17, 40), (23, 7), (32, 17), (45, 33)]  # rows, columns

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sizes = pytest.mark.parametrize(("rows", "columns"), SIZES)


def tile_of(c: Code, start: Any, rows: int) -> Tile:
    """Make a tile as wide as this many rows take."""
    return Tile(c, start, -(-rows // c.lanes))


def apart(rows: int, columns: int, dtype: Any) -> tuple[Array, Array]:
    """Make a view whose rows stand apart, and the array that it is of, filled with 7."""
    whole = np.full((rows, columns + 3), 7, dtype)
    return whole[:, :columns], whole


def skip_without_half(dtype: Any, target: Target) -> None:
    if dtype == np.float16 and not target.half:
        pytest.skip("float16 needs instructions that convert it")


@dtypes
@sizes
@on_targets
def test_rows_become_columns(target: Target, rows: int, columns: int, dtype: Any) -> None:
    skip_without_half(dtype, target)
    sums = accum_dtype(dtype)
    lanes = target.vector_bytes // sums.itemsize
    width = -(-rows // lanes) * lanes
    x, _ = apart(rows, columns, dtype)
    tile = np.zeros((columns, width), sums)
    x[...] = np.random.default_rng(0).standard_normal(x.shape)
    step = x.strides[0]

    def body(c: Code, source: Any, to: Any, n: Any, columns: Any) -> None:
        scale = c.const(3.0).type.element(3.0)

        def row(r: Any) -> Any:
            return c.at(source, c.b.mul(r, r.type(step)))

        transpose_rows(c, str(dtype), row, n, columns, tile_of(c, to, rows), scale)

    call(target, sums.name, body, x, tile, rows, columns)
    expected = x.astype(sums).T * sums.type(3)
    np.testing.assert_array_equal(tile[:, :rows], expected)
    np.testing.assert_array_equal(tile[:, rows:], expected[:, -1:].repeat(width - rows, 1))


@dtypes
@sizes
@on_targets
def test_columns_become_rows(target: Target, rows: int, columns: int, dtype: Any) -> None:
    skip_without_half(dtype, target)
    sums = accum_dtype(dtype)
    lanes = target.vector_bytes // sums.itemsize
    width = -(-rows // lanes) * lanes
    rng = np.random.default_rng(1)
    tile, weights = (rng.standard_normal(n).astype(sums) for n in ((columns, width), width))
    x, whole = apart(rows + 1, columns, dtype)
    expected = whole.copy()
    expected[:rows, :columns] = (tile * weights)[:, :rows].T
    step = x.strides[0]

    def body(c: Code, source: Any, weights: Any, to: Any, n: Any, columns: Any) -> None:
        def row(r: Any) -> Any:
            return c.at(to, c.b.mul(r, r.type(step)))

        store_columns(c, str(dtype), row, n, columns, tile_of(c, source, rows), weights)

    call(target, sums.name, body, tile, weights, x, rows, columns)
    np.testing.assert_array_equal(whole, expected)
