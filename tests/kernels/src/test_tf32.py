"""How exact products of tf32 parts are: twin of Atom<float> in mma.cuh.

Only the split and the three products are computed here. How tensor cores sum is left out.
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]

CUT = np.uint32(0xFFFFE000)  # what tensor cores see of a float32
LAST = 2.0**128 - 2.0**116  # from here on rounding to 11 bits would give infinity
TINY = 2.0**-136  # the last bit of a subnormal tf32

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


def bits_of(x: Array) -> Array:
    return np.asarray(x, np.float32).view(np.uint32)


def cut(x: Array) -> Array:
    return np.asarray((bits_of(x) & CUT).view(np.float32))


def rounded_to_zero(x: Array) -> Array:
    """Convert float64 to float32 as ``__fmaf_rz`` does."""
    with np.errstate(over="ignore"):
        nearest = x.astype(np.float32)
    down = np.nextafter(nearest, np.float32(0))
    too_far = np.isfinite(x) & (np.abs(nearest.astype(np.float64)) > np.abs(x))
    return np.where(too_far, down, nearest)


def split(x: Array) -> tuple[Array, Array]:
    """Give both parts of float32 numbers, as tensor cores see them."""
    power = (bits_of(x) & np.uint32(0xFF800000)).view(np.float32)
    high = cut(rounded_to_zero(x.astype(np.float64) + power.astype(np.float64) * 2.0**-11))
    return high, cut(x - high)


def products(x: Array, y: Array) -> Array:
    """Sum the three products of parts, in float64: exact for one product, bar overflow."""
    (high, low), (high_y, low_y) = ([part.astype(np.float64) for part in split(z)] for z in (x, y))
    return np.asarray(high * low_y + low * high_y + high * high_y)


def careful(x: Array, y: Array) -> Array:
    """Multiply matrices as CAREFUL products do, with sums of parts in float32."""
    (high, low), (high_y, low_y) = split(x), split(y)
    with np.errstate(over="ignore"):
        lower = low @ high_y + high @ low_y
        return np.asarray(np.where(np.isfinite(lower), lower, 0) + high @ high_y)


def finite_floats(rng: np.random.Generator, count: int) -> Array:
    """Draw floats of any exponent, those at the ends of their range more often."""
    bits = rng.integers(0, 2**32, count, np.uint32)
    x = bits.view(np.float32)
    ends = np.concatenate([np.arange(2**15), 0x7F800000 - 1 - np.arange(2**15)])
    edges = (ends.astype(np.uint32) | bits[: ends.size] & np.uint32(1 << 31)).view(np.float32)
    return np.concatenate([x[np.isfinite(x)], edges])


def of_one_binade(step: int) -> Array:
    """Take every so manieth number from 1 to 2, and all near 1: there errors are largest."""
    few, near = np.arange(0, 2**23, step), np.arange(2**14)
    return (np.concatenate([few, near]) + 0x3F800000).astype(np.uint32).view(np.float32)


def test_parts_lose_the_last_bit_at_most() -> None:
    every = of_one_binade(3)
    for x in (every, finite_floats(np.random.default_rng(0), 2**20)):
        exact, size = x.astype(np.float64), np.abs(x.astype(np.float64))
        high, low = split(x)
        assert np.isfinite(high).all()
        error = np.abs(exact - high - low)
        ok = error <= np.where(size < LAST, np.maximum(2.0**-23 * size, TINY), 2.0**-22 * size)
        assert ok.all()
        middle = (size >= 2.0**-113) & (size < LAST)
        assert (error <= np.spacing(np.abs(x), where=middle, out=np.ones_like(x)))[middle].all()
        ok = np.abs(low.astype(np.float64)) <= np.maximum(2.0**-11 * size, 2.0**-137)
        assert ok.all()
    high, low = split(every)
    lost = every.astype(np.float64) - high - low != 0
    assert 0.2 < lost.mean() < 0.3


def test_a_product_is_within_its_bound() -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(2**20).astype(np.float32) for _ in range(2))
    exact = x.astype(np.float64) * y
    relative = (products(x, y) - exact) / exact
    assert (np.abs(relative) <= 2.0**-21).all()
    assert np.sqrt(np.mean(relative**2)) <= 2.0**-23.6
    assert abs(np.mean(relative)) <= 2.0**-30  # sums do not drift

    factors = of_one_binade(2**11 - 1)
    for factor in factors[::7]:
        exact = np.float64(factor) * factors
        ok = np.abs(products(factor, factors) - exact) <= 2.0**-21 * exact
        assert ok.all()


def test_products_of_numbers_of_any_size() -> None:
    rng = np.random.default_rng(2)
    x, y = finite_floats(rng, 2**20), finite_floats(rng, 2**20)
    count = min(x.size, y.size)
    x, y = x[:count], rng.permutation(y)[:count]
    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    size = np.abs(x64 * y64)
    largest = np.maximum(np.abs(x64), np.abs(y64))
    relative = np.where(largest < LAST, 2.0**-21, 2.0**-20)
    ok = np.abs(products(x, y) - x64 * y64) <= relative * size + 2 * TINY * largest
    assert ok.all()


def test_integers_of_few_bits_are_exact() -> None:
    x = np.arange(-(2**11), 2**11 + 1).astype(np.float32)
    assert (split(x)[1] == 0).all()
    np.testing.assert_array_equal(products(x[:, None], x), np.multiply.outer(x, x))


WILD: dict[str, list[float]] = {
    "infinity": [np.inf, -np.inf, 0.0, 1.0, -1.0],
    "NaN": [np.nan, 1.0, np.inf],
    "overflow": [1e30, -1e30, float(np.finfo(np.float32).max)],
}
NANS = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)  # at the ends


@pytest.mark.parametrize("kind", WILD)
def test_careful_products_are_infinite_and_nan_where_the_plain_ones_are(kind: str) -> None:
    """Of factors below 2**-137 infinity makes NaN: their higher part is zero."""
    rng = np.random.default_rng(3)
    wild = np.array(WILD[kind], np.float32)
    if kind == "NaN":
        wild = np.concatenate([wild, NANS])
    x, y = (rng.standard_normal((128, 4)).astype(np.float32) for _ in range(2))
    columns = 1 if kind == "overflow" else 4  # of infinity - infinity the order of sums decides
    for z in (x, y):
        places = np.zeros(z.shape, bool)
        places[:, :columns] = rng.random((len(z), columns)) < 0.3
        z[places] = rng.choice(wild, places.sum())
    with np.errstate(over="ignore"):
        want = (x.astype(np.float64) @ y.T.astype(np.float64)).astype(np.float32)
    got = careful(x, y.T)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])
    assert np.isfinite(got[np.isfinite(want)]).all()
    assert np.isinf(want).any()
    assert np.isnan(want).any() == (kind != "overflow")


def test_a_vector_times_one_is_near_itself() -> None:
    """Half a unit in the last place, in the root mean square; of a rounding it is 0.29."""
    x = of_one_binade(3)
    error = (products(np.ones_like(x), x) - x) / np.spacing(x)
    assert 0.49 < np.sqrt(np.mean(error**2)) < 0.51
