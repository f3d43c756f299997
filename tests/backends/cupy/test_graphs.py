"""Graphs of launches on addresses that come back: what they start, and where none is; no GPU."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine
from tests.backends.cupy.test_workspace import inputs
from tileattn.backends.cupy import graphs


def started(gpu: Machine, call: Callable[[], Any]) -> tuple[Any, ...]:
    """Give all that a call asks of the GPU."""
    told: tuple[list[Any], ...] = (gpu.launches, gpu.maps, gpu.attributes, gpu.streams)
    for each in told:
        each.clear()
    call()
    launches = [(*rest, params.tobytes()) for *rest, params in gpu.launches]
    return launches, *map(list, told[1:])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_graph_starts_what_single_launches_do(
    h200: Machine, dtype: Any, deterministic: bool
) -> None:
    given = inputs(h200, dtype)
    call = h200.reusing(lambda: tileattn.backward(**given, deterministic=deterministic))
    expected = started(h200, call)
    assert h200.graphs == []
    for _ in range(3):
        assert started(h200, call) == expected
        assert len(h200.graphs) == 1
    h200.stream = 5
    *same, streams = started(h200, call)
    assert (*same,) == expected[:-1]
    assert streams == [5] * len(expected[-1])
    assert len(h200.graphs) == 1


def test_a_graph_sets_memory_to_zero(h200: Machine) -> None:
    """The machine's memory is full of ones when it is taken."""
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.backward(**given))
    for _ in range(4):
        call()
        flags = h200.launches[-1][-1]["head_flags"]
        assert ctypes.c_uint32.from_address(int(flags)).value == 0


@pytest.mark.parametrize("changed", ["dout", "q", "k", "v", "out", "lse", "results"])
def test_another_address_is_not_that_of_a_graph(h200: Machine, changed: str) -> None:
    given = inputs(h200)
    other = given | {
        name: h200.array(x.shape, x.dtype) for name, x in given.items() if name == changed
    }
    call = h200.reusing(lambda: tileattn.backward(**given))
    changing = h200.reusing(lambda: tileattn.backward(**other))
    for _ in range(3):
        call()
    grads = tileattn.backward(**other) if changed == "results" else changing()
    params = h200.launches[-1][-1]
    written = {f"d{name}": getattr(grads, f"d{name}") for name in "qkv"}
    for name, x in {**other, **written}.items():
        assert params[name] == x.data.ptr
    assert len(h200.graphs) == 1


def test_a_capture_takes_down_single_launches(h200: Machine) -> None:
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.backward(**given))
    h200.capturing = True
    for _ in range(3):
        call()
    assert h200.graphs == []


def test_few_launches_are_no_graph(h200: Machine) -> None:
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.forward(*(given[name] for name in "qkv")))
    for _ in range(3):
        call()
    assert h200.graphs == []


def test_graphs_are_few(h200: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as others come between, more addresses than are remembered have none."""
    monkeypatch.setattr(graphs, "MAX_ENTRIES", 3)
    given = inputs(h200, Nq=3, Nk=5)
    calls = []
    for _ in range(4):
        calls.append(h200.reusing(lambda: tileattn.backward(**given)))
        calls[-1]()
    for call in calls * 3:
        call()
    assert h200.graphs == []
    for call in calls[:2] * 3:
        call()
    assert len(h200.graphs) == 2
