"""Threads: who runs the tasks of a call, and sums whose order is fixed.

A ``KeyboardInterrupt`` arises in the main thread only. So tasks that wait for one another never run
there: another thread, the deputy, runs a parallel call for it.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache
from queue import SimpleQueue

Work = Callable[[], None]


@cache
def worker_count() -> int:
    """Threads that share the work: ``TILEATTN_NUM_THREADS``, or the cores this process may use."""
    wanted = os.environ.get("TILEATTN_NUM_THREADS")
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ValueError(f"TILEATTN_NUM_THREADS is {wanted!r}; a positive integer is accepted")
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def call(work: Work) -> None:
    """Do some work."""
    work()


def run(
    tasks: Sequence[Work], parallel: bool = True, within: Callable[[Work], None] = call
) -> None:
    """Run tasks on the workers, in order of their start; the first error stops the rest.

    Parameters
    ----------
    tasks : sequence of callable
        What is to be done, the longest first.
    parallel : bool
        False runs them here one after another, which small problems are better off with.
    within : callable
        Does the work that it is given; each thread runs its tasks inside of one call of it.

    Raises
    ------
    BaseException
        What the first failing task raised, or an interrupt of this thread, after every running
        task has come to its end.
    """
    if not parallel or min(len(tasks), worker_count()) < 2:
        within(lambda: _run_here(tasks))
        return
    work = _SharedWork(tasks, within)
    if threading.current_thread() is threading.main_thread():
        _leave_to_deputy(work)
    else:
        work.run()
    if work.failures:
        raise work.cause()


def start(task: Work, count: int) -> list[Future[None]]:
    """Have so many workers run a task, as many as there are threads for; none is waited for."""
    started: list[Future[None]] = []
    with suppress(RuntimeError):  # the interpreter shuts down, or there is no thread to be had
        started.extend(_pool().submit(task) for _ in range(count))
    return started


def _run_here(tasks: Sequence[Work]) -> None:
    for task in tasks:
        task()


class _SharedWork:
    """Tasks that several threads take one after another, in their order."""

    def __init__(self, tasks: Sequence[Work], within: Callable[[Work], None]) -> None:
        self.failures: list[BaseException] = []  # the first stops the rest
        self._helpers = min(worker_count(), len(tasks)) - 1
        self._tasks = iter(tasks)
        self._within = within
        self._changed = threading.Condition()
        self._helping = 0
        self._over = False

    def run(self) -> None:
        """Take tasks, together with helpers, until no task runs any more."""
        for _ in range(self._helpers):
            try:
                _pool().submit(copy_context().run, self._help)
            except RuntimeError:  # the interpreter shuts down, or there is no thread to be had
                break
        self._take()
        with self._changed:
            self._over = True  # a helper that has not begun, the pool being busy, is not needed
            self._changed.wait_for(lambda: not self._helping)

    def cause(self) -> BaseException:
        """Return the first failure; that of a task that waited for another may be noted before."""
        causes = [x for x in self.failures if not isinstance(x, _OtherTaskFailedError)]
        cause = (causes or self.failures)[0]
        self.failures.clear()
        return cause

    def _help(self) -> None:
        with self._changed:
            if self._over:
                return
            self._helping += 1
        self._take()
        with self._changed:
            self._helping -= 1
            self._changed.notify_all()

    def _take(self) -> None:
        try:
            self._within(self._take_in_order)
        except BaseException as failure:
            self.failures.append(failure)

    def _take_in_order(self) -> None:
        while not self.failures:
            with self._changed:
                task = next(self._tasks, None)
            if task is None:
                return
            task()


class _Deputy:
    """A thread that runs the calls of the main thread, where no interrupt can arise."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Work] = SimpleQueue()
        self._started = False

    def start(self) -> None:
        """Start the thread where it does not run yet; one too many does no harm."""
        if not self._started:
            threading.Thread(target=self._serve, name="tileattn-deputy", daemon=True).start()
            self._started = True

    def put(self, call: Work) -> None:
        """Hand over a call; calls run one after another."""
        self._calls.put(call)

    def wait(self, lock: threading.Lock) -> None:
        """Take a lock, as soon as the deputy has released it."""
        while not lock.acquire(timeout=0.1):  # Windows shows interrupts between waits only
            if self is not _deputy():  # in a child that a signal handler has forked
                raise RuntimeError("the process was forked during this call")

    def _serve(self) -> None:
        while True:
            self._calls.get()()


def _leave_to_deputy(work: _SharedWork) -> None:
    """Wait while the deputy works; after an interrupt, until it has stopped."""
    deputy, context = _deputy(), copy_context()
    try:
        deputy.start()
    except RuntimeError:  # the interpreter shuts down, or there is no thread to be had
        work.run()
        return
    working, ended = threading.Lock(), threading.Lock()

    def call() -> None:
        if not working.acquire(blocking=False):
            return  # interrupted before it began
        try:
            context.run(work.run)
        except BaseException as failure:  # of threads, not of tasks: out of memory, say
            work.failures.append(failure)
        working.release()
        ended.release()

    ended.acquire()
    try:
        deputy.put(call)
        deputy.wait(ended)
    except BaseException:
        work.failures.append(KeyboardInterrupt())  # no further task
        if deputy is _deputy():
            deputy.wait(working)
        raise


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, worker_count() - 1), thread_name_prefix="tileattn")


@cache
def _deputy() -> _Deputy:
    return _Deputy()


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)
    os.register_at_fork(after_in_child=_deputy.cache_clear)


class _OtherTaskFailedError(RuntimeError):
    """Another task of this call, for which this one waits, has failed."""


class OrderedSums:
    """Lets parallel tasks add to shared blocks in the order of the tasks.

    Task ``n`` adds to block ``i`` only after task ``n - 1`` is done with it, so a sum has the same
    order of terms, and the same bits, however many threads there are. Each task must take its
    blocks in ascending order, and tasks must be started in ascending order.

    Parameters
    ----------
    tasks : int
        How many tasks there are.
    """

    def __init__(self, tasks: int) -> None:
        self._done = [0] * tasks  # blocks below this number
        self._changed = threading.Condition()
        self._broken = False

    @contextmanager
    def task(self, number: int) -> "Iterator[_Turn]":
        """Give the turn of one task, which is done with all blocks at the end."""
        turn = _Turn(self, number)
        try:
            yield turn
            turn.wait(sys.maxsize - 1)
            turn.begin(sys.maxsize)
        except BaseException:
            self.break_off()
            raise

    def wait(self, task: int, block: int) -> None:
        """Wait until every earlier task is done with a block."""
        if task == 0:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._done[task - 1] > block)
            if self._broken:
                raise _OtherTaskFailedError

    def finish(self, task: int, block: int) -> None:
        """Say that a task is done with the blocks up to this one, as are all before it."""
        with self._changed:
            self._done[task] = block + 1
            self._changed.notify_all()

    def break_off(self) -> None:
        """Wake all tasks that wait; they fail."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class _Turn:
    """The part of one task in ordered sums."""

    def __init__(self, sums: OrderedSums, task: int) -> None:
        self._sums = sums
        self._task = task
        self._waited = -1  # block; earlier tasks are done with all up to it

    def begin(self, block: int) -> None:
        """Say that this task is done with the blocks before this one.

        Only those up to the last one that it waited for: of later ones it does not know whether
        earlier tasks are done with them.
        """
        if block > self._waited >= 0:
            self._sums.finish(self._task, self._waited)

    def wait(self, block: int) -> None:
        """Wait until all earlier tasks are done with this block."""
        self._sums.wait(self._task, block)
        self._waited = block
