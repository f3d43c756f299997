"""Plans with tables, which come when a call repeats: when, and what they keep alive; no GPU."""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, repeat, settle, values_at
from tests.backends.cupy.test_workspace import inputs
from tileattn import BlockMask
from tileattn.backends.cupy import backend, improvement
from tileattn.backends.cupy.executable import Executable
from tileattn.call.prepared import CALLS
from tileattn.kernels.cuda.plan.params import PARAMS, POINTERS, template
from tileattn.kernels.cuda.plan.plan import launch_plan

CAUSAL: dict[str, Any] = {"causal": True}
LENGTHS: dict[str, Any] = {"kv_lengths": [600, 500]}


@pytest.fixture
def gpu(h200: Machine) -> Machine:
    return h200


def arrays(gpu: Machine) -> tuple[Any, Any, Any]:
    """Give arrays whose plan has an assignment: 288 blocks of 128 queries, for 264 groups."""
    q, k, v = (gpu.array((1, heads, 3000, 8), np.float16) for heads in (12, 2, 2))
    return q, k, v


def assignments(gpu: Machine) -> list[int]:
    return [int(params["assignment"]) for *_, params in gpu.launches]


def upper(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i + b > j + h


# --- when ---------------------------------------------------------------------------------------


def test_an_assignment_comes_when_a_call_repeats(gpu: Machine) -> None:
    """For each set of lengths once; nothing waits for it."""
    given, lengths = arrays(gpu), (3000, 1500)
    calls = [partial(tileattn.forward, *given, **CAUSAL, kv_lengths=[n]) for n in lengths]
    for call in calls:
        call()
    assert gpu.planner.asked == []
    repeat(gpu, *calls)  # those of later numbers have plans of their own if they come often
    gpu.launches.clear()
    gpu.planner.work()
    gpu.copying = True
    for call in calls * 2:
        call()
    assert len(gpu.sent) == len(calls)
    assert assignments(gpu) == [0] * 4
    gpu.copying = False
    for call in calls * 2:
        call()
    tables = [x.address for x in gpu.sent]
    assert assignments(gpu)[4:] == tables * 2
    table = np.frombuffer(gpu.sent[0].data, np.int32).reshape(-1, 264)
    assert [*gpu.uploads, *gpu.planner.asked] == []
    assert len(gpu.sent) == len(calls)
    assert table[0].tolist() == list(range(264))
    assert sorted(table[(table >= 0) & (table < 288)]) == list(range(288))


def test_a_capture_takes_what_is_there(gpu: Machine) -> None:
    """Nothing is sent meanwhile: a graph has the first plan, later calls have their table."""
    given = arrays(gpu)
    gpu.capturing = True
    for _ in range(4):
        tileattn.forward(*given, **CAUSAL)
        gpu.planner.work()
    assert gpu.sent == []
    gpu.capturing = False
    tileattn.forward(*given, **CAUSAL)
    for gpu.capturing in (False, True):
        tileattn.forward(*given, **CAUSAL)
    (table,) = gpu.sent
    assert assignments(gpu) == [0] * 5 + [table.address] * 2


def test_without_an_assignment_no_thread_block_begins_late(gpu: Machine) -> None:
    q, k, v = (gpu.array((1, 16, 6000, 64), np.float16) for _ in range(3))
    settle(gpu, partial(tileattn.forward, q, k, v))
    tileattn.forward(q, k, v)
    *first, second = (blocks for _, blocks, *_ in gpu.launches)
    assert {*first} == {132}
    assert second > 132
    assert assignments(gpu) == [0] * len(first) + [gpu.sent[0].address]


@pytest.mark.parametrize(
    "options",
    [LENGTHS | CAUSAL, {"mask_mod": upper}, LENGTHS | {"mask_mod": upper}],
    ids="+".join,
)
@pytest.mark.parametrize("deterministic", [None, False])
def test_a_repeated_call_has_the_numbers_of_its_plan_with_tables(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, options: Any, deterministic: bool | None
) -> None:
    """And kernels find the arrays of that plan at their addresses."""
    plans = []

    def noted(*given: Any, tables: bool = True) -> Any:
        plan = launch_plan(*given, tables=tables)
        plans.extend([plan] * tables)
        return plan

    monkeypatch.setattr(backend, "launch_plan", noted)
    given = inputs(gpu, Nq=1500, Nk=1500, Hq=12, D=8, Dv=8)
    call: Callable[[], Any]
    if deterministic is None:
        call = partial(tileattn.forward, *map(given.get, "qkv"), **options)
    else:
        call = partial(tileattn.backward, **given, **options, deterministic=deterministic)
    settle(gpu, call)
    gpu.launches.clear()
    call()
    (plan,) = plans
    block = np.frombuffer(template(plan.fields, plan.aux, plan.cells), PARAMS)[0]
    expected = [(x.key, x.grid or 1, x.shared_bytes) for x in plan.launches]
    assert [x[:3] for x in gpu.launches] == expected
    numbers = [*(PARAMS.fields or {}).keys() - {*POINTERS}]
    for *_, params in gpu.launches:
        assert [params[name] for name in numbers] == [block[name] for name in numbers]
        for name, x in plan.constants.items():
            assert values_at(params[name], x.shape, x.dtype) == x.array().tolist()


def test_a_workspace_is_enough_for_both_plans(gpu: Machine) -> None:
    """Callers may have it before the plan with tables is there."""
    given = inputs(gpu, Nq=300, Nk=700)
    options: dict[str, Any] = LENGTHS | {"mask_mod": upper}
    q, k, v = (given[name] for name in "qkv")
    space = gpu.array((tileattn.explain(q, k, v, **options).workspace_bytes,), np.uint8)
    for deterministic in (False, True):
        more = options | {"deterministic": deterministic, "workspace": space}
        settle(gpu, partial(tileattn.backward, **given, **more))
        gpu.started.clear()
        tileattn.backward(**given, **more)
        assert not {"store_values", "classify_tiles"} & {*gpu.started}
        params = gpu.launches[-1][-1]
        assert 0 <= params["delta"] - space.data.ptr < space.nbytes
        sent = {x.address for x in gpu.sent}
        assert {int(params[name]) for name in ("kv_lengths", "tile_list")} <= sent


def test_a_larger_plan_is_not_used(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(gpu)

    def larger(*given: Any, tables: bool = True) -> Any:
        plan = launch_plan(*given, tables=tables)
        space = plan.workspace
        return replace(plan, workspace=space._replace(nbytes=space.nbytes + tables * (1 << 20)))

    monkeypatch.setattr(backend, "launch_plan", larger)
    settle(gpu, partial(tileattn.forward, *given, **CAUSAL))
    for _ in range(2):
        tileattn.forward(*given, **CAUSAL)
    assert {*assignments(gpu)} == {0}
    assert gpu.planner.asked == []


@pytest.mark.parametrize("where", ["pool", "plan", "staging", "memory"])
def test_a_call_stays_with_its_first_plan_if_there_is_no_other(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Without memory, for example, or while Python exits; it is not tried again."""
    import cupy

    tried = []

    def fails(*_: Any) -> Any:
        tried.append(where)
        raise {"pool": RuntimeError, "plan": ValueError}.get(where, MemoryError)

    given = arrays(gpu)
    call = gpu.reusing(partial(tileattn.forward, *given, **CAUSAL))
    call()
    with monkeypatch.context() as patch:
        if where == "pool":
            patch.setattr(gpu.planner, "submit", fails)
        elif where == "plan":
            patch.setattr(backend, "launch_plan", fails)
        elif where == "staging":
            patch.setattr(cupy.cuda, "alloc_pinned_memory", fails)
        else:
            pool = SimpleNamespace(malloc=fails)
            patch.setattr(cupy, "get_default_memory_pool", lambda: pool)
        for _ in range(3):
            call()
            gpu.planner.work()
    assert tried == [where]
    for _ in range(3):
        call()
    assert assignments(gpu) == [0] * 7
    assert [*gpu.planner.asked, *gpu.sent] == []
    assert len(gpu.graphs) == 1


def test_a_thread_makes_the_plan(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(gpu)
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(improvement, "_pool", lambda: pool)
        for _ in range(2):
            tileattn.forward(*given, **CAUSAL)
        improvement.finish()
        for _ in range(2):
            tileattn.forward(*given, **CAUSAL)
    assert assignments(gpu) == [0, 0, 0, gpu.sent[0].address]


def test_a_thread_may_give_up_while_another_asks(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = partial(tileattn.forward, *arrays(gpu), **CAUSAL)
    call()
    calls = [call]

    def submit(_: Any) -> Any:
        while calls:
            calls.pop()()
        raise RuntimeError

    monkeypatch.setattr(gpu.planner, "submit", submit)
    call()
    assert assignments(gpu) == [0, 0, 0]


# --- what is kept -------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("expressed", [False, True])
def test_a_pending_plan_keeps_no_mask(gpu: Machine, expressed: bool) -> None:
    q = gpu.array((1, 16, 3000, 64), np.float16)
    if expressed:
        mask = BlockMask.from_predicate(upper, (1, 16, 3000, 3000))
    else:
        mask = BlockMask(np.tril(np.ones((24, 24), bool)), (128, 128))
    for _ in range(3):
        tileattn.forward(q, q, q, block_mask=mask)
    assert len(gpu.planner.asked) == 1
    known = weakref.ref(mask)
    del mask
    assert known() is None
    gpu.planner.work()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("fails", [False, True])
def test_plans_keep_no_array_of_the_caller(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Nor do they keep themselves: executables go with the call that they belong to."""
    executables = []
    init = Executable.__init__

    def noted(self: Executable, *given: Any) -> None:
        init(self, *given)
        executables.append(weakref.ref(self))

    monkeypatch.setattr(Executable, "__init__", noted)
    given = arrays(gpu)
    known = [weakref.ref(x) for x in given]
    for _ in range(3):
        tileattn.forward(*given, **CAUSAL)
    if fails:
        monkeypatch.setattr(backend, "launch_plan", lambda *_: 1 // 0)
    gpu.planner.work()
    for _ in range(3):
        tileattn.forward(*given, **CAUSAL)
    del given
    assert [x() for x in known] == [None] * 3
    assert len(executables) == 2 - fails
    CALLS.clear()
    assert {x() for x in executables} == {None}
