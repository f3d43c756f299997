"""Ctrl-C, forks and spawns while LLVM compiles or kernels run: nothing hangs, nothing stays."""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

import tileattn
from tests.arrays import normal
from tests.backends.disturbing import (
    in_another_thread,
    interrupt,
    interrupt_at,
    on_alarm,
    on_posix,
    python,
)
from tileattn.backends import threads
from tileattn.backends.llvm import call, execute, plain, tasks
from tileattn.call.prepared import CALLS

SIZES = (1, 2, 1, 200, 300, 32, 24)  # enough work for threads


@pytest.fixture(autouse=True)
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have two workers, and end a test that hangs."""
    monkeypatch.setattr(threads, "worker_count", lambda: 2)
    threads._crew.cache_clear()
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def loaded_afresh() -> Iterator[None]:
    """Load the modules of a test whose functions are replaced, and forget them after it."""
    execute.load.cache_clear()
    yield
    execute.load.cache_clear()


def forward() -> list[bytes]:
    q, k, v, _ = normal(SIZES)
    return [x.tobytes() for x in tileattn.forward(q, k, v, causal=True, backend="llvm")]


def both_passes() -> list[bytes]:
    q, k, v, dout = normal(SIZES)
    saved = tileattn.forward(q, k, v, causal=True, backend="llvm")
    grads = tileattn.backward(dout, q, k, v, *saved, causal=True, backend="llvm")
    return [x.tobytes() for x in (*saved, *grads[:3])]


# --- interrupts -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_an_interrupt_at_any_bytecode_leaves_nothing_behind(first: bool) -> None:
    """Interrupt the first call of its kind, or a later one."""
    expected: list[bytes] = forward()
    others: list[list[bytes]] = []
    step = 0

    def interrupted() -> bool:
        if first:
            CALLS.clear()
            execute.load.cache_clear()
        return interrupt_at(step, (call, plain, execute, threads), forward)

    while interrupted():
        in_another_thread(lambda: others.append(forward()))
        assert forward() == expected, f"after an interrupt at step {step}"
        assert others.pop() == expected
        step += 1
    assert step > 100


@pytest.mark.usefixtures("loaded_afresh")
def test_a_kernel_is_left_after_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an interrupt comes through in the middle of a long call."""
    expected, entered = both_passes(), [0]
    compiled = execute._functions

    def counting(*key: Any) -> Any:
        def counted(function: Any, *addresses: int) -> None:
            entered[0] += 1
            function(*addresses)

        return [partial(counted, function) for function in compiled(*key)]

    monkeypatch.setattr(execute, "_functions", counting)
    execute.load.cache_clear()
    CALLS.clear()
    assert both_passes() == expected
    at_once = entered[0]
    monkeypatch.setattr(tasks, "_QUOTA", 1)
    CALLS.clear()
    assert both_passes() == expected
    assert entered[0] - at_once > 2 * at_once


@on_posix
@pytest.mark.usefixtures("loaded_afresh")
def test_an_interrupt_stops_the_tasks_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def kernel(_params: int, counter: int, _scratch: int) -> None:
        """Take one task, as a kernel does whose quota is one."""
        started.append(threading.get_ident())
        ctypes.c_int64.from_address(counter).value += 1
        if started.count(threading.main_thread().ident or 0) == 2:
            os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.005)

    q, k, v, _ = normal((40, 2, 1, 200, 300, 32, 24))
    monkeypatch.setattr(execute, "_functions", lambda *_: [kernel])
    with on_alarm(interrupt), pytest.raises(KeyboardInterrupt):
        tileattn.forward(q, k, v, backend="llvm")
    time.sleep(0.05)
    reached = len(started)
    assert 2 <= reached < 100
    time.sleep(0.05)
    assert len(started) == reached


# --- while LLVM compiles --------------------------------------------------------------------------

PREPARE = """
import os, signal, threading, time
import numpy as np
import tileattn
from tileattn.kernels.llvm import compile as compiling

q = np.random.default_rng(0).normal(size=(1, 4, 500, 32)).astype(np.float32)
def call(x=q):
    return tileattn.forward(x, x, x, backend="llvm").out.tobytes()
expected, compiling_now, made = call(), threading.Event(), compiling.object_code
def slow(module):
    compiling_now.set()
    time.sleep(0.3)
    code = made(module)
    time.sleep(0.3)
    return code
compiling.object_code = slow
wide = q.astype(np.float64)
"""


@pytest.fixture
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "cache"))


@on_posix
@pytest.mark.usefixtures("nothing_cached")
def test_a_child_may_call_although_its_parent_was_compiling() -> None:
    program = """
    user = threading.Thread(target=call, args=(wide,))
    user.start()
    compiling_now.wait(30)
    child = os.fork()
    if not child:
        threading.Timer(20, os._exit, (2,)).start()
        compiling.object_code = made
        found = np.frombuffer(call(wide)), np.frombuffer(expected, np.float32)
        # float64 against float32 of the same call: errors of float32 are far below 1e-5 here.
        os._exit(not (call() == expected and np.allclose(*found, atol=1e-5)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    user.join()
    """
    assert python(PREPARE, program) == "0\n"


@on_posix
@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_signal_while_the_main_thread_waits_for_llvm(interrupted: bool) -> None:
    """The handler calls the package, and needs the kernels that are being compiled."""
    program = f"""
    nested = []
    def handler(*_):
        nested.append(call(wide))
        if {interrupted}:
            raise KeyboardInterrupt
    def alarm():
        compiling_now.wait(30)
        os.kill(os.getpid(), signal.SIGALRM)
    signal.signal(signal.SIGALRM, handler)
    threading.Thread(target=alarm).start()
    try:
        print(call(wide) == nested[0])
    except KeyboardInterrupt:
        print("interrupted")
    assert call(wide) == nested[0]
    """
    assert python(PREPARE, program) == ("interrupted\n" if interrupted else "True\n")


# --- other processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # 3.12: forks beside threads
def test_a_pool_of_processes(method: Any) -> None:
    q, k, v, _ = normal(SIZES)
    expected = tileattn.forward(q, k, v, backend="llvm")
    with multiprocessing.get_context(method).Pool(2) as pool:
        calls = [pool.apply_async(tileattn.forward, (q, k, v), {"backend": "llvm"}) for _ in "abcd"]
        for found in (x.get(60) for x in calls):
            np.testing.assert_array_equal(found.out, expected.out)
            np.testing.assert_array_equal(found.lse, expected.lse)
