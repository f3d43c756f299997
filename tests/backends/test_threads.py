"""The pool: every task runs once, the first error is raised, nothing deadlocks."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn.algorithm import spec
from tileattn.backends import threads
from tileattn.backends.threads import OrderedSums, run


@pytest.fixture(params=[1, 2, 3, 5])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Share the work among this many threads."""
    count: int = request.param
    use_workers(monkeypatch, count)
    yield count
    threads._crew.cache_clear()


def use_workers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(threads, "worker_count", lambda: count)
    threads._crew.cache_clear()


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Fail, instead of hanging, where a call does not come back."""
    results: list[Any] = []

    def keep() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "the call hangs"
    return results[0]


def test_every_task_runs_once(workers: int) -> None:
    done = [0] * 40

    def task(n: int) -> None:
        done[n] += 1

    run([partial(task, n) for n in range(40)])
    assert done == [1] * 40
    assert workers


def test_no_task_and_one_task(workers: int) -> None:
    done: list[int] = []
    run([])
    run([lambda: done.append(1)])
    assert done == [1]
    assert workers


def test_the_first_error_is_raised_and_stops_the_rest(workers: int) -> None:
    started = []

    def task(n: int) -> None:
        started.append(n)
        if n == 3:
            raise KeyError("task 3")
        time.sleep(0.002)

    result = within(20, lambda: run([partial(task, n) for n in range(200)]))
    assert isinstance(result, KeyError)
    assert result.args == ("task 3",)
    assert len(started) < 200 - workers


@pytest.mark.parametrize("skipped", [0, 2])
def test_sums_of_parallel_tasks_are_ordered(workers: int, skipped: int) -> None:
    """Some tasks add nothing to some block."""
    order: list[list[int]] = [[], [], []]
    sums = OrderedSums(30)

    def adds(n: int, block: int) -> bool:
        return not skipped or (n + block) % skipped == 0

    def task(n: int) -> None:
        with sums.task(n) as turn:
            for block in filter(partial(adds, n), range(3)):
                turn.begin(block)
                if (n + block) % 4:
                    time.sleep(0.0002 * (n % 3))
                turn.wait(block)
                order[block].append(n)

    assert within(20, lambda: run([partial(task, n) for n in range(30)])) is None
    assert order == [[n for n in range(30) if adds(n, block)] for block in range(3)]
    assert workers


def test_a_task_that_skips_a_block_does_not_release_it() -> None:
    """Task 1 goes on from block 0 to block 5; of block 3 it knows nothing."""
    sums, waited = OrderedSums(3), threading.Event()

    def third() -> None:
        sums.wait(2, 3)
        waited.set()

    first, second = threads._Turn(sums, 0), threads._Turn(sums, 1)
    first.wait(0)
    first.begin(3)
    second.wait(0)
    second.begin(5)
    waiting = threading.Thread(target=third, daemon=True)
    waiting.start()
    assert not waited.wait(0.2)
    first.wait(3)
    first.begin(6)
    second.wait(3)
    second.begin(6)
    assert waited.wait(10)


def test_the_error_of_the_task_that_failed_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a task that waited for it is told of the failure, and ends, first."""
    use_workers(monkeypatch, 2)
    sums, waits, tell = OrderedSums(2), threading.Event(), OrderedSums.break_off
    told: list[OrderedSums] = []

    def break_off(self: OrderedSums) -> None:
        told.append(self)
        tell(self)
        time.sleep(0.3 if len(told) == 1 else 0)

    def task(n: int) -> None:
        with sums.task(n) as turn:
            if n == 0:
                waits.wait(10)
                raise MemoryError("task 0")
            waits.set()
            turn.wait(0)

    monkeypatch.setattr(OrderedSums, "break_off", break_off)
    result = within(20, lambda: run([partial(task, n) for n in range(2)]))
    assert isinstance(result, MemoryError)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("at", [0, 1, 7])
def test_an_error_in_one_tile_does_not_hang(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The tasks of a backward pass wait for each other; the error of the one that fails shows."""
    q, k, v, dout = np.random.default_rng(0).normal(size=(4, 1, 2, 1100, 48))
    out, lse = tileattn.forward(q, k, v, backend="numpy")
    backward = partial(tileattn.backward, dout, q, k, v, out, lse, backend="numpy")
    tile_of = spec.backward_tile
    lock, calls = threading.Lock(), []

    def fails(*args: Any) -> Any:
        with lock:
            calls.append(args)
            number = len(calls)
        if number == at + 1:
            raise MemoryError(at)
        return tile_of(*args)

    monkeypatch.setattr("tileattn.algorithm.spec.backward_tile", fails)
    result = within(30, backward)
    assert isinstance(result, MemoryError)
    assert result.args == (at,)
    monkeypatch.setattr("tileattn.algorithm.spec.backward_tile", tile_of)
    assert np.isfinite(backward().dq).all()


def test_a_busy_pool_does_not_hold_up_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that finishes alone does not wait for helpers that have not begun."""
    use_workers(monkeypatch, 2)
    release, busy = threading.Event(), threading.Event()

    def slow() -> None:
        busy.set()
        release.wait(20)

    slow_call = threading.Thread(target=lambda: run([slow, slow]))
    slow_call.start()
    try:
        assert busy.wait(10)
        done: list[int] = []
        assert within(10, lambda: run([partial(done.append, n) for n in range(4)])) is None
        assert sorted(done) == [0, 1, 2, 3]
    finally:
        release.set()
        slow_call.join()
        threads._crew.cache_clear()


def test_tasks_run_in_the_callers_thread_where_none_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As at the end of the interpreter from Python 3.12 on."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    use_workers(monkeypatch, 2)
    threads._deputy.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[int] = []
    run([partial(done.append, n) for n in range(4)])
    assert done == [0, 1, 2, 3]
    threads._crew.cache_clear()


AT_EXIT = """
import atexit
import numpy
import tileattn
q = numpy.zeros((1, 1, 300, 32), numpy.float32)
atexit.register(lambda: print(tileattn.forward(q, q, q, backend="{}").out.shape))
"""


@pytest.mark.parametrize("name", ["auto", "numpy", "llvm"])
def test_the_first_call_of_a_process_may_come_at_its_exit(name: str) -> None:
    """By then concurrent.futures cannot be imported, and from Python 3.12 on no thread started."""
    if name == "llvm" and (reason := tileattn.available_backends()[name]):
        pytest.skip(f"{name}: {reason}")
    environment = {n: x for n, x in os.environ.items() if n != "TILEATTN_BACKEND"}
    command = [sys.executable, "-c", AT_EXIT.format(name)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.stdout == "(1, 1, 300, 32)\n", done.stderr


def test_a_task_may_itself_run_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_workers(monkeypatch, 2)
    done: list[int] = []

    def outer() -> None:
        run([partial(done.append, n) for n in range(3)])

    assert within(10, lambda: run([outer] * 4)) is None
    assert sorted(done) == sorted([0, 1, 2] * 4)
    threads._crew.cache_clear()


@pytest.mark.usefixtures("cpu_backend")
def test_concurrent_calls_of_several_threads_agree_with_one_after_another() -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(3, 2, 2, 300 + 40 * n, 32)).astype(np.float32) for n in range(4)]

    def call(x: Any) -> Any:
        q, k, v = x
        out, lse = tileattn.forward(q, k, v, causal=True)
        return out, lse, *tileattn.backward(out, q, k, v, out, lse, causal=True)[:3]

    expected = [call(x) for x in inputs]
    results: dict[tuple[int, int], Any] = {}

    def user(n: int) -> None:
        for repeat in range(3):
            results[n, repeat] = call(inputs[n])

    users = [threading.Thread(target=user, args=(n,), daemon=True) for n in range(4)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join(60)
    assert len(results) == 12
    for (n, _), result in results.items():
        for ours, theirs in zip(result, expected[n], strict=True):
            np.testing.assert_array_equal(ours, theirs)


# --- how many -----------------------------------------------------------------------------------


@pytest.fixture
def counted_afresh() -> Iterator[None]:
    threads.worker_count.cache_clear()
    yield
    threads.worker_count.cache_clear()


@pytest.mark.usefixtures("counted_afresh")
@pytest.mark.parametrize("value", ["0", "-1", "two", " ", "1.5"])
def test_number_of_threads_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TILEATTN_NUM_THREADS", value)
    message = f"^TILEATTN_NUM_THREADS must be a positive integer; got {value!r}$"
    with pytest.raises(ValueError, match=message):
        threads.worker_count()


@pytest.mark.usefixtures("counted_afresh")
def test_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_NUM_THREADS", "3")
    assert threads.worker_count() == 3
    monkeypatch.delenv("TILEATTN_NUM_THREADS")
    threads.worker_count.cache_clear()
    default = threads.worker_count()
    assert default >= 1
    monkeypatch.setenv("TILEATTN_NUM_THREADS", "")  # as if it were not set
    threads.worker_count.cache_clear()
    assert threads.worker_count() == default
