"""Streams and communicators around NCCL, with mocks of CuPy and PyTorch."""

import gc
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest

from tileattn.distributed.comm import nccl

ID = (1, 2)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Return a mock of CuPy whose events have names."""
    names = iter(range(100))
    cupy = MagicMock()
    cupy.cuda.Event.side_effect = lambda **_: f"event {next(names)}"
    cupy.cuda.nccl.available, cupy.cuda.nccl.get_unique_id.return_value = True, ID
    cupy.cuda.nccl.NcclCommunicator.side_effect = lambda size, name, rank: MagicMock(
        **{"rank_id.return_value": rank, "size.return_value": size, "name": name}
    )
    for name, module in (("cupy", cupy), ("cupy.cuda", cupy.cuda)):
        monkeypatch.setitem(sys.modules, name, module)
    return cupy


def test_a_kernel_waits_until_messages_have_begun_if_none_are_under_way(machine: MagicMock) -> None:
    comm = machine.cuda.nccl.NcclCommunicator(2, ID, 0)
    link, current = nccl.CupyNccl(comm, 1.0), machine.cuda.get_current_stream.return_value
    x = MagicMock(nbytes=8)
    first = link.send(x, 1, 0)
    assert current.wait_event.call_count == 1  # begun
    second = link.receive(x, 1, 0)
    assert current.wait_event.call_count == 1  # the first are under way
    second.wait()
    first.wait()
    assert current.wait_event.call_count == 3  # arrived
    link.send(x, 1, 0)
    assert current.wait_event.call_count == 4


class Group:
    """A process group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_a_process_group_has_one_communicator_as_long_as_it_lives(
    machine: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine.cuda.nccl.NcclCommunicator
    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    monkeypatch.setitem(sys.modules, "torch.distributed", MagicMock())
    monkeypatch.setattr(nccl.TorchNccl, "gather", lambda _, x: [x])
    group: Any = Group()
    first = nccl.of_torch(group, 1.0)
    assert nccl.of_torch(group, 1.0) is first
    nccl.of_torch(group, 2.0)
    made.assert_called_once_with(1, ID, 0)
    del group
    gc.collect()
    assert not nccl._comms  # whatever has its id is another group
    nccl.of_torch(Group(), 1.0)
    assert made.call_count == 2


def test_ranks_one_of_which_finds_no_nccl(
    machine: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    monkeypatch.setitem(sys.modules, "torch.distributed", MagicMock())
    monkeypatch.setattr(nccl.TorchNccl, "gather", lambda _, x: [x, False])
    assert isinstance(nccl.of_torch(Group(), 1.0), nccl.TorchNccl)
    machine.cuda.nccl.NcclCommunicator.assert_not_called()
