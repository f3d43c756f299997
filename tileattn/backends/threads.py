"""Threads: one pool, one BLAS thread for each worker, and turns that make sums reproducible."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any

import threadpoolctl

from tileattn.state import Scratch

_local = threading.local()


@cache
def worker_count() -> int:
    """Threads that share the work: ``TILEATTN_NUM_THREADS``, or the cores this process may use."""
    wanted = os.environ.get("TILEATTN_NUM_THREADS")
    if wanted is not None:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ValueError(f"TILEATTN_NUM_THREADS is {wanted!r}; a positive integer is accepted")
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    count = max(1, worker_count() - 1)
    return ThreadPoolExecutor(count, thread_name_prefix="tileattn", initializer=_limit_worker)


@cache
def _blas() -> list[Any]:
    """Find the BLAS libraries of this process, once: the search is slow."""
    return list(threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


class _SingleThreadedBlas:
    """Holds BLAS to one thread while some call runs; calls may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._before: list[int] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._calls == 0:
                self._before = [library.get_num_threads() for library in _blas()]
                _set_threads([1] * len(self._before))
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0:
                _set_threads(self._before)


def _set_threads(counts: list[int]) -> None:
    """Set the threads of every BLAS library.

    From 3.8 on, threadpoolctl obeys one thread only; the lock of the caller takes its place.
    """
    for library, count in zip(_blas(), counts, strict=True):
        clear = getattr(library, "clear_controlling_thread", None)
        if clear is None:
            library.set_num_threads(count)
            continue
        clear(force=True)
        library.set_num_threads(count)
        clear(force=True)


def _limit_worker() -> None:
    """Hold BLAS to one thread for calls from this worker, where the limit is one of the thread."""
    for library in _blas():
        if getattr(library, "threading_layer", None) == "openmp":
            library.set_num_threads(1)


single_threaded_blas = _SingleThreadedBlas()


def run(tasks: Sequence[Callable[[], None]], parallel: bool = True) -> None:
    """Run tasks on the workers, in order of their start; the first error stops the rest.

    Parameters
    ----------
    tasks : sequence of callable
        What is to be done, the longest first.
    parallel : bool
        False runs them here one after another, which small problems are better off with.

    Raises
    ------
    BaseException
        What the first failing task raised, after every running task has come to its end.
    """
    with single_threaded_blas:  # also for one task: bits must not depend on what runs beside it
        if not parallel or len(tasks) < 2:
            for task in tasks:
                task()
        else:
            _run_on_workers(tasks)


def _run_on_workers(tasks: Sequence[Callable[[], None]]) -> None:
    iterator = iter(tasks)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not failures:
                with lock:
                    task = next(iterator, None)
                if task is None:
                    return
                task()
        except BaseException as failure:
            failures.append(failure)

    count = min(worker_count(), len(tasks)) - 1
    helpers = [_pool().submit(copy_context().run, work) for _ in range(count)]
    work()
    for helper in helpers:
        if not helper.cancel():  # one that has not begun, the pool being busy, is not needed
            helper.result()
    if failures:
        raise failures[0]


class Turns:
    """Lets parallel tasks add to shared rows in the order of the tasks.

    Task ``n`` adds to row block ``i`` only after task ``n - 1`` has passed it, so a sum has the
    same order of terms, and the same bits, however many threads there are. Each task must take its
    row blocks in ascending order, and tasks must be started in ascending order.

    Parameters
    ----------
    tasks : int
        How many tasks there are.
    """

    def __init__(self, tasks: int) -> None:
        self._passed = [0] * tasks
        self._changed = threading.Condition()
        self._broken = False

    def wait(self, task: int, row_block: int) -> None:
        """Wait until every earlier task has passed a row block."""
        if task == 0:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._passed[task - 1] > row_block)
            if self._broken:
                raise RuntimeError("another task of this call has failed")

    def pass_to(self, task: int, row_block: int) -> None:
        """Say that a task will not touch row blocks below ``row_block`` any more."""
        with self._changed:
            self._passed[task] = row_block
            self._changed.notify_all()

    def break_off(self) -> None:
        """Wake all who wait; their task fails."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


def thread_scratch() -> Scratch:
    """Tile buffers of the current thread, kept from call to call."""
    if not hasattr(_local, "scratch"):
        _local.scratch = Scratch()
    scratch: Scratch = _local.scratch
    return scratch
