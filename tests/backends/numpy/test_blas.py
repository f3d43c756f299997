"""BLAS has one thread while calls run and its own number afterwards; no other is touched."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from tileattn.backends import threads
from tileattn.backends.numpy import blas
from tileattn.backends.numpy.blas import Limit, single_threaded

IN_NUMPY = Path(np.__file__).with_name("libblas.so")


class Library:
    """A BLAS library as threadpoolctl describes it, with 4 threads."""

    def __init__(
        self,
        internal_api: str = "openblas",
        threading_layer: str = "pthreads",
        filepath: Path = IN_NUMPY,
    ) -> None:
        self.internal_api, self.threading_layer = internal_api, threading_layer
        self.filepath = str(filepath)
        self.check_symbols = ("MKL_Set_Num_Threads_Local",) if internal_api == "mkl" else ()
        self._of_process, self._of_thread = 4, threading.local()

    def get_num_threads(self) -> int:
        return int(getattr(self._of_thread, "number", self._of_process))

    def set_num_threads(self, number: int) -> None:
        if self.threading_layer == "openmp" or self.internal_api == "mkl":
            self._of_thread.number = number
        else:
            self._of_process = number


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Have the process find these libraries."""

    def load(*libraries: Library) -> None:
        found = SimpleNamespace(lib_controllers=libraries)
        controller = SimpleNamespace(select=lambda **_: found)
        monkeypatch.setattr(threadpoolctl, "ThreadpoolController", lambda: controller)
        blas._libraries.cache_clear()

    yield load
    blas._libraries.cache_clear()


def test_the_last_call_to_leave_gives_the_threads_back() -> None:
    library = Library()
    limit = Limit(lambda: [library])
    for call in "abc":
        limit.enter(call)
        assert library.get_num_threads() == 1
    for call in "bac":
        assert library.get_num_threads() == 1
        limit.leave(call)
        limit.leave(call)
    assert library.get_num_threads() == 4


@pytest.mark.parametrize("number", [2, 7])
def test_a_number_that_somebody_sets_meanwhile_stays(number: int) -> None:
    library = Library()
    limit = Limit(lambda: [library])
    limit.enter("a")
    library.set_num_threads(number)
    limit.enter("b")
    assert library.get_num_threads() == number
    limit.leave("a")
    limit.leave("b")
    assert library.get_num_threads() == number


def test_a_library_with_one_thread_keeps_it() -> None:
    library = Library()
    limit = Limit(lambda: [library])
    for number in (4, 1):
        library.set_num_threads(number)
        limit.enter("a")
        limit.leave("a")
        assert library.get_num_threads() == number


def test_a_forked_child_forgets_the_calls_of_other_threads() -> None:
    library = Library()
    limit = Limit(lambda: [library])

    def theirs() -> None:
        limit.enter("theirs")
        limit._take()  # and the fork comes in the middle of a step

    thread = threading.Thread(target=theirs)
    thread.start()
    thread.join()
    limit.forget_other_threads()
    assert library.get_num_threads() == 4
    limit.enter("ours")
    limit.forget_other_threads()
    assert library.get_num_threads() == 1
    limit.leave("ours")
    assert library.get_num_threads() == 4


@pytest.mark.parametrize(("api", "layer"), [("openblas", "openmp"), ("mkl", "intel")])
def test_a_number_for_each_thread_is_given_back_in_each(
    loaded: Callable[..., None], api: str, layer: str
) -> None:
    """Two calls overlap; the one that began first ends first."""
    library = Library(api, layer)
    loaded(library)
    inside, first_is_out = threading.Event(), threading.Event()
    numbers: list[int] = []

    def work_of_second() -> None:
        inside.set()
        assert first_is_out.wait(10)

    def second() -> None:
        single_threaded(work_of_second)
        numbers.append(library.get_num_threads())

    thread = threading.Thread(target=second)

    def first() -> None:
        thread.start()
        assert inside.wait(10)
        numbers.append(library.get_num_threads())

    single_threaded(first)
    numbers.append(library.get_num_threads())
    first_is_out.set()
    thread.join()
    assert numbers == [1, 4, 4]


def test_every_worker_has_one_thread(
    loaded: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "worker_count", lambda: 2)
    libraries = Library(), Library(threading_layer="openmp")
    loaded(*libraries)
    both = threading.Barrier(2)
    numbers: list[int] = []

    def task() -> None:
        both.wait(10)
        numbers.extend(library.get_num_threads() for library in libraries)

    threads.run([task] * 2, within=single_threaded)
    assert numbers == [1] * 4
    assert [library.get_num_threads() for library in libraries] == [4, 4]


def test_libraries_of_other_packages_keep_their_threads(loaded: Callable[..., None]) -> None:
    ours, theirs = Library(), Library(filepath=IN_NUMPY.parents[1] / "scipy" / "libblas.so")
    loaded(ours, theirs)
    numbers: list[int] = []
    single_threaded(lambda: numbers.extend(library.get_num_threads() for library in (ours, theirs)))
    assert numbers == [1, 4]
    loaded(theirs)  # NumPy is built on one that others use too
    single_threaded(lambda: numbers.append(theirs.get_num_threads()))
    assert numbers == [1, 4, 1]
    assert theirs.get_num_threads() == 4


def test_limits_of_threadpoolctl_around_and_within_a_call_hold() -> None:
    def number() -> set[Any]:
        return {library.get_num_threads() for library in blas._libraries(of_thread=False)}

    if not number():
        pytest.skip("NumPy's BLAS has no number of threads for the process")
    with threadpoolctl.threadpool_limits(3, "blas"):
        threads.run([lambda: threadpoolctl.threadpool_limits(2, "blas")], within=single_threaded)
        assert number() == {2}
        inside: list[set[Any]] = []
        threads.run([lambda: inside.append(number())], within=single_threaded)
        assert inside == [{1}]
        assert number() == {2}
