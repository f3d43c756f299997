"""``cascade`` on CuPy arrays in host memory: results of its kernels, and the launches."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host, sent
from tileattn.backends.cupy.shared_pages import cascade_tables
from tileattn.cascading import cascade_tables as expected_tables
from tileattn.kernels.cuda.families.key import KernelKey

TABLE = np.arange(30).reshape(6, 5) * 7 % 31
LENGTHS = np.array([20, 17, 12, 13, 9, 20])


def on_host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else at_host(x)


@pytest.mark.parametrize("there", range(1, 8))
@pytest.mark.parametrize("integer", [np.int32, np.int64])
@pytest.mark.parametrize("shared", [[4], [8, 8], [0, 16, 4], [20, 0, 12], [4, 8, 0, 0, 20, 12]])
def test_tables(
    gpu: Machine, kernels: list[KernelKey], shared: list[int], integer: Any, there: int
) -> None:
    """Each of the integers may be on the device, or on the host."""
    given = [x.astype(integer) for x in (TABLE, LENGTHS, np.array(shared))]
    table, lengths, groups = given
    expected = expected_tables(table, lengths, groups, 4)
    mixed: Any = [sent(gpu, x) if there >> n & 1 else x for n, x in enumerate(given)]
    table, lengths, groups = mixed
    found = cascade_tables(table, lengths, groups, 4)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(on_host(x), y)
    assert isinstance(found[1], np.ndarray) is not bool(there & 6)
    assert isinstance(found[3], np.ndarray) is not bool(there & 4)
    assert [key.kernel for key in kernels] == ["cascade_tables"]


def test_device_lengths_are_clamped(gpu: Machine, kernels: list[KernelKey]) -> None:
    """Shared lengths are rounded down to whole pages, from 0 to the capacity."""
    shared = np.array([7, -3, 1 << 40])
    strided = np.repeat(shared, 2)[::2]
    table, lengths, there = (sent(gpu, x) for x in (TABLE[:, ::-1], LENGTHS, strided))
    found = cascade_tables(table, lengths, there, 4)
    assert at_host(found[3]).tolist() == [4, 0, 20]
    assert at_host(found[1]).tolist() == [16, 13, 12, 13, -11, 0]
    for x, y in zip(found, expected_tables(TABLE[:, ::-1], LENGTHS, shared, 4), strict=True):
        np.testing.assert_array_equal(at_host(x), y)
    assert kernels


def call(gpu: Machine, **changed: Any) -> dict[str, Any]:
    """Make a call of six sequences with all arrays on the device."""
    q, k, v = (np.zeros(shape, np.float16) for shape in ((6, 4, 1, 64), *[(32, 2, 16, 64)] * 2))
    given = {"q": q, "k": k, "v": v, "block_table": TABLE, "kv_lengths": 4 * LENGTHS}
    there = {name: sent(gpu, x) for name, x in given.items()}
    return there | {"shared_lengths": 32} | changed


@pytest.mark.parametrize("on_device", [False, True])
def test_two_calls_one_table_kernel_and_one_merge(
    gpu: Machine, kernels: list[KernelKey], on_device: bool
) -> None:
    """Nothing is uploaded, and the queries are views."""
    shared = {"shared_lengths": sent(gpu, np.array([16, 32]))} if on_device else {}
    given = call(gpu, **shared)
    tileattn.cascade(**given)
    launches = [params for key, _, _, params in gpu.launches if key.kernel.startswith("forward")]
    assert [key.kernel for key in kernels] == ["cascade_tables", "merge_rows"]
    assert gpu.uploads == []
    groups = 2 if on_device else 1
    batches = {int(params["B"]): params for params in launches}
    assert sorted(batches) == [groups, 6]
    for params in batches.values():
        assert params["q"] == given["q"].data.ptr
        assert params["k"] == given["k"].data.ptr


def test_a_capture_copies_nothing_from_the_host(gpu: Machine, kernels: list[KernelKey]) -> None:
    given = call(gpu)
    tileattn.cascade(**given)
    gpu.capturing = True
    tileattn.cascade(**given)
    given["shared_lengths"] = sent(gpu, np.array([16, 32]))
    tileattn.cascade(**given)
    assert [key.kernel for key in kernels][:2] == ["cascade_tables", "merge_rows"]


def test_nothing_shared_is_one_call(gpu: Machine, kernels: list[KernelKey]) -> None:
    tileattn.cascade(**call(gpu, shared_lengths=[0, 0]))
    tileattn.cascade(**call(gpu, shared_lengths=[16, 0, 16, 0, 16, 0]))
    assert not kernels
