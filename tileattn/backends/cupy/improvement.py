"""Faster plans of repeated calls, made in the background.

The first plan of a call has no tables: nothing on the host grows with its lengths. If the call
repeats, a plan with tables may be worth its milliseconds. A thread makes it, its tables are sent to
the GPU without waiting, and later calls use it. The results have the same bits.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from tileattn.backends.cupy.streams import Sending, is_capturing
from tileattn.kernels.cuda.plan.plan import LaunchPlan

_asked: set["Future[LaunchPlan]"] = set()


class Improvement:
    """The search for a faster executable of the calls of one signature.

    Parameters
    ----------
    plan : callable
        Makes the plan with tables.
    executable : callable
        Makes the executable of a plan, given what sends arrays to the GPU.
    """

    def __init__(
        self, plan: Callable[[], LaunchPlan], executable: Callable[[LaunchPlan, Sending], Any]
    ) -> None:
        self._plan, self._executable = plan, executable
        self._future: Future[LaunchPlan] | None = None
        self._found: tuple[Any, Sending] | None = None
        self.has_failed = False  # True: there will be none

    def poll(self, stream: Any) -> Any:
        """Return the faster executable once it is ready; call this before each repeated launch."""
        if self._found is not None:
            executable, sending = self._found
            return executable if sending.is_done() else None
        if self._future is None:
            self._future = _submit(self._plan)
            self.has_failed = self._future is None
        elif self._future.done() and not is_capturing(stream):
            self.has_failed = not self._send(self._future, stream)
        return None

    def _send(self, future: "Future[LaunchPlan]", stream: Any) -> bool:
        """Make the executable of a plan, in memory of this stream; return False if that fails."""
        if future.exception() is not None:  # if it were raised, it would keep the caller's frames
            return False
        sending = Sending()
        with suppress(Exception), stream:  # without memory, the first plan is as right
            self._found = self._executable(future.result(), sending), sending
            return True
        return False


def _submit(plan: Callable[[], LaunchPlan]) -> "Future[LaunchPlan] | None":
    with suppress(RuntimeError):  # while Python exits
        future = _pool().submit(plan)
        _asked.add(future)
        future.add_done_callback(_asked.discard)
        return future
    return None


def finish() -> None:
    """Wait until all plans that were asked for are made."""
    wait(list(_asked))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "tileattn-plan")
