"""``merge`` on CuPy arrays in host memory: its kernel runs on the CPU."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host, sent
from tests.merged_results import Array, check_merged, parts, special_parts
from tileattn.dtypes import BFLOAT16, DTYPES
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.merged_rows import MAX_PARTS


def check(gpu: Machine, outs: list[Array], lses: list[Array]) -> None:
    """Compare with the oracle."""
    found = tileattn.merge([sent(gpu, x) for x in outs], [sent(gpu, x) for x in lses])
    check_merged(tileattn.Attention(*map(at_host, found)), outs, lses)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, MAX_PARTS])
def test_every_number_of_parts(
    gpu: Machine, kernels: list[KernelKey], count: int, dtype: Any
) -> None:
    for shape in ((2, 3, 5, 64), (7, 20), (1, 5), (2, 1, 3, 2, 9), (3, 2, 0)):
        check(gpu, *parts(count, dtype, shape, seed=count))
    assert {key.kernel for key in kernels} == {"merge_rows"}
    assert 16 in {key.alignment_bytes for key in kernels}


def test_rows_longer_than_a_thread_block_takes(gpu: Machine, kernels: list[KernelKey]) -> None:
    check(gpu, *parts(2, BFLOAT16, (3, 1100)))
    check(gpu, *parts(3, np.float32, (3, 1101)))
    assert {key.alignment_bytes for key in kernels} == {8, 4}


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_any_strides(gpu: Machine, kernels: list[KernelKey], dtype: Any) -> None:
    """Axes in any order, rows that start anywhere, columns apart, and more axes than four."""
    outs, lses = parts(3, dtype, (2, 3, 4, 5, 24))
    outs[0] = np.ascontiguousarray(outs[0].transpose(3, 1, 0, 2, 4)).transpose(2, 1, 3, 0, 4)
    lses[0] = np.ascontiguousarray(lses[0].transpose(2, 0, 3, 1)).transpose(1, 3, 0, 2)
    outs[1] = np.ascontiguousarray(outs[1][:, ::-1])[:, ::-1]
    lses[1] = np.ascontiguousarray(lses[1][..., ::-1])[..., ::-1]
    check(gpu, outs, lses)
    outs[2] = np.ascontiguousarray(outs[2].swapaxes(-1, -2)).swapaxes(-1, -2)
    check(gpu, outs, lses)
    more = [x.reshape(2, 3, 2, 2, *x.shape[3:]) for x in outs]
    check(gpu, more, [x.reshape(2, 3, 2, 2, 5) for x in lses])
    assert kernels


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinities_and_nan(gpu: Machine, kernels: list[KernelKey]) -> None:
    check(gpu, *special_parts())
    assert kernels


def test_an_empty_result_starts_no_kernel(gpu: Machine, kernels: list[KernelKey]) -> None:
    outs, lses = [sent(gpu, np.zeros((2, 0, 8)))], [sent(gpu, np.zeros((2, 0)))]
    assert tileattn.merge(outs, lses).out.shape == (2, 0, 8)
    assert not kernels
