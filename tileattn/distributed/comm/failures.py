"""The ranks of a call and its messages: an array is kept until its message is over.

A call that fails between its messages, by a timeout or otherwise, leaves some of them posted: MPI
or NCCL may still read and write their arrays, and a late message would be taken for one of the next
call. So such messages are cancelled or kept, and the communicator is not used again.
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
    """What is known of a communicator from one call to the next.

    Parameters
    ----------
    failure : str or None
        The error that ended a call between its messages.
    under_way : set of Message
        Messages that have begun, and that no rank has waited for yet.
    """

    failure: str | None = None
    under_way: "set[Message]" = field(default_factory=set)


class Message:
    """A message, with its array until it is over."""

    def __init__(self, state: State, transfer: Transfer, x: Array) -> None:
        self._state = state
        self._kept: tuple[Transfer, Array] | None = (transfer, x)
        state.under_way.add(self)

    def wait(self) -> None:
        """Wait as its transfer does."""
        if self._kept is not None:
            self._kept[0].wait()
            self._kept = None
            self._state.under_way.discard(self)

    def cancel(self) -> bool:
        """Cancel its transfer, if that can be cancelled."""
        if self._kept is None:
            return True
        transfer = self._kept[0]
        return isinstance(transfer, Cancellable) and transfer.cancel()


class CheckedComm:
    """The ranks of a communicator, which is not used again after a call has failed on it.

    Parameters
    ----------
    ranks : Communicator
        Sends the messages.
    state : State
        That of the caller's communicator.
    """

    def __init__(self, ranks: Communicator, state: State) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks, self._state = ranks, state

    @property
    def agreed(self) -> dict[Any, Any] | None:
        """Calls that the ranks have compared; None where each call is compared."""
        found: dict[Any, Any] | None = getattr(self._ranks, "agreed", None)
        return found

    @property
    def on_gpu(self) -> bool | None:
        """Whether its messages are between GPUs; None if it does not say."""
        found: bool | None = getattr(self._ranks, "on_gpu", None)
        return found

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Begin to send."""
        return Message(self._state, self._ranks.send(x, to, tag), x)

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Begin to receive."""
        return Message(self._state, self._ranks.receive(x, source, tag), x)

    def together(self) -> AbstractContextManager[None]:
        """Begin messages at once."""
        return self._ranks.together()

    def gather(self, x: Any) -> list[Any]:
        """Give every rank the objects of all ranks."""
        with self.in_step():
            return self._ranks.gather(x)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Do something that all ranks do; if it fails here, the communicator is broken."""
        try:
            yield
        except BaseException as error:
            self._state.failure = self._state.failure or f"{type(error).__name__}: {error}"
            give_up = getattr(self._ranks, "give_up", None)
            if give_up is not None:
                with suppress(Exception):  # the first error says why the call has failed
                    give_up()
            keep(self._state.under_way)
            self._state.under_way.clear()
            raise

    def ensure_usable(self) -> None:
        """Raise RuntimeError if a call has failed between its messages."""
        prune()
        if self._state.failure is not None:
            raise RuntimeError(
                "comm must be a new communicator: an earlier call on it failed on this rank "
                f"({self._state.failure}), and messages of that call may still arrive; all ranks "
                "must make a new one, as comm.Dup() of MPI or torch.distributed.new_group()"
            )


_kept: list[Any] = []  # what failed calls have left posted
_lock = threading.Lock()


def keep(transfers: Iterable[Any]) -> None:
    """Cancel messages of a call that has failed, or keep them until they are over."""
    with _lock:
        _kept.extend(transfers)
    prune()


def prune() -> None:
    """Let go of the messages that are over by now."""
    with _lock:
        _kept[:] = [x for x in _kept if not _is_over(x)]


def _is_over(transfer: Any) -> bool:
    """Cancel a message that is kept; one that cannot say whether it is over may not be."""
    try:
        return isinstance(transfer, Cancellable) and transfer.cancel()
    except Exception:  # as of a group that has been destroyed; this call may be another's
        return False


def wait(transfers: Sequence[Transfer]) -> None:
    """Wait for all of them; if one fails, the others are kept."""
    try:
        for transfer in transfers:
            transfer.wait()
    except BaseException:
        keep(transfers)
        raise


_states: dict[int, State] = {}  # by identity: equal communicators are not the same


def state_of(comm: Any) -> State:
    """Find the state of a communicator, the same as long as the communicator lives.

    One that no weak reference can be made to, as its class has ``__slots__``, has a new one each
    time: its failures are not remembered.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        return _state_by_identity(comm)
    found: State | None = comm.Get_attr(_attribute())  # any Python object may stand for it
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
    """Make an attribute of MPI communicators, which their duplicates do not have."""
    key: int = sys.modules["mpi4py.MPI"].Comm.Create_keyval()
    return key
