"""The assignment of work tiles on the device: who copies it, and how long it stays; no GPU."""

import ctypes
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy import fake_cupy
from tests.backends.cupy.fake_cupy import Machine
from tileattn.backends.cupy import streams
from tileattn.dispatch import CALLS
from tileattn.kernels.launch.catalog import problem_of
from tileattn.kernels.launch.layout import contiguous_inputs
from tileattn.kernels.launch.plan import plan_forward


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cupy.machine(monkeypatch) as made:
        made.arch = "sm_90a"
        yield made


def arrays(gpu: Machine) -> tuple[Any, Any, Any]:
    q, k, v = (gpu.array((1, heads, 2200, 8), np.float16) for heads in (12, 2, 2))
    return q, k, v  # 144 blocks of 192 queries


def schedules(gpu: Machine) -> list[int]:
    return [int(params["schedule"]) for *_, params in gpu.launches]


def test_the_table_is_copied_once(gpu: Machine) -> None:
    given = arrays(gpu)
    for _ in range(3):
        tileattn.forward(*given, causal=True)
    (table,) = gpu.uploads
    assert schedules(gpu) == 3 * [table.data.ptr]
    problem = replace(
        problem_of("float16", 8), B=1, Hq=12, Hkv=2, Nq=2200, Nk=2200, window=(None, 0)
    )
    layout = contiguous_inputs(problem).with_contiguous_results(problem, "forward")
    plan = plan_forward(problem, layout, gpu.device_of(0))
    expected = plan.constants["schedule"].array()
    there = (ctypes.c_int32 * expected.size).from_address(table.data.ptr)
    assert list(there) == expected.ravel().tolist()
    assert {int(params["head_groups"]) for *_, params in gpu.launches} == {
        plan.fields["head_groups"]
    }


def test_lengths_make_a_table_of_their_own(gpu: Machine) -> None:
    given = arrays(gpu)
    for length in (2200, 1500, 1500):
        tileattn.forward(*given, causal=True, kv_lengths=[length])
    assert len(gpu.uploads) == 2
    assert schedules(gpu) == [gpu.uploads[n].data.ptr for n in (0, 1, 1)]


def test_explain_says_so(gpu: Machine) -> None:
    given = arrays(gpu)
    clause = "query blocks differ in length: they are assigned in advance, the longest first"
    assert clause in tileattn.explain(*given, causal=True).reasons
    assert not any("assigned" in reason for reason in tileattn.explain(*given).reasons)
    assert gpu.uploads == []


def test_a_first_call_in_a_capture_does_without(gpu: Machine) -> None:
    """Also where it would have been repeated: the calls after the capture have their table."""
    given = arrays(gpu)
    gpu.capturing = True
    for _ in range(2):
        tileattn.forward(*given, causal=True)
    gpu.capturing = False
    for _ in range(2):
        tileattn.forward(*given, causal=True)
    (table,) = gpu.uploads
    assert schedules(gpu) == [0, 0, table.data.ptr, table.data.ptr]


def test_equal_blocks_are_remembered_from_a_capture(gpu: Machine) -> None:
    given = arrays(gpu)
    gpu.capturing = True
    tileattn.forward(*given)
    (known,) = CALLS.values()
    assert known.cached_launch is not None


@pytest.mark.parametrize(("captured", "stream"), [(False, 0), (True, 0), (False, 7)])
def test_a_graph_and_another_stream_keep_the_table(
    gpu: Machine, captured: bool, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they may read it, what a plan owns outlives the plan's place in the memo."""
    monkeypatch.setattr(streams, "_kept", {})
    given = arrays(gpu)
    for _ in range(2):  # the second one is a cached launch
        tileattn.forward(*given, causal=True)
        gpu.capturing, gpu.stream = captured, stream
    table = weakref.ref(gpu.uploads.pop())
    CALLS.clear()
    gc.collect()
    assert (table() is not None) == (captured or stream > 0)
