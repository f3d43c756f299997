"""Types of a key, and comparisons that a NaN does not pass."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tileattn.kernels.cuda.families.key import KernelKey

Array = NDArray[Any]


def dtype_of(key: KernelKey) -> np.dtype[Any]:
    """Return the element type of a key."""
    return np.dtype(getattr(ml_dtypes, key.dtype, key.dtype))


def sums_of(key: KernelKey) -> np.dtype[Any]:
    """Return the accumulator type of a key."""
    return np.dtype(np.float64 if key.dtype == "float64" else np.float32)


def truth_of(key: KernelKey) -> np.dtype[Any]:
    """Return a type for exact results, more precise than the accumulator type."""
    return np.dtype(np.longdouble if key.dtype == "float64" else np.float64)


def unit_of(key: KernelKey) -> float:
    """Return u, the relative error of one rounding: half the distance from 1 to the next number."""
    return float(np.finfo(sums_of(key)).eps) / 2


def assert_near(got: Array, want: Array, bound: Any) -> None:
    """Assert that errors are within the bound, and that non-finite values are the same."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(want.dtype) - want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    ok = same | (np.isfinite(want) & (error <= bound))
    where = np.argwhere(~ok)[:5].tolist()
    assert ok.all(), f"{(~ok).sum()} as at {where}: {got[~ok][:5]}, not {want[~ok][:5]}"


def assert_same_bits(got: Array, want: Array) -> None:
    """Assert that all bits are equal; all NaNs are equivalent."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    nan, bits = np.isnan(want), f"u{got.itemsize}"
    assert np.array_equal(np.isnan(got), nan)
    got, want = np.ascontiguousarray(got).view(bits), np.ascontiguousarray(want).view(bits)
    wrong = (got != want) & ~nan
    assert not wrong.any(), f"{wrong.sum()} as at {np.argwhere(wrong)[:5].tolist()}"
