"""Worker threads, and sums in a fixed order over parallel tasks.

A ``KeyboardInterrupt``, or a fork in a signal handler, may happen in the main thread between any
two bytecodes. So a job is handed over in one step, and tasks that wait for one another in Python
never run in the main thread: a deputy thread runs them for it.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import ref

Work = Callable[[], None]
Result = TypeVar("Result")

REASONS = {True: "multi-threaded: enough work", False: "single-threaded: too little work"}
"""What ``explain`` says, by whether a call runs on several threads."""


@cache
def worker_count() -> int:
    """Return the number of threads: ``TILEATTN_NUM_THREADS``, or the cores of this process."""
    wanted = os.environ.get("TILEATTN_NUM_THREADS")
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ValueError(f"TILEATTN_NUM_THREADS must be a positive integer; got {wanted!r}")
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def call(work: Work) -> None:
    """Call a function."""
    work()


def _nothing() -> None:
    pass


def run(tasks: Sequence[Work], within: Callable[[Work], None] = call) -> None:
    """Run tasks on the workers, in order of their start; the first error stops the rest.

    Parameters
    ----------
    tasks : sequence of callable
        Tasks, the longest first.
    within : callable
        Calls its argument; each thread runs all its tasks inside one call of ``within``.

    Raises
    ------
    BaseException
        Exception of the first failing task, or an interrupt of this thread, after all running
        tasks have ended.
    """
    count = min(worker_count(), len(tasks))
    if count < 2:
        within(lambda: _run_here(tasks))
        return
    shared = _SharedTasks(tasks, within)
    uninterrupted(partial(together, shared.take, count, shared.stop), shared.stop)
    if shared.failures:
        raise shared.cause()


def together(work: Work, count: int, stop: Work) -> None:
    """Run the same function on ``count`` threads at once, this one among them.

    Parameters
    ----------
    work : callable
        Takes tasks until none is left. It must not wait for a thread that has not begun: the
        workers may be busy.
    count : int
        Number of threads; fewer if they cannot be started.
    stop : callable
        Makes ``work`` return soon on all threads. Called after an error or an interrupt of this
        thread, which then waits no longer, and in a forked child, which lacks the other threads.

    Raises
    ------
    RuntimeError
        In a forked child, if a signal handler has forked during this call.
    """
    jobs = _jobs(count - 1, work, stop)
    try:
        crew = _crew()
        crew.start()
        for job in jobs:
            crew.put(job)
        work()
        for job in jobs:
            job.end()
    except BaseException:
        stop()
        raise
    for job in jobs:
        job.result()


def uninterrupted(work: Callable[[], Result], stop: Work = _nothing) -> Result:
    """Run a function on a thread without interrupts; raise an interrupt after its end.

    Parameters
    ----------
    work : callable
        The function.
    stop : callable
        Makes ``work`` return sooner; called after an interrupt.

    Returns
    -------
    object
        Return value of ``work``.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    (job,) = _jobs(1, work, stop)
    try:
        deputy = _deputy()
        if not deputy.start():
            job.end()
            return work()
        deputy.put(job)
        job.wait()
    except BaseException:
        stop()
        job.end()
        raise
    result: Result = job.result()
    return result


def _run_here(tasks: Sequence[Work]) -> None:
    for task in tasks:
        task()


class _SharedTasks:
    """Tasks that several threads take one after another, in their order."""

    def __init__(self, tasks: Sequence[Work], within: Callable[[Work], None]) -> None:
        self.failures: list[BaseException] = []  # the first stops the rest
        self._tasks, self._within = iter(tasks), within
        self._taking = threading.Lock()

    def take(self) -> None:
        """Run tasks until there is none left, or one has failed."""
        try:
            self._within(self._take_in_order)
        except BaseException as failure:
            self.failures.append(failure)

    def stop(self) -> None:
        """Start no further task."""
        self.failures.append(KeyboardInterrupt())

    def cause(self) -> BaseException:
        """Return the first failure that is not merely the failure of another task."""
        causes = [x for x in self.failures if not isinstance(x, _OtherTaskFailedError)]
        cause = (causes or self.failures)[0]
        self.failures.clear()
        return cause

    def _take_in_order(self) -> None:
        while not self.failures:
            with self._taking:
                task = next(self._tasks, None)
            if task is None:
                return
            task()


class _Job:
    """A job for another thread, which may be cancelled before it begins.

    The waiting thread may be interrupted at any step, and wait again.
    """

    def __init__(self, work: Callable[[], Any], stop: Work) -> None:
        self._over = False
        self._work, self._stop, self._context = work, stop, copy_context()
        self._result: Any = None
        self._failure: BaseException | None = None
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._ended.acquire()

    def __call__(self) -> None:
        """Run the job, unless it was cancelled."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._result = self._context.run(self._work)
        except BaseException as failure:
            self._failure = failure
        self._finish()

    def wait(self) -> None:
        """Wait until the job is done."""
        while not self._over:
            self._ended.acquire(timeout=0.1)  # Windows shows interrupts between waits only

    def end(self) -> None:
        """Cancel the job if it has not begun; otherwise wait until it is done."""
        if self._begun.acquire(blocking=False):
            self._finish()
        self.wait()

    def result(self) -> Any:
        """Return the job's result, or raise its exception."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # whose traceback holds this frame
        return self._result

    def lose(self) -> None:
        """Fail the job in a forked child, where no thread runs it."""
        if not self._over:
            self._failure = RuntimeError("the process was forked during this call")
            self._stop()
            self._finish()

    def _finish(self) -> None:
        self._work = self._stop = _nothing  # a busy crew may hold a cancelled job for long
        self._over = True
        self._ended.release()


class _Crew:
    """A pool of threads; a job is handed over in one step."""

    def __init__(self, count: int) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._missing = count

    def start(self) -> bool:
        """Start the missing threads; return True if all run. More of them do no harm."""
        while self._missing > 0:
            try:
                threading.Thread(target=self._serve, name="tileattn", daemon=True).start()
            except RuntimeError:  # the interpreter shuts down, or the system has no more threads
                return False
            self._missing -= 1
        return True

    def put(self, job: _Job) -> None:
        """Hand over a job."""
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            self._jobs.get()()


class _Own(threading.local):
    """Jobs of nested calls of the current thread."""

    jobs: tuple[ref[_Job], ...] = ()


_own = _Own()


def _jobs(count: int, work: Callable[[], Any], stop: Work) -> list[_Job]:
    """Make jobs, which are lost if this thread forks."""
    jobs = [_Job(work, stop) for _ in range(count)]
    _own.jobs = (*(job for job in _own.jobs if job() is not None), *map(ref, jobs))
    return jobs


@cache
def _crew() -> _Crew:
    return _Crew(worker_count() - 1)


@cache
def _deputy() -> _Crew:
    return _Crew(1)


def _forget_other_threads() -> None:
    """Forget the threads that have not survived a fork."""
    _crew.cache_clear()
    _deputy.cache_clear()
    for job in filter(None, (made() for made in _own.jobs)):
        job.lose()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


class _OtherTaskFailedError(RuntimeError):
    """Another task of this call, which this one waited for, has failed."""


class OrderedSums:
    """Lets parallel tasks add to shared blocks in the order of the tasks.

    Task ``n`` adds to block ``i`` only after task ``n - 1`` is done with it, so a sum has the same
    order of terms, and the same bits, however many threads there are. Each task must take its
    blocks in ascending order, and tasks must be started in ascending order.

    Parameters
    ----------
    tasks : int
        Number of tasks.
    """

    def __init__(self, tasks: int) -> None:
        self._done = [0] * tasks  # blocks below this number
        self._changed = threading.Condition()
        self._broken = False

    @contextmanager
    def task(self, number: int) -> "Iterator[_Turn]":
        """Yield the turn of one task; at the end, the task is done with all blocks."""
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
        """Publish that this and all earlier tasks are done with the blocks up to ``block``."""
        with self._changed:
            self._done[task] = block + 1
            self._changed.notify_all()

    def break_off(self) -> None:
        """Wake all tasks that wait; they fail."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class _Turn:
    """One task's turn to add to the blocks."""

    def __init__(self, sums: OrderedSums, task: int) -> None:
        self._sums = sums
        self._task = task
        self._waited = -1  # earlier tasks are done with all blocks up to this one

    def begin(self, block: int) -> None:
        """Publish that this task is done with the blocks before ``block``.

        Only blocks up to the last one that it waited for are published: earlier tasks may not be
        done with later ones.
        """
        if block > self._waited >= 0:
            self._sums.finish(self._task, self._waited)

    def wait(self, block: int) -> None:
        """Wait until all earlier tasks are done with this block."""
        self._sums.wait(self._task, block)
        self._waited = block
