"""Limit NumPy's BLAS to one thread per worker while a call runs."""

import os
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import threadpoolctl


class Limit:
    """Limits libraries to one thread while a call is inside.

    ``find`` returns the libraries. It runs when the first call enters, because the search is slow.

    Notes
    -----
    In the main thread a ``KeyboardInterrupt`` may arise between any two bytecodes, even in a
    ``finally``, and a signal handler may enter again. So there is no counter: the state follows
    from the set of calls inside, and an interrupted call repeats its steps. There is no lock
    either, which could stay held: `_take` and `_give` may be repeated.
    """

    def __init__(self, find: Callable[[], list[Any]]) -> None:
        self._find = find
        self._inside: dict[object, int] = {}  # the thread of each call
        self._before: dict[int, int] = {}  # threads of each library that is held to one
        self._holder: dict[str, int] = {}  # the thread that changes the above, if any

    def enter(self, call: object) -> None:
        """Limit the libraries to one thread until the call leaves."""
        self._take()
        self._inside[call] = get_ident()
        for number, library in enumerate(self._find()):
            count = library.get_num_threads()
            if count != 1 and number not in self._before:
                self._before[number] = count
                _set(library, 1)
        self._give()

    def leave(self, call: object) -> None:
        """Restore the threads of the libraries after the last call; may be repeated."""
        if call in self._inside or self._holder.get("thread") == get_ident():
            self._take()
            self._inside.pop(call, None)
            self._settle()
            self._give()

    def forget_other_threads(self) -> None:
        """Forget the calls of threads that have not survived a fork."""
        self._holder.clear()
        for call, thread in list(self._inside.items()):
            if thread != get_ident():
                del self._inside[call]
        self._settle()

    def _settle(self) -> None:
        if self._inside:
            return
        libraries = self._find() if self._before else []
        for number, count in list(self._before.items()):
            if libraries[number].get_num_threads() == 1:  # no other thread has changed it
                _set(libraries[number], count)
            self._before.pop(number, None)

    def _take(self) -> None:
        while self._holder.setdefault("thread", get_ident()) != get_ident():
            time.sleep(0)

    def _give(self) -> None:
        if self._holder.get("thread") == get_ident():
            self._holder.clear()


class _OfThread(threading.local):
    """The limit of the current thread, for libraries with a thread count for each thread."""

    def __init__(self) -> None:
        self.limit = Limit(partial(_libraries, of_thread=True))


def single_threaded(work: Callable[[], None]) -> None:
    """Run a function while NumPy's BLAS is limited to one thread; calls may overlap and nest.

    Notes
    -----
    MKL, and OpenBLAS on OpenMP, have a thread count for each calling thread. OpenBLAS on its own
    threads, as in NumPy's wheels, has one count for the process, which other threads see while
    the function runs; ``openblas_set_num_threads_local`` changes the same count.
    """
    call = object()
    limits = (_of_process, _of_thread.limit) if _libraries(of_thread=True) else (_of_process,)
    try:
        try:
            for limit in limits:
                limit.enter(call)
            work()
        finally:
            for limit in limits:
                limit.leave(call)
    finally:  # again: an interrupt may have cut the first round short
        for limit in limits:
            limit.leave(call)


@cache
def _libraries(of_thread: bool) -> list[Any]:
    """Return NumPy's BLAS libraries with a thread count for each thread, or for the process."""
    found = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    root = Path(np.__file__).resolve().parent
    bundled = [root, root.with_name("numpy.libs")]  # leave the libraries of other packages alone
    own = [x for x in found if any(Path(x.filepath).is_relative_to(at) for at in bundled)]
    return [x for x in own or found if _has_number_for_each_thread(x) == of_thread]


def _has_number_for_each_thread(library: Any) -> bool:
    if library.internal_api == "openblas":
        return bool(library.threading_layer == "openmp")
    return "MKL_Set_Num_Threads_Local" in getattr(library, "check_symbols", ())


def _set(library: Any, count: int) -> None:
    """Set the thread count; from 3.8 on, threadpoolctl's own method works in one thread only."""
    getattr(library, "_real_set_num_threads", library.set_num_threads)(count)


_of_process = Limit(partial(_libraries, of_thread=False))
_of_thread = _OfThread()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_of_process.forget_other_threads)
