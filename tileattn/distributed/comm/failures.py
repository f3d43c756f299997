"""Failures between messages: keep the arrays of pending messages, and refuse the communicator.

If a call fails between its messages, some messages are still pending. MPI or NCCL may still read
and write their arrays, and the next call could receive a late message. So pending messages are
cancelled, or their arrays are kept, and the communicator is not used again.
"""

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import finalize

from tileattn.distributed.comm.protocol import Array, Cancellable, Communicator, Transfer


@dataclass(eq=False)
class State:
    """State of a communicator from one call to the next."""

    failure: str | None = None  # the error of a call that failed between its messages
    under_way: "set[Message]" = field(default_factory=set)  # started, not waited for


class Message:
    """A pending message; it keeps its array alive until it is complete."""

    def __init__(self, state: State, transfer: Transfer, x: Array) -> None:
        self._state = state
        self._kept: tuple[Transfer, Array] | None = (transfer, x)
        state.under_way.add(self)

    def wait(self) -> None:
        """Wait for its transfer."""
        if self._kept is not None:
            self._kept[0].wait()
            self._kept = None
            self._state.under_way.discard(self)

    def cancel(self) -> bool:
        """Cancel its transfer if possible."""
        if self._kept is None:
            return True
        transfer = self._kept[0]
        return isinstance(transfer, Cancellable) and transfer.cancel()


class CheckedComm:
    """A communicator that cannot be used after a call failed on it."""

    def __init__(self, ranks: Communicator, state: State) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks, self._state = ranks, state

    @property
    def validated(self) -> dict[Any, Any] | None:
        """Cache of validated calls; None if every call is validated."""
        found: dict[Any, Any] | None = getattr(self._ranks, "validated", None)
        return found

    @property
    def on_gpu(self) -> bool | None:
        """True if messages are between GPUs; None if the communicator does not say."""
        found: bool | None = getattr(self._ranks, "on_gpu", None)
        return found

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Start to send."""
        return Message(self._state, self._ranks.send(x, to, tag), x)

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Start to receive."""
        return Message(self._state, self._ranks.receive(x, source, tag), x)

    def together(self) -> AbstractContextManager[None]:
        """Start messages together."""
        return self._ranks.together()

    def gather(self, x: Any) -> list[Any]:
        """Return the objects of all ranks, on every rank."""
        with self.in_step():
            return self._ranks.gather(x)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run code that sends messages; an error makes the communicator unusable."""
        try:
            yield
        except BaseException as error:
            self._state.failure = self._state.failure or f"{type(error).__name__}: {error}"
            give_up = getattr(self._ranks, "give_up", None)
            if give_up is not None:
                with suppress(Exception):  # the first error says why the call failed
                    give_up()
            keep(self._state.under_way)
            self._state.under_way.clear()
            raise

    def ensure_usable(self) -> None:
        """Raise RuntimeError if an earlier call failed between its messages."""
        prune()
        if self._state.failure is not None:
            raise RuntimeError(
                "comm must be a new communicator: an earlier call on it failed on this rank "
                f"({self._state.failure}), and messages of that call may still arrive; all ranks "
                "must make a new one, as comm.Dup() of MPI or torch.distributed.new_group()"
            )


_kept: list[Any] = []  # pending messages of failed calls
_lock = threading.Lock()


def keep(transfers: Iterable[Any]) -> None:
    """Cancel the messages of a failed call, or keep them until they are complete."""
    with _lock:
        _kept.extend(transfers)
    prune()


def prune() -> None:
    """Drop the kept messages that are complete."""
    with _lock:
        _kept[:] = [x for x in _kept if not _is_over(x)]


def _is_over(transfer: Any) -> bool:
    """Cancel a kept message; return True if it is complete, False if that is unknown."""
    try:
        return isinstance(transfer, Cancellable) and transfer.cancel()
    except Exception:  # for example, its group was destroyed; it must not fail another call
        return False


def wait(transfers: Sequence[Transfer]) -> None:
    """Wait for all transfers; if one fails, keep the others."""
    try:
        for transfer in transfers:
            transfer.wait()
    except BaseException:
        keep(transfers)
        raise


_states: dict[int, State] = {}  # by identity: equal communicators are different ones


def state_of(comm: Any) -> State:
    """Return the state of a communicator, the same object as long as the communicator lives.

    A communicator without weak references (a class with ``__slots__``) gets a new state each time:
    its failures are forgotten.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        return _state_by_identity(comm)
    # Two Python objects may stand for one MPI communicator.
    found: State | None = comm.Get_attr(_attribute())
    if found is None:
        comm.Set_attr(_attribute(), found := State())
    return found


def _state_by_identity(comm: Any) -> State:
    number = id(comm)
    if number not in _states:
        try:
            finalize(comm, _states.pop, number, None).atexit = False
        except TypeError:
            return State()
    return _states.setdefault(number, State())


@cache
def _attribute() -> int:
    """Create an attribute key of MPI communicators; duplicates do not inherit the attribute."""
    key: int = sys.modules["mpi4py.MPI"].Comm.Create_keyval()
    return key
