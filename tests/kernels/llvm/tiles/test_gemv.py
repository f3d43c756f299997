"""Products of few rows, for every dtype and target, and lengths that no vector divides."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

from tests.kernels.llvm.emitted import call, on_targets
from tileattn.dtypes import DTYPES, accum_dtype
from tileattn.kernels.llvm.instructions.code import Code
from tileattn.kernels.llvm.instructions.kernel import Kernel
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.tiles.bits import Bits
from tileattn.kernels.llvm.tiles.gemv import dots_of_rows, sums_of_rows

Array = NDArray[Any]
ROWS, N, COLUMNS = (1, 2, 3, 4, 7), (1, 5, 16, 37), (1, 3, 16, 40, 200)
dtypes = pytest.mark.parametrize(
    "dtype",
    [pytest.param(x, marks=[pytest.mark.slow] * (x.itemsize != 4)) for x in DTYPES],
    ids=str,
)


def integers(shape: tuple[int, int], width: int, dtype: Any, seed: int) -> Array:
    """Draw small integers, whose sums are exact, and zeros up to a width."""
    x = np.zeros((shape[0], width), dtype)
    x[:, : shape[1]] = np.random.default_rng(seed).integers(-4, 5, shape)
    return x


def skip_without_half(dtype: Any, target: Target) -> None:
    if dtype == np.float16 and not target.half:
        pytest.skip("float16 needs instructions that convert it")


def computed(
    function: Any, target: Target, dtype: Any, a: Array, b: Array, to: Array, *sizes: Any
) -> None:
    """Run a product on arrays; of the last arguments, one more may be an array of bits."""

    def body(c: Code, *given: Any) -> None:
        kernel = Kernel("test", target, str(dtype), c.dtype)
        kernel.module = c.module
        arrays = zip(given[:3], given[3:6], strict=True)
        function(kernel, c, *given[6:9], *arrays, *(Bits(c, words, 1) for words in given[9:]))

    strides = (x.strides[0] for x in (a, b, to))
    call(target, to.dtype.name, body, a, b, to, *strides, *sizes)


def whole(target: Target, n: int, sums: np.dtype[Any]) -> int:
    lanes = target.vector_bytes // sums.itemsize
    return -(-n // lanes) * lanes


@dtypes
@on_targets
def test_dot_products(target: Target, dtype: Any) -> None:
    skip_without_half(dtype, target)
    sums = accum_dtype(dtype)
    for number, columns in enumerate(COLUMNS):
        rows, n = ROWS[number], N[number % len(N)]
        a = integers((rows, columns), whole(target, columns, sums), sums, 0)
        b = integers((n, columns), columns + 3, dtype, 1)
        b[:, columns:] = np.nan
        to = np.empty((rows, whole(target, n, sums)), sums)
        computed(dots_of_rows, target, dtype, a, b, to, rows, n, columns)
        expected = a[:, :columns] @ b[:, :columns].astype(sums).T
        np.testing.assert_array_equal(to[:, :n], expected)


@pytest.mark.parametrize("masked", [False, True])
@dtypes
@on_targets
def test_weighted_sums(target: Target, dtype: Any, masked: bool) -> None:
    """In a masked product, masked-out elements are NaN."""
    skip_without_half(dtype, target)
    sums = accum_dtype(dtype)
    lanes = target.vector_bytes // sums.itemsize
    for number, columns in enumerate(COLUMNS):
        rows, n = ROWS[number], N[number % len(N)]
        a = integers((rows, n), whole(target, n, sums), sums, 0)
        b = integers((n, columns), columns + 3, dtype, 1)
        seen = np.ones(a.shape, bool)
        if masked:
            seen[:, ::3] = False
        expected = (a * seen)[:, :n] @ b[:, :columns].astype(sums)
        if masked:
            b[::3] = np.nan
        words = seen.reshape(rows, -1, lanes) @ (1 << np.arange(lanes))
        to = np.empty((rows, whole(target, columns, sums)), sums)
        computed(sums_of_rows, target, dtype, a, b, to, rows, n, columns, *[words][: int(masked)])
        np.testing.assert_array_equal(to[:, :columns], expected)
