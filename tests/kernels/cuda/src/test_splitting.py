"""splitting.cuh, run on the CPU: it has the bits of the specification."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cuda.src.on_host import built, pointer, sources
from tests.probes.bounds import assert_same_bits
from tests.probes.splitting import elements_and_factors, largest_elements
from tileattn.algorithm.splitting import inverse_power, power_of_two, split

_SPLITTING = """\
#include "splitting.cuh"

extern "C" void powers(i64 count, const float* largest, float* factors, float* inverses) {
    for (i64 n = 0; n < count; ++n) {
        factors[n] = power_of_two(largest[n]);
        inverses[n] = inverse_power(factors[n]);
    }
}
extern "C" void splits(i64 count, const float* x, const float* factors, Split* parts) {
    for (i64 n = 0; n < count; ++n) parts[n] = split(x[n], factors[n]);
}
"""


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    texts = sources("splitting.cuh") | {"splitting.cpp": _SPLITTING}
    return built(tmp_path, texts, "splitting.cpp")


def test_powers_of_two(library: ctypes.CDLL) -> None:
    largest = largest_elements()
    factors, inverses = np.full((2, largest.size), 7, np.float32)
    library.powers(ctypes.c_longlong(largest.size), *map(pointer, (largest, factors, inverses)))
    assert_same_bits(factors, power_of_two(largest))
    assert_same_bits(inverses, inverse_power(factors))


def test_parts(library: ctypes.CDLL) -> None:
    x, factors = elements_and_factors()
    parts = np.full((x.size, 2), 7, np.float16)
    library.splits(ctypes.c_longlong(x.size), *map(pointer, (x, factors, parts)))
    assert_same_bits(parts, np.stack(split(x, factors), axis=1))
