"""The CUDA header about operands that are not finite gives rows what they attend to."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.on_gpu import needs_gpu
from tests.probes import keys
from tests.probes.bounds import assert_same_bits, dtype_of, sums_of
from tests.probes.harness import Probe
from tileattn.kernels.cuda.families.key import KernelKey

Array = NDArray[Any]

pytestmark = needs_gpu


def values_of(key: KernelKey, density: float) -> Array:
    """Random values, of which some are not finite."""
    rng = np.random.default_rng(11)
    values = rng.standard_normal((key.block_k, key.value_dim)).astype(dtype_of(key))
    wrong = np.array([np.nan, np.inf, -np.inf]).astype(values.dtype)
    return np.where(rng.random(values.shape) < density, rng.choice(wrong, values.shape), values)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 1.0])
@pytest.mark.parametrize("key", keys.NONFINITE, ids=keys.name_of)
def test_rows_get_what_they_attend_to(key: KernelKey, density: float) -> None:
    """NaN for a NaN, both infinities or a dropped one; else the infinity; else what there was."""
    rng = np.random.default_rng(12)
    values, pairs = values_of(key, density), (key.block_q, key.block_k)
    scores = rng.standard_normal(pairs).astype(sums_of(key))
    scores[rng.random(pairs) < 0.7] = -np.inf
    scores[rng.random(pairs) < 0.1] = np.nan
    scores[0] = -np.inf
    keeps = rng.random(pairs) < 0.6 if key.dropout else np.ones(pairs, np.bool_)
    sums = rng.standard_normal((key.block_q, key.value_dim)).astype(sums_of(key))

    wide = values.astype(np.float64)
    plus, minus = ~(wide < np.inf), ~(wide > -np.inf)
    seen = scores != -np.inf
    kept, dropped = (seen & keeps).astype(int), (seen & ~keeps).astype(int)
    up, down = (kept @ x + dropped @ (plus | minus) > 0 for x in (plus, minus))
    want = np.select([up & down, up, down], [np.nan, np.inf, -np.inf], sums).astype(sums.dtype)
    cleaned = np.where(plus | minus, np.zeros_like(values), values)

    found = np.full(1, 7)
    Probe(key)("restored", values, scores, keeps, sums, found)
    assert found[0] == (plus | minus).any()
    assert_same_bits(values, cleaned)
    np.testing.assert_array_equal(sums, want)
