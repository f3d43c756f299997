"""Gloo process groups of PyTorch, for NumPy arrays."""

import pickle
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np

from tileattn.distributed.comm.failures import wait
from tileattn.distributed.comm.protocol import Array, Transfer, as_bytes, pickled, too_long

_GATHERED = 1 << 30  # tag of gathered objects, above the tags of schedules


class ProcessGroup:
    """A process group of PyTorch.

    Raises
    ------
    ValueError
        If the group does not send tensors on the CPU by gloo.
    """

    on_gpu = False

    def __init__(self, group: Any, timeout: float) -> None:
        import torch

        self._torch, self._group, self._timeout = torch, group, timeout
        self._check_gloo()
        self.rank, self.size = int(group.rank()), int(group.size())

    def send(self, x: Array, to: int, tag: int) -> Transfer:
        """Start to send."""
        x = x if x.flags.writeable else x.copy()  # PyTorch has no read-only tensors
        tensor = self._torch.from_numpy(as_bytes(x))
        work = self._torch.distributed.isend(tensor, group=self._group, group_dst=to, tag=tag)
        return _Work(work, tensor, f"rank {to} to receive", self._timeout)

    def receive(self, x: Array, source: int, tag: int) -> Transfer:
        """Start to receive."""
        tensor = self._torch.from_numpy(as_bytes(x))
        work = self._torch.distributed.irecv(tensor, group=self._group, group_src=source, tag=tag)
        return _Work(work, tensor, f"rank {source} to send", self._timeout)

    def together(self) -> AbstractContextManager[None]:
        """Start messages one by one: gloo messages do not wait for one another."""
        return nullcontext()

    def gather(self, x: Any) -> list[Any]:
        """Gather pickled objects, by messages: a late collective cannot be cancelled."""
        own = pickled(x)
        sizes = self._exchanged(np.array([own.size]), [1] * self.size)
        every = self._exchanged(own, [int(size[0]) for size in sizes])
        return [pickle.loads(part.tobytes()) for part in every]

    def _exchanged(self, own: Array, sizes: list[int]) -> list[Array]:
        """Send an array to all ranks, and return their arrays, whose sizes are given."""
        every = [np.empty(size, own.dtype) for size in sizes]
        every[self.rank] = own
        others = [n for n in range(self.size) if n != self.rank]
        wait(
            [self.receive(every[n], n, _GATHERED) for n in others]
            + [self.send(own, n, _GATHERED) for n in others]
        )
        return every

    def _check_gloo(self) -> None:
        torch = self._torch
        try:
            name = self._group._get_backend(torch.device("cpu")).name()
        except RuntimeError:  # it has no backend for the CPU
            name = torch.distributed.get_backend(self._group)
        if name != "gloo":
            raise ValueError(
                "comm must be a process group of gloo, which sends arrays on the CPU "
                f"(torch.distributed.new_group(backend='gloo') creates one); got one of {name}"
            )


class _Work:
    """A pending message with its tensor; gloo closes a connection after a timeout."""

    def __init__(self, work: Any, tensor: Any, what: str, timeout: float) -> None:
        self._work, self._tensor, self._what, self._timeout = work, tensor, what, timeout

    def wait(self) -> None:
        milliseconds = min(max(1.0, 1e3 * self._timeout), 1e12)  # 0 would mean no limit
        try:
            self._work.wait(timedelta(milliseconds=milliseconds))
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise too_long(self._what, self._timeout) from error
            raise RuntimeError(f"waited for {self._what}, and it has ended: {error}") from error

    def cancel(self) -> bool:
        """Return True if it is complete: gloo cannot cancel messages."""
        return bool(self._work.is_completed())
