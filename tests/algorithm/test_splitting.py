"""Products of float32 by float16 parts: the stated bounds."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from tileattn.algorithm.splitting import (
    TILE_ROWS,
    gradient_product,
    inverse_power,
    power_of_two,
    scores,
    split,
    split_rows,
    split_tiles,
    weighted_sum,
)

Array = NDArray[Any]

LARGEST = float(np.finfo(np.float32).max)
U = 2.0**-24  # relative error of one rounding in float32

seeds = st.integers(0, 2**32 - 1)


def exactly(x: Array) -> Array:
    return x.astype(np.float64)


def single(x: Array) -> Array:
    """Round to float32, and clip to its largest numbers."""
    return np.clip(x, -LARGEST, LARGEST).astype(np.float32)


# --- factors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0, 1, 0x2AAAAA, 2**23 - 1])
def test_a_factor_moves_a_number_below_2_to_the_15(fraction: int) -> None:
    """Every exponent, from 0 and subnormal numbers to the largest."""
    bits = (np.arange(255, dtype=np.uint32) << 23) | np.uint32(fraction)
    for x in bits.view(np.float32):
        factor = power_of_two(x)
        assert factor.dtype == np.float32
        mantissa, exponent = math.frexp(float(factor))
        assert mantissa == 0.5
        moved = float(x) * float(factor)
        assert moved < 2.0**15
        assert moved >= 2.0**14 or exponent - 1 == 126
        inverse = inverse_power(factor)
        assert float(inverse) * float(factor) == 1
        assert inverse >= np.finfo(np.float32).tiny


def test_factors_of_named_numbers() -> None:
    given = [0.0, 1e-45, 2.0**-126, 2.0**-112, 2.0**-111, 1.0, 2.0**14, LARGEST]
    want = [2.0**e for e in (126, 126, 126, 126, 125, 14, 0, -113)]
    assert power_of_two(np.array(given, np.float32)).tolist() == want
    assert power_of_two(np.zeros((0, 3), np.float32)).shape == (0, 3)


# --- parts ----------------------------------------------------------------------------------------


def matrix(seed: int, kind: str, size: float, shape: tuple[int, ...]) -> Array:
    """Draw float32 numbers: ``size`` is the decimal exponent of their amplitude."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if kind == "log-normal":
        x = np.exp(6 * rng.random() * x) * rng.choice([-1, 1], shape)
    elif kind == "outlier column":
        x[..., rng.integers(shape[-1])] *= 2.0 ** rng.integers(30)
    elif kind == "rows of all sizes":
        x *= np.exp2(rng.uniform(-26, 0, (*shape[:-1], 1)))
    elif kind == "zeros":
        x *= rng.random(shape) < 0.2
        x *= rng.random((*shape[:-1], 1)) < 0.7
    return single(x * 10.0**size)


kinds = st.sampled_from(["normal", "log-normal", "outlier column", "rows of all sizes", "zeros"])
sizes = st.floats(-45, 38)


def rest(x: Array, factor: ArrayLike, high: Array, low: Array) -> Array:
    """Return ``x * factor - high - low * 2**-11``, which float64 holds exactly."""
    y: Array = exactly(x) * exactly(np.asarray(factor))
    return y - exactly(high) - np.ldexp(exactly(low), -11)


def bound(y: Array) -> Array:
    """Bound the error of the two parts of y."""
    return np.maximum(2.0**-23 * np.abs(y), 2.0**-36)


@given(seeds, kinds, sizes)
def test_the_parts_add_up(seed: int, kind: str, size: float) -> None:
    x = matrix(seed, kind, size, (7, 40))
    factor = power_of_two(np.abs(x).max())
    high, low = split(x, factor)
    assert high.dtype == low.dtype == np.float16
    assert (np.abs(high) <= 2.0**15).all()
    assert (np.abs(low) <= 2.0**14).all()
    assert (np.abs(rest(x, factor, high, low)) <= bound(exactly(x) * exactly(factor))).all()


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (1 + 4095 * 2.0**-23, 2.0**-23),  # low would need 12 bits
        (2.0**-14 + 3 * 2.0**-37, 2.0**-37),
        (2.0**-15 + 2.0**-36, 2.0**-36),  # a tie of subnormal low parts
        (2.0**-37, 2.0**-37),
        (1 + 4094 * 2.0**-23, 0),
    ],
)
def test_the_bound_is_reached(x: float, error: float) -> None:
    x32 = np.float32(x)
    assert x32 == x
    for sign in (1, -1):
        y, one = np.array([sign * x], np.float32), np.float32(1)
        assert abs(rest(y, one, *split(y, one)))[0] == error <= bound(exactly(y))[0]


@given(seeds, st.floats(-36, 15))
def test_p_adds_up_without_a_factor(seed: int, size: float) -> None:
    """P of ``2**11`` keeps all digits down to ``2**-24`` of that; smaller P loses ``2**-47``."""
    p = np.minimum(np.random.default_rng(seed).random((5, 40)) * 2.0**size, 2**15)
    p = p.astype(np.float32)
    high, low = split(p, 1)
    assert (np.abs(rest(p, np.float32(1), high, low)) <= bound(exactly(p))).all()


def test_zeros_have_zero_parts() -> None:
    high, low, inverse = split_tiles(np.zeros((2, 70, 3), np.float32))
    assert not high.any()
    assert not low.any()
    assert (inverse == 2.0**-126).all()


# --- tiles and rows -------------------------------------------------------------------------------


def splittable(tile: Array) -> bool:
    """Compare every row with the largest element, one by one."""
    rows = [[abs(float(x)) for x in row] for row in tile]
    if not all(math.isfinite(x) for row in rows for x in row):
        return False
    largest = max((x for row in rows for x in row), default=0.0)
    return all(max(row, default=0.0) >= largest * 2.0**-24 for row in rows if any(row))


def check_tiles(x: Array, tile_rows: int) -> int:
    """Compare with tiles that are split one by one, and count those that cannot be."""
    high, low, inverse = split_tiles(x, tile_rows)
    assert high.shape == low.shape == x.shape
    assert inverse.dtype == np.float32
    assert inverse.shape == (*x.shape[:-2], -(-x.shape[-2] // tile_rows))
    for *lead, n in np.ndindex(inverse.shape):
        rows = (*lead, slice(n * tile_rows, (n + 1) * tile_rows))
        tile = x[rows]
        assert np.isnan(inverse[*lead, n]) != splittable(tile)
        if splittable(tile):
            factor = power_of_two(np.abs(tile).max(initial=0))
            assert inverse[*lead, n] == inverse_power(factor)
            for part, want in zip((high, low), split(tile, factor), strict=True):
                np.testing.assert_array_equal(part[rows], want)
    return int(np.isnan(inverse).sum())


@given(seeds, kinds, sizes, st.sampled_from([1, 16, TILE_ROWS]), st.integers(0, 3))
def test_each_tile_has_its_factor(
    seed: int, kind: str, size: float, tile_rows: int, nonfinite: int
) -> None:
    x = matrix(seed, kind, size, (2, 100, 3))
    rng = np.random.default_rng(seed)
    for bad in (np.nan, -np.inf)[:nonfinite]:
        x[tuple(rng.integers(x.shape))] = bad
    check_tiles(x, tile_rows)


@pytest.mark.parametrize("size", [1.0, 2.0**-124, 2.0**127])
def test_the_smallest_row_of_a_tile(size: float) -> None:
    """Rows at the limit are split; smaller ones are not, unless they are 0 or in another tile."""
    x = np.zeros((130, 3), np.float32)
    x[5, 1], x[63] = -1.5, 1.5 * 2.0**-24
    x[64:128], x[129] = 1.0, 2.0**-20
    x = (x * size).astype(np.float32)
    assert check_tiles(x, TILE_ROWS) == 0
    x[63] = np.nextafter(x[63], np.float32(0))
    assert np.isnan(split_tiles(x)[2]).tolist() == [True, False, False]
    assert not np.isnan(split_rows(x)[2]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_the_tile_of_a_bad_element_is_not_splittable(bad: float) -> None:
    x = matrix(0, "normal", 0, (2, 150, 5))
    want = split_tiles(x)[2]
    x[1, 70, 2] = bad
    want[1, 1] = np.nan
    np.testing.assert_array_equal(split_tiles(x)[2], want)
    assert np.argwhere(np.isnan(split_rows(x)[2])).tolist() == [[1, 70]]


def test_views_have_the_parts_of_their_copies() -> None:
    x = matrix(0, "rows of all sizes", 0, (140, 3, 10)).swapaxes(0, 1)[..., ::-2]
    for part, want in zip(split_tiles(x), split_tiles(x.copy()), strict=True):
        np.testing.assert_array_equal(part, want)


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 70, 5), (2, 70, 0)])
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    assert check_tiles(x, TILE_ROWS) == 0
    assert split_rows(x)[2].shape == shape[:2]
    q, p = np.ones((2, 3, shape[2]), np.float32), np.ones((2, 3, shape[1]), np.float32)
    if shape[0]:
        np.testing.assert_array_equal(scores(q, x), np.zeros((2, 3, shape[1])))
        np.testing.assert_array_equal(scores(x, q), np.zeros((2, shape[1], 3)))
        for product in (weighted_sum, gradient_product):
            np.testing.assert_array_equal(product(p, x), np.zeros((2, 3, shape[2])))
            assert product(p.swapaxes(-1, -2), q).shape == (2, shape[1], shape[2])


# --- products -------------------------------------------------------------------------------------


def sizes_of_products(x: Array, y: Array) -> Array:
    return np.abs(exactly(x)) @ np.abs(exactly(y))


def least(x: Array, rows: int) -> Array:
    """Return the largest element of the group of each row, times 2**-50: its smallest error."""
    groups = [np.abs(x[..., n : n + rows, :]) for n in range(0, x.shape[-2], rows)]
    tops = [np.broadcast_to(x.max((-2, -1), initial=0)[..., None], x.shape[:-1]) for x in groups]
    return np.ldexp(exactly(np.concatenate(tops, axis=-1)), -50)[..., None]


def least_of_columns(x: Array, columns: int) -> Array:
    """Return the smallest error of each element, in groups of columns of one row."""
    groups = [np.abs(x[..., n : n + columns]) for n in range(0, x.shape[-1], columns)]
    tops = [np.broadcast_to(x.max(-1, initial=0, keepdims=True), x.shape) for x in groups]
    return np.ldexp(exactly(np.concatenate(tops, axis=-1)), -50)


def product_bound(x: Array, y: Array, small_x: Array, small_y: Array) -> Array:
    """Bound the error of ``x y`` from parts. Small elements of x have the error ``small_x``.

    Two parts lose 2**-23 of each factor, and 2**-22 with the fourth product. If both elements are
    small, the fourth product is at most 2**28 times the product of their errors. Inverse factors
    with a product below 2**-149 become 0.
    """
    depth = x.shape[-1]
    error = (2.0**-21 + (3 * min(depth, 128) + 5) * U) * sizes_of_products(x, y)
    small_x, small_y = (4 * np.broadcast_to(*z) for z in ((small_x, x.shape), (small_y, y.shape)))
    error += small_x @ np.abs(exactly(y)) + np.abs(exactly(x)) @ small_y
    bounded: Array = error + 2.0**28 * (small_x @ small_y) + depth * 2.0**-120
    return bounded


@given(
    *(seeds, kinds, st.floats(-18, 5), st.floats(-18, 5)),
    *(st.sampled_from([1, 3, 64, 100, 130]), st.sampled_from([1, TILE_ROWS])),
)
def test_scores_are_within_their_bound(
    seed: int, kind: str, q_size: float, k_size: float, D: int, tile_rows: int
) -> None:
    """Small elements lose 2**-50 of the largest element of the tile of q or k."""
    q = matrix(seed, kind, q_size, (2, 67, D))
    k = matrix(seed + 1, kind, k_size, (2, 70, D))
    of_q = np.repeat(split_tiles(q, tile_rows)[2], tile_rows, axis=-1)[:, :67, None]
    of_k = np.repeat(split_tiles(k)[2], TILE_ROWS, axis=-1)[:, None, :70]
    s, keys = scores(q, k, tile_rows), k.swapaxes(-1, -2)
    error = product_bound(q, keys, least(q, tile_rows), least(k, TILE_ROWS).swapaxes(-1, -2))
    bad = np.isnan(of_q + of_k)
    assert ((np.abs(s - exactly(q) @ exactly(keys)) <= error) | bad).all()
    assert (np.isnan(s) == bad).all()


@given(
    *(seeds, kinds, st.floats(-18, 18), st.floats(-8, 0)),
    *(st.sampled_from([1, 3, 64, 200]), st.sampled_from([32, TILE_ROWS])),
)
def test_weighted_sums_are_within_their_bound(
    seed: int, kind: str, size: float, p_size: float, N: int, keys: int
) -> None:
    """P loses 2**-36, and small elements of v 2**-50 of the largest of their tile."""
    rng = np.random.default_rng(seed)
    p = np.ldexp(rng.random((2, 5, N)) ** 4 * 10.0**p_size, 15).astype(np.float32)
    v = matrix(seed + 1, kind, size, (2, N, 6))
    out, exact = weighted_sum(p, v, keys), exactly(p) @ exactly(v)
    error = product_bound(p, v, np.array(2.0**-36), least(v, TILE_ROWS))
    bad = np.isnan(split_tiles(v)[2].sum(axis=-1))[:, None, None]
    ok = np.abs(out - exact) <= error
    assert (ok | bad).all()
    assert (np.isnan(out) == bad).all()


@given(seeds, kinds, st.floats(-18, 5), st.floats(-18, 5), st.sampled_from([1, 3, 64, 200]))
def test_gradient_products_are_within_their_bound(
    seed: int, kind: str, ds_size: float, x_size: float, N: int
) -> None:
    """Small elements of dS lose 2**-50 of the largest of their row in a tile."""
    ds = matrix(seed, kind, ds_size, (2, 5, N))
    x = matrix(seed + 1, kind, x_size, (2, N, 6))
    out, exact = gradient_product(ds, x), exactly(ds) @ exactly(x)
    error = product_bound(ds, x, least_of_columns(ds, TILE_ROWS), least(x, TILE_ROWS))
    bad = np.isnan(split_tiles(x)[2].sum(axis=-1))[:, None, None]
    assert ((np.abs(out - exact) <= error) | bad).all()
    assert (np.isnan(out) == bad).all()


def test_a_row_of_gradients_that_is_not_finite_becomes_nan() -> None:
    ds, x = (matrix(seed, "normal", 0, shape) for seed, shape in ((0, (5, 130)), (1, (130, 6))))
    want = gradient_product(ds, x)
    ds[1, 70], ds[3, 129] = np.nan, -np.inf
    want[[1, 3]] = np.nan
    np.testing.assert_array_equal(gradient_product(ds, x), want)
