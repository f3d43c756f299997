"""Ctrl-C, forks, the interpreter's end and calls within calls: nothing hangs, nothing stays."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import tileattn
from tests.backends.disturbing import (
    BLAS_THREADS,
    ROOT,
    in_another_thread,
    interrupt,
    interrupt_at,
    on_alarm,
    on_posix,
    python,
)
from tileattn import BlockMask
from tileattn.backends import threads
from tileattn.backends.numpy import blas


@pytest.fixture(autouse=True)
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have two workers, and a number of BLAS threads that shows whether it was given back."""
    monkeypatch.setattr(threads, "worker_count", lambda: 2)
    threads._crew.cache_clear()
    faulthandler.dump_traceback_later(120, exit=True)  # the main thread cannot watch itself
    with threadpoolctl.threadpool_limits(BLAS_THREADS, "blas"):
        yield
    faulthandler.cancel_dump_traceback_later()


# --- interrupts -----------------------------------------------------------------------------------


def blas_threads() -> list[int]:
    return [library.get_num_threads() for library in blas._libraries(of_thread=False)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_at_any_bytecode_leaves_nothing_behind(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a ``finally`` or of taking a lock, too."""
    monkeypatch.setattr(threads, "worker_count", lambda: workers)
    before, done = blas_threads(), [0] * 3
    sums = threads.OrderedSums(3)

    def task(n: int) -> None:
        with sums.task(n) as turn:
            turn.wait(0)
            done[n] += 1

    def call() -> None:
        nonlocal sums
        sums = threads.OrderedSums(3)
        threads.run([partial(task, n) for n in range(3)], blas.single_threaded)

    step = 0
    while interrupt_at(step, (blas, threads), call):
        assert blas_threads() == before, f"after an interrupt at step {step}"
        done[:] = [0] * 3
        in_another_thread(call)
        assert done == [1] * 3
        call()
        assert done == [2] * 3
        assert blas_threads() == before
        step += 1
    assert step > 100


@on_posix
def test_interrupts_and_forks_at_random_moments() -> None:
    """The short version of what ``python -m tools.stress_threads`` does for minutes."""
    command = [sys.executable, "-m", "tools.stress_threads", "--interrupts=120", "--forks=12"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@on_posix
def test_an_interrupt_stops_the_tasks_that_have_not_begun() -> None:
    started: list[int] = []

    def task(n: int) -> None:
        started.append(n)
        if n == 1:
            os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.005)

    with on_alarm(interrupt), pytest.raises(KeyboardInterrupt):
        threads.run([partial(task, n) for n in range(2000)])
    assert 1 in started
    assert len(started) < 2000
    reached = len(started)
    time.sleep(0.05)
    assert len(started) == reached


# --- forks and the end --------------------------------------------------------------------------

PREPARE = """
import atexit, os, threading
import numpy as np
import tileattn
from tileattn.backends import threads
from tileattn.backends.numpy import blas

q = np.random.default_rng(0).normal(size=(1, 4, 500, 32)).astype(np.float32)
def call():
    return tileattn.forward(q, q, q).out.tobytes()
def number():
    return [library.get_num_threads() for library in blas._libraries(of_thread=False)]
"""


@on_posix
def test_the_child_of_a_fork_has_its_own_threads_and_blas_its_own_number() -> None:
    """Forked by one thread while another is in the middle of a call."""
    program = """
    os.environ["TILEATTN_BACKEND"] = "numpy"
    from tileattn.backends.numpy import small_scores
    before, expected = number(), call()
    entered, leave, norm = threading.Event(), threading.Event(), small_scores.row_norms
    def held_up(*arguments):
        entered.set()
        leave.wait(30)
        return norm(*arguments)
    small_scores.row_norms = held_up
    user = threading.Thread(target=call)
    user.start()
    entered.wait(30)
    child = os.fork()
    if not child:
        threading.Timer(20, os._exit, (2,)).start()
        small_scores.row_norms = norm
        both = threading.Barrier(2)
        right = [number() == before, call() == expected]
        threads.run([lambda: both.wait(10)] * 2)
        os._exit(not all([*right, number() == before]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    leave.set()
    user.join()
    assert number() == before
    """
    assert python(PREPARE, program) == "0\n"


TASKS = "threads.run([task, leave.wait])"  # the main thread waits for both
TOGETHER = "threads.together(work, 2, stopped.set)"  # and here it does the same as the other


@on_posix
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("call", [TASKS, TOGETHER])
def test_a_child_does_not_wait_for_threads_that_it_lacks(call: str, interrupted: bool) -> None:
    """Forked in a signal handler, which ran while the main thread was inside a call."""
    error = "KeyboardInterrupt" if interrupted else "RuntimeError"
    program = f"""
    import signal
    expected, children = call(), []
    helped, leave, stopped = threading.Event(), threading.Event(), threading.Event()
    def handler(*_):
        children.append(os.fork())
        leave.set()
        if not children[0]:
            threading.Timer(20, os._exit, (2,)).start()
            if {interrupted}:
                raise KeyboardInterrupt
    def task():
        os.kill(os.getpid(), signal.SIGALRM)
        leave.wait(30)
    def work():
        if threading.current_thread() is threading.main_thread():
            helped.wait(30)
            task()
        else:
            helped.set()
            leave.wait(30)
    signal.signal(signal.SIGALRM, handler)
    raised = None
    try:
        {call}
    except BaseException as error:
        raised = type(error).__name__
    if not children[0]:
        os._exit(raised != "{error}" or call() != expected or {call == TOGETHER} > stopped.is_set())
    print(raised, os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
    """
    assert python(PREPARE, program) == "None 0\n"


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("earlier", ["pass", "call()"])
def test_calls_when_the_interpreter_ends(earlier: str) -> None:
    """By then no thread can be started; those that have begun before may still be there."""
    program = f"""
    def user():
        threading.main_thread().join()
        print("thread", call() == serial, number() == before)
    atexit.register(lambda: print("exit", call() == serial, number() == before))
    before = number()
    threads.worker_count = lambda: 1
    serial = call()
    threads.worker_count = lambda: 2
    {earlier}
    threading.Thread(target=user).start()
    """
    assert python(PREPARE, program) == "thread True True\nexit True True\n"


# --- calls within calls -------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("N", [40, 600])
def test_a_predicate_may_call_the_package(N: int) -> None:
    """A call within a call has tiles of its own."""
    q, k, v, dout = np.random.default_rng(0).normal(size=(4, 1, 2, N, 16))
    other = np.random.default_rng(1).normal(size=(1, 2, 50, 16))
    nested: list[Any] = []

    def plain(b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a predicate's arguments
        return (i + j) % 3 > 0

    def calling(b: Any, h: Any, i: Any, j: Any) -> Any:
        i = np.asarray(i)  # which cannot be traced: it is called for blocks of pairs
        saved = tileattn.forward(other, other, other)
        nested.append(tileattn.backward(other, other, other, other, *saved).dq)
        return plain(b, h, i, j)

    def both(visible: Any) -> Any:
        mask = BlockMask.from_predicate(visible, (1, 1, N, N), (128, 128))
        saved = tileattn.forward(q, k, v, block_mask=mask)
        return *saved, *tileattn.backward(dout, q, k, v, *saved, block_mask=mask)[:3]

    expected, saved = both(plain), tileattn.forward(other, other, other)
    for ours, theirs in zip(both(calling), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    alone = tileattn.backward(other, other, other, other, *saved).dq
    assert nested
    for dq in nested:
        np.testing.assert_array_equal(dq, alone)


@on_posix
@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("N", [40, 600])
def test_a_signal_handler_may_call_the_package(N: int) -> None:
    q = np.random.default_rng(0).normal(size=(1, 2, N, 16))
    forward = partial(tileattn.forward, q, q, q)
    expected, results, nested = forward(), [], []
    with on_alarm(lambda: nested.append(forward())):
        for n in range(40):
            signal.setitimer(signal.ITIMER_REAL, 0.0001 * (n + 1))
            while len(nested) <= n:
                results.append(forward())
    for result in (*results, *nested):
        np.testing.assert_array_equal(result.out, expected.out)
        np.testing.assert_array_equal(result.lse, expected.lse)
