"""Calls that fail between their messages: arrays are kept, and the next call raises."""

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tileattn
import tileattn.distributed as dist
from tests.distributed.threads import Rank, World, on_ranks
from tileattn.backends import registry
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.distributed.comm import failures
from tileattn.distributed.comm.connect import check_timeout, communicator
from tileattn.distributed.comm.failures import CheckedComm, State
from tileattn.distributed.comm.mpi import MPI

RANKS = 3
X = np.random.default_rng(0).standard_normal((3, 1, RANKS, 12, 8), np.float32)
Q, K, V = X
HERE = threading.local()


class Failing(NumpyBackend):
    """A backend that fails on ranks that set ``HERE.fails``."""

    name = "failing"

    def forward(self, *args: Any, **more: Any) -> Any:
        self.fail("forward")
        return super().forward(*args, **more)

    def backward(self, *args: Any, **more: Any) -> Any:
        self.fail("backward")
        return super().backward(*args, **more)

    def fail(self, name: str) -> None:
        if getattr(HERE, "fails", None) == name:
            raise ArithmeticError("no more")


@pytest.fixture
def _failing() -> Iterator[None]:
    tileattn.register_backend(Failing())
    yield
    del registry._loaded["failing"]


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


@pytest.mark.usefixtures("_failing")
@pytest.mark.parametrize(
    ("schedule", "name"),
    [("ring", "forward"), ("ring", "backward"), ("gather", "backward"), ("heads", "forward")],
)
def test_a_communicator_is_not_used_after_a_call_that_failed(schedule: str, name: str) -> None:
    """Neither the rank that failed nor one that waited for it uses it; a new one works."""
    fresh = World(RANKS)

    def run(comm: Rank) -> Any:
        comm.patience = 0.5
        given: dict[str, Any] = {"backend": "failing", "schedule": schedule}

        def call() -> Any:
            return dist.vjp(Q, K, V, comm, **given)[1](Q)

        HERE.fails = name if comm.rank == 1 else None
        found = [message_of(call), message_of(call)]
        HERE.fails = None
        whole = dist.vjp(Q, K, V, Rank(fresh, comm.rank), **given)[1](Q)
        return found, whole.dq

    calls, grads = zip(*on_ranks(RANKS, run, all_received=False), strict=True)
    for first, again in calls[1:]:
        assert first.startswith(("ArithmeticError: no more", "TimeoutError: "))
        assert again.startswith("RuntimeError: comm must be a new communicator: an earlier call on")
        assert first in again
    whole = on_ranks(RANKS, lambda comm: dist.vjp(Q, K, V, comm, backend="numpy")[1](Q).dq)
    assert [x.shape for x in grads] == [x.shape for x in whole]


def test_an_error_of_all_ranks_leaves_the_communicator_usable() -> None:
    def run(comm: Rank) -> Any:
        first = message_of(lambda: dist.forward(Q, K, V, comm, scale=float(comm.rank)))
        second = message_of(lambda: dist.forward(Q, K, V[..., :11, :], comm))
        return first, second, message_of(lambda: dist.forward(Q, K, V, comm, backend="numpy"))

    for differ, refused, third in on_ranks(RANKS, run):
        assert differ.startswith("ValueError: scale must be the same on all ranks")
        assert refused.startswith("ValueError: v must have the length of k, ")
        assert third == "returned"


class Posted:
    """An MPI request that completes if ``over`` is set."""

    def __init__(self, x: Any) -> None:
        self.x, self.cancelled, self.over = x, False, False

    def Test(self) -> bool:  # noqa: N802 - as mpi4py names it
        return self.over

    def Cancel(self) -> None:  # noqa: N802 - as above
        self.cancelled = True


class Comm:
    """An MPI communicator whose messages never complete."""

    def __init__(self) -> None:
        self.posted: list[Posted] = []

    def Get_rank(self) -> int:  # noqa: N802 - as above
        return 0

    def Get_size(self) -> int:  # noqa: N802 - as above
        return 2

    def Irecv(self, x: Any, source: int, tag: int) -> Posted:  # noqa: N802, ARG002 - as above
        self.posted.append(Posted(x))
        return self.posted[-1]

    Isend = Irecv

    def Iallgather(self, own: Any, every: Any) -> Posted:  # noqa: N802 - as above
        return self.Irecv((own, every), 0, 0)

    def allgather(self, x: Any) -> None:
        """Exist, as in mpi4py."""


def test_arrays_of_messages_live_until_these_are_over() -> None:
    """Messages that no rank has waited for are included."""
    comm = Comm()
    link = communicator(comm, 0.01)
    arrays = [np.zeros(64) for _ in range(3)]
    alive = [weakref.ref(x) for x in arrays]
    messages = [link.receive(x, 1, 0) for x in arrays[:2]] + [link.send(arrays[2], 1, 0)]
    with pytest.raises(TimeoutError, match=r"waited 0.01 s for rank 1 to send"), link.in_step():
        messages[1].wait()
    requests = list(comm.posted)
    comm.posted.clear()
    assert [x.cancelled for x in requests] == [True, True, False]
    for request in requests:
        request.x = None  # as a request of MPI's does not keep it for good
    del arrays, messages
    gc.collect()
    assert all(x() is not None for x in alive)
    for n, request in enumerate(requests):
        request.over = True
        failures.prune()
        gc.collect()
        assert [x() is not None for x in alive] == [m > n for m in range(3)]
    with pytest.raises(RuntimeError, match="comm must be a new communicator"):
        communicator(comm, 0.01)


def test_what_a_gathering_has_posted_is_kept() -> None:
    comm = Comm()
    with pytest.raises(TimeoutError, match="for the other ranks to take part"):
        communicator(comm, 0.01).gather("mine")
    (request,) = comm.posted
    assert any(x._request is request for x in failures._kept if hasattr(x, "_request"))
    request.over = True
    failures.prune()
    assert not any(x._request is request for x in failures._kept if hasattr(x, "_request"))


def test_nothing_is_kept_of_a_call_that_has_ended() -> None:
    states: list[State] = []

    def run(comm: Rank) -> Any:
        for schedule in ("ring", "gather", "heads"):
            given: dict[str, Any] = {"backend": "numpy", "schedule": schedule}
            dist.vjp(Q, K, V, comm, causal=True, sinks=np.ones(RANKS), **given)[1](Q)
        states.append(failures.state_of(comm))

    on_ranks(RANKS, run)
    assert [x.under_way for x in states] == [set()] * RANKS


@dataclass
class Unhashable(Rank):
    """A communicator that equals others with its rank."""

    world: World
    rank: int
    size: int = 1
    patience: float = 60.0


def test_communicators_need_not_be_hashable() -> None:
    world = World(1)
    first, second = Unhashable(world, 0), Unhashable(world, 0)
    assert first == second
    state = failures.state_of(first)
    assert failures.state_of(first) is state is not failures.state_of(second)
    state.failure = "it has failed"
    assert message_of(lambda: dist.forward(Q, K, V, second, backend="numpy")) == "returned"
    known = len(failures._states)
    del first
    gc.collect()
    assert len(failures._states) == known - 1


class Slotted:
    """A communicator without weak references."""

    __slots__ = ("gather", "rank", "receive", "send", "size", "together")

    def __init__(self, comm: Rank) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(comm, name))


def test_communicators_need_not_be_weakly_referenceable() -> None:
    comm = Slotted(Rank(World(1), 0))
    assert message_of(lambda: dist.forward(Q, K, V, comm, backend="numpy")) == "returned"


class Destroyed:
    """A message of a group that has been destroyed."""

    def wait(self) -> None:
        raise TimeoutError("the first error")

    def cancel(self) -> bool:
        raise ArithmeticError("the group has been destroyed")


def test_what_cannot_be_cancelled_is_kept_and_fails_no_other_call() -> None:
    messages = [Destroyed(), Destroyed()]
    with pytest.raises(TimeoutError, match="the first error"):
        failures.wait(messages)
    comm = Rank(World(1), 0)
    assert message_of(lambda: dist.forward(Q, K, V, comm, backend="numpy")) == "returned"
    assert all(x in failures._kept for x in messages)
    failures._kept[:] = [x for x in failures._kept if x not in messages]


class Ended(Rank):
    """A communicator that cannot be aborted again."""

    def give_up(self) -> None:
        raise ArithmeticError("it has been ended")


def test_an_error_of_giving_up_does_not_replace_the_first() -> None:
    link = communicator(Ended(World(1), 0))
    with pytest.raises(TimeoutError, match="first"), link.in_step():
        raise TimeoutError("first")


def test_a_duplicate_of_a_communicator_of_mpi_is_another() -> None:
    mpi = pytest.importorskip("mpi4py.MPI", reason="pip install mpi4py mpich")
    state = failures.state_of(mpi.COMM_SELF)
    assert failures.state_of(mpi.COMM_SELF) is state
    other = mpi.COMM_SELF.Dup()
    assert failures.state_of(other) is not state
    other.Free()


@pytest.mark.parametrize("timeout", [0, -1, 0.0, math.nan, math.inf, -np.float32(3)], ids=repr)
def test_timeouts_that_are_not_positive(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive, finite number of seconds; g"):
        check_timeout(timeout)


def test_timeouts_are_positive_numbers() -> None:
    for timeout in (1, 0.5, np.float32(3), np.int64(2)):

        def run(comm: Rank, timeout: Any = timeout) -> Any:
            return dist.forward(Q, K, V, comm, timeout=timeout)

        assert isinstance(on_ranks(1, run)[0], tuple)
    assert MPI(Comm(), 0.5).size == 2
    assert isinstance(communicator(Comm(), float("nan")), CheckedComm)
