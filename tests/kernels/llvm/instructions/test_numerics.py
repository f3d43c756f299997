"""Vectors of exp, log, tanh and powers of two, against the same functions in long double."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

from tests.kernels.llvm.emitted import call, on_targets
from tileattn.kernels.llvm.instructions import numerics
from tileattn.kernels.llvm.instructions.code import Code, i64
from tileattn.kernels.llvm.target import Target

Array = NDArray[Any]
BEYOND = {
    "exp": [0, -0.0, -math.inf, math.inf, math.nan, -1e30, -744.0, -104.0],
    "log": [0, math.inf, math.nan, 1, 2, 4, 0.7071, 1e-30],
    "tanh": [0, -0.0, math.inf, -math.inf, math.nan, 1e-30, 100, 1],
}


def drawn(name: str, dtype: str) -> Array:
    """Draw numbers of all sizes at which a score, a sum or a quotient may come."""
    rng = np.random.default_rng(0)
    x = {
        "exp": rng.uniform(-20, 1, 1016),
        "log": rng.uniform(0.5, 5000, 1016),
        "tanh": rng.standard_normal(1016) * 10.0 ** rng.uniform(-8, 2, 1016),
    }[name]
    return np.concatenate([x, BEYOND[name]]).astype(dtype)


def evaluated(name: str, target: Target, x: Array) -> Array:
    """Run a loop over the function."""

    def body(c: Code, source: Any, to: Any, count: Any) -> None:
        def step(i: Any, _: Any) -> None:
            given = c.load(c.at(source, c.bytes_of(i)))
            c.store(getattr(numerics, name)(c, given), c.at(to, c.bytes_of(i)))

        c.loop(i64(0), count, step, step=c.lanes)

    out = np.empty_like(x)
    call(target, x.dtype.name, body, x, out, len(x))
    return out


@on_targets
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "ulps"), [("exp", 2), ("log", 2), ("tanh", 5)])
def test_functions_are_right_to_a_few_units_in_the_last_place(
    name: str, ulps: float, dtype: str, target: Target
) -> None:
    """Each rounding of the last steps counts a unit.

    For exp: a product and the result; for log: quotient and sum; for tanh: the power, two products
    and two sums. That of ``log2(e)`` counts as often as it is in the argument of exp.
    """
    x = drawn(name, dtype)
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(x.astype(np.longdouble))
    found = evaluated(name, target, x)
    usual = np.isfinite(expected) & (np.abs(expected) > np.finfo(dtype).tiny)
    unit = np.spacing(np.abs(expected[usual]).astype(dtype))
    off = np.abs(found[usual] - expected[usual]) / unit
    reduced = np.abs(x[usual]) if name == "exp" else 0
    assert (off <= ulps + reduced).all()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected.astype(dtype)))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@on_targets
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_subnormal_results_of_exp_are_not_flushed(dtype: str, target: Target) -> None:
    """Times infinity they are infinite, and 0 would be NaN."""
    lowest = -100.0 if dtype == "float32" else -740.0
    (found, *_) = evaluated("exp", target, np.full(16, lowest, dtype))
    assert 0 < found < np.finfo(dtype).tiny
