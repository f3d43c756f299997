"""Graphs of launches on addresses that come back: what they start, and where none is; no GPU."""

import ctypes
import gc
from functools import partial
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, asked_by, values_at
from tests.backends.cupy.test_workspace import inputs
from tileattn.backends.cupy import cached_passes
from tileattn.backends.cupy.executable import Bound
from tileattn.call.prepared import CALLS, SEEN_OFTEN


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_graph_starts_what_single_launches_do(
    h200: Machine, dtype: Any, deterministic: bool
) -> None:
    given = inputs(h200, dtype, Nq=60, Nk=70)
    call = h200.reusing(lambda: tileattn.backward(**given, deterministic=deterministic))
    call()  # the first call allocates its memory differently
    expected = asked_by(h200, call)
    assert h200.graphs == []
    for _ in range(3):
        assert asked_by(h200, call) == expected
        assert len(h200.graphs) == 1
    h200.stream = 5
    *same, streams = asked_by(h200, call)
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


def test_other_values_are_those_of_another_graph(h200: Machine) -> None:
    """On the same addresses: what a signature holds belongs to a plan of its own."""
    given = inputs(h200)
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        *(("scale", x, {"scale": x}) for x in (0.5, 0.25)),
        *(("seed", x, {"seed": x, "dropout_p": 0.5}) for x in (1, 2)),
        *(("length", x, {"kv_lengths": x}) for x in (7, 9)),
    ]
    calls = [h200.reusing(partial(tileattn.backward, **given, **options)) for *_, options in cases]
    for _ in range(SEEN_OFTEN + 3):
        for call, (name, value, _options) in zip(calls, cases, strict=True):
            call()
            assert h200.launches[-1][-1][name] == value
    assert len({int(params["dq"]) for *_, params in h200.launches}) == 1
    assert len(h200.graphs) == len(cases)


def test_another_workspace_is_that_of_another_graph(h200: Machine) -> None:
    given = inputs(h200)
    spaces = [h200.array((1 << 22,), np.uint8) for _ in range(2)]
    calls = [h200.reusing(partial(tileattn.backward, **given, workspace=x)) for x in spaces]
    for _ in range(3):
        for call, x in zip(calls, spaces, strict=True):
            call()
            assert 0 <= h200.launches[-1][-1]["delta"] - x.data.ptr < x.nbytes
    assert len(h200.graphs) == 2


def test_a_capture_takes_down_single_launches(h200: Machine) -> None:
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.backward(**given))
    h200.capturing = True
    for _ in range(3):
        call()
    assert h200.graphs == []


def test_one_launch_is_a_graph_too(h200: Machine) -> None:
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.forward(*(given[name] for name in "qkv")))
    for _ in range(3):
        call()
    assert len(h200.graphs) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("cuGraphCreate", "cuGraphAddMemsetNode", "cuGraphAddKernelNode"),
        *("cuGraphAddDependencies_v2", "graphInstantiate", "graphUpload"),
    ],
)
def test_without_memory_for_a_graph_there_are_single_launches(h200: Machine, name: str) -> None:
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.backward(**given))
    call()
    expected = asked_by(h200, call)
    h200.no_memory.add(name)
    assert asked_by(h200, call) == expected
    assert h200.mode == 0
    assert len(h200.destroyed) == len(h200.graphs)
    h200.no_memory.clear()
    made = len(h200.graphs)
    for _ in range(2):  # it is not tried again
        assert asked_by(h200, call) == expected
        assert len(h200.graphs) == made


def test_an_older_driver_gets_single_launches(h200: Machine) -> None:
    h200.driver = 12020
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.backward(**given))
    for _ in range(3):
        call()
    assert h200.graphs == []


def test_graphs_are_those_of_the_last_calls(h200: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """More addresses in turn than are remembered have none."""
    monkeypatch.setattr(cached_passes, "MOST", 3)
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
    calls[2]()
    calls[3]()  # drops the first
    calls[1]()
    assert len(h200.graphs) == 2
    assert len(cached_passes._met) == 3


def test_graphs_are_dropped_with_their_plan(h200: Machine) -> None:
    before = len(cached_passes._met)
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.backward(**given))
    for _ in range(3):
        call()
    assert len(cached_passes._met) > before
    assert h200.destroyed == []
    CALLS.clear()
    gc.collect()
    assert len(cached_passes._met) == before
    assert h200.destroyed == [1]


def test_two_threads_do_not_launch_one_graph_at_a_time(h200: Machine) -> None:
    """What comes while a graph is launched starts its kernels one by one."""
    given = inputs(h200)
    call = h200.reusing(lambda: tileattn.backward(**given))
    for _ in range(3):
        call()
    expected = asked_by(h200, call)
    [graph] = [x._graph for x in cached_passes._met.values() if isinstance(x, Bound) and x._graph]
    launch, inner = graph.launch, []

    def meanwhile(stream: int) -> None:
        graph.launch = lambda _: pytest.fail("launched twice at a time")
        inner.append(asked_by(h200, call))
        asked_by(h200, lambda: launch(stream))

    graph.launch = meanwhile
    call()
    assert inner == [expected]
    assert len(h200.graphs) == 1


# --- one kernel ---------------------------------------------------------------------------------


def test_one_launch_is_bound_to_addresses_that_come_back(h200: Machine) -> None:
    """It keeps its tensor maps when others are encoded, and is started on any stream."""
    rows = [[inputs(h200, Nq=60, Nk=70)[name] for name in "qkv"] for _ in range(2)]
    calls = [h200.reusing(partial(tileattn.forward, *given)) for given in rows]
    for call in calls * 3:
        call()
    expected = [asked_by(h200, call) for call in calls]
    made = len(h200.encoded)
    for stream in (0, 5, 0):
        h200.stream = stream
        for call, given, (*same, streams) in zip(calls, rows, expected, strict=True):
            *found, where = asked_by(h200, call)
            assert (found, where) == (same, [stream] * len(streams))
            assert [h200.launches[-1][-1][name] for name in "qkv"] == [x.data.ptr for x in given]
    assert len(h200.encoded) == made
    assert {type(x) for x in cached_passes._met.values()} >= {Bound}


def test_a_call_is_not_bound_before_its_assignment_is_there(h200: Machine) -> None:
    """An assignment is not made use of while a stream is captured."""
    q, k, v = (h200.array((1, heads, 3000, 8), np.float16) for heads in (12, 2, 2))
    call = h200.reusing(partial(tileattn.forward, q, k, v, causal=True))
    h200.capturing = True
    for _ in range(3):
        call()
        assert h200.launches[-1][-1]["assignment"] == 0
        h200.planner.work()
    assert h200.sent == []
    h200.capturing = False
    call()
    assert h200.launches[-1][-1]["assignment"] == 0
    assert h200.graphs == []
    for _ in range(3):
        call()
        (table,) = h200.sent
        assert h200.launches[-1][-1]["assignment"] == table.address
        assert len(h200.graphs) == 1


def test_a_graph_stores_the_values_of_its_call(h200: Machine) -> None:
    """A plan that nothing could improve is bound as well."""
    given = inputs(h200)
    lengths: dict[str, Any] = {"kv_lengths": [500, 7], "q_offset": [3, 0]}
    call = h200.reusing(lambda: tileattn.backward(**given, **lengths))
    call()
    expected = asked_by(h200, call)
    h200.planner.asked.pop()[0].set_exception(MemoryError())
    for _ in range(4):
        assert asked_by(h200, call) == expected
        params = h200.launches[-1][-1]
        for name, x in lengths.items():
            assert values_at(params[name], (2,)) == x
        ctypes.memset(int(params["kv_lengths"]), 0xFF, 16)
    assert len(h200.graphs) == 1
    assert h200.sent == []
