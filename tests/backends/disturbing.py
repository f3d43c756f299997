"""How tests of both CPU backends interrupt calls, and run programs that fork or end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLAS_THREADS = 3

on_posix = pytest.mark.skipif(
    not hasattr(os, "fork") or not hasattr(signal, "setitimer"),
    reason="needs os.fork and signal.setitimer, which Windows lacks",
)


def python(program: str, *parts: str) -> str:
    """Run a program with two workers; what it prints."""
    settings = {
        "TILEATTN_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": str(BLAS_THREADS),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore::DeprecationWarning",  # of Python 3.12: forks beside threads
    }
    whole = "\n".join(map(textwrap.dedent, (program, *parts)))
    command = [sys.executable, "-c", whole]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def interrupt_at(step: int, modules: tuple[ModuleType, ...], work: Callable[[], Any]) -> bool:
    """Do some work with an interrupt before a bytecode of these modules; whether it came.

    The bytecodes that this thread runs are counted, those of the tasks not.
    """
    left, files = step, {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 tells of no bytecode
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def in_another_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the next call hangs"


@contextmanager
def on_alarm(handler: Callable[[], Any]) -> Iterator[None]:
    """Handle SIGALRM."""
    old = signal.signal(signal.SIGALRM, lambda *_: handler())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def interrupt() -> None:
    raise KeyboardInterrupt
