"""Accumulators of GPUs, which keep sums in two halves; their kernels run on the CPU."""

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.distributed.in_groups import in_groups
from tests.distributed.whole_sequence import check_once
from tests.kernels.cuda.src.partial_rows_on_host import KernelOnHost
from tileattn.backends.cupy import partial_rows
from tileattn.distributed import Layout
from tileattn.distributed.call import Call
from tileattn.testing import AttentionCase

DTYPES = [np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that loads a kernel; ranks are threads."""
    folder, lock = tmp_path_factory.mktemp("kernels"), threading.Lock()
    kernels: dict[Any, KernelOnHost] = {}

    def load(key: Any) -> KernelOnHost:
        with lock:
            if key not in kernels:
                kernels[key] = KernelOnHost(folder, key)
            return kernels[key]

    return load


@pytest.fixture(autouse=True)
def on_host(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat NumPy arrays as arrays on a GPU."""
    monkeypatch.setattr(partial_rows, "load", load)
    monkeypatch.setattr(partial_rows, "_address", lambda x: x.ctypes.data)
    monkeypatch.setattr(Call, "on_gpu", True)
    monkeypatch.setattr(
        "tileattn.distributed.schedules.blockwise_attention.add", partial_rows.add_rows
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("splits", [False, True])
def test_halves_are_those_of_a_sum(dtype: Any, is_split: bool, splits: bool) -> None:
    """Add to heads 1 and 2 of 4, rows 3 to 7."""
    rng, at = np.random.default_rng(1), slice(3, 8)
    wide = np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
    whole = rng.standard_normal((2, 4, 11, 35)).astype(dtype)
    before, to = whole.copy(), whole[:, 1:3]
    part = rng.standard_normal((2, 2, 5, 35)).astype(dtype)
    low = rng.integers(0, 1 << 16, to.shape).astype(np.uint16)
    x = value(to, low, wide, is_split)
    expected = x.copy()
    expected[..., at, :] += part.astype(wide)
    partial_rows.add_halves(to, low, part, at, is_split=is_split, splits=splits)
    found = value(to[..., at, :], low[..., at, :], wide, splits)
    rounded = expected[..., at, :] if splits else expected[..., at, :].astype(dtype).astype(wide)
    assert found.tobytes() == rounded.tobytes()
    whole[:, 1:3, at] = before[:, 1:3, at]
    assert whole.tobytes() == before.tobytes(), "other rows have changed"


def value(x: Any, low: Any, wide: np.dtype[Any], is_split: bool) -> Any:
    """Return the sums that are kept in halves."""
    if not is_split or x.dtype.itemsize > 2:
        return x.astype(wide)
    high = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32)
    return (high << 16 | low).view(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", ["ring", "gather", ("heads", 2)], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "sinks", "window"])
def test_ranks_with_a_gpu_each(dtype: Any, schedule: Any, name: str) -> None:
    check(2, dtype, schedule, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)
@pytest.mark.parametrize("schedule", ["ring", "gather", ("heads", 2)], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "sinks", "window"])
@pytest.mark.parametrize("B", [1, 2])
def test_ranks_with_a_gpu_each_in_groups(B: int, dtype: Any, schedule: Any, name: str) -> None:
    with in_groups():
        check(B, dtype, schedule, name)


def check(B: int, dtype: Any, schedule: Any, name: str) -> None:
    """Compare four ranks with the oracle; the window leaves queries without keys."""
    given: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": True},
        "sinks": {"sinks": np.linspace(-1, 2, 4).astype(np.float32), "causal": True},
        "window": {"window": (20, 3), "kv_lengths": [90, 150][:B]},
    }
    options = given[name]
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((B, heads, 170, 24)).astype(dtype) for heads in (4, 2, 2, 4)
    )
    layout = Layout.zigzag(170, 4)
    check_once(AttentionCase(q, k, v, dout, None, options), layout, layout, schedule=schedule)
