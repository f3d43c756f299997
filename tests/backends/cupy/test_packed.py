"""Packed sequences on CuPy arrays: where the offsets are looked for, without a GPU."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, settle, values_at
from tests.backends.cupy.test_call import PLANNING, forbid
from tileattn.call.sequences import FAR

HQ, HKV, T, D, S = 6, 2, 90, 24, 3


def call(gpu: Machine, **options: Any) -> Any:
    """Call both passes; give the parameters of the last kernel of each."""
    q, out = (gpu.array((HQ, T, D), np.float16) for _ in range(2))
    k = gpu.array((HKV, T, D), np.float16)
    gpu.launches.clear()
    attention = tileattn.forward(q, k, k, **options)
    of_forward = gpu.launches[-1][-1]
    tileattn.backward(out, q, k, k, *attention, **options)
    return of_forward, gpu.launches[-1][-1]


def test_offsets_of_each_call_are_read_where_they_are(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed of them, nor waited for; a second call plans nothing."""
    for n in range(2):
        queries, keys = (gpu.array((S + 1,), np.int64) for _ in range(2))
        for params in call(gpu, cu_seqlens_q=queries, cu_seqlens_k=keys):
            assert params["cu_seqlens_q"] == queries.data.ptr
            assert params["cu_seqlens_k"] == keys.data.ptr
            assert params["kv_lengths"] == params["q_offset"] == 0
            assert (params["length"], params["offset"]) == (FAR, -(1 << 62))
        if n == 0:
            forbid(monkeypatch, *PLANNING)
    assert gpu.uploads == []


def test_offsets_on_the_host_are_stored_by_each_call(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ones too: nothing is uploaded, and a call that was made before plans nothing."""
    for middle in (40, 50, 40, 50):
        for params in call(gpu, cu_seqlens_q=[0, 40, middle, T]):
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                assert values_at(params[name], (S + 1,)) == [0, 40, middle, T]
        if middle == 50:
            forbid(monkeypatch, *PLANNING)
    assert gpu.uploads == gpu.sent == []


def test_offsets_that_come_back_stay_on_the_device(gpu: Machine) -> None:
    options = {"cu_seqlens_q": [0, 40, 40, T]}
    settle(gpu, lambda: call(gpu, **options))
    sent = len(gpu.sent)
    gpu.started.clear()
    for params in call(gpu, **options):
        assert values_at(params["cu_seqlens_q"], (S + 1,)) == [0, 40, 40, T]
        assert params["cu_seqlens_q"] in {x.address for x in gpu.sent}
    assert "store_values" not in gpu.started
    assert gpu.uploads == []
    assert len(gpu.sent) == sent


def test_lengths_may_be_on_the_device_alone(gpu: Machine) -> None:
    """Kernels align queries with the last key there; given positions stay as they are."""
    for more in ({}, {}, {"q_offset": [0, 1, 2]}):
        lengths = gpu.array((S,), np.int64)
        options = {"cu_seqlens_q": [0, 40, 40, T], "kv_lengths": lengths, **more}
        for params in call(gpu, **options):
            assert params["kv_lengths"] == lengths.data.ptr
            assert params["cu_seqlens_q"] != 0
            assert (params["q_offset"] != 0) == bool(more)
            assert more or params["offset"] == -(1 << 62)
