"""Find the communicator for the object that a caller passes."""

import math
import numbers
import sys
from typing import Any

from tileattn.distributed.arrays import is_on_gpu
from tileattn.distributed.comm.failures import CheckedComm, state_of
from tileattn.distributed.comm.mpi import MPI
from tileattn.distributed.comm.protocol import TIMEOUT, Communicator


def communicator(comm: Any, timeout: float = TIMEOUT, like: Any = None) -> CheckedComm:
    """Return the communicator for arrays like ``like``.

    Raise RuntimeError if an earlier call failed between its messages. An invalid timeout is
    replaced by the default, so that this rank can report the error to the others.
    """
    link = comm if isinstance(comm, CheckedComm) else _linked(comm, timeout, like)
    link.ensure_usable()
    return link


def check_timeout(timeout: Any) -> None:
    """Raise if a timeout is not a positive, finite number of seconds."""
    must = "must be a positive, finite number of seconds"
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout {must}; got {timeout!r}")
    if not 0.0 < float(timeout) < math.inf:
        raise ValueError(f"timeout {must}; got {timeout!r}")


def _linked(comm: Any, timeout: Any, like: Any) -> CheckedComm:
    try:
        check_timeout(timeout)
    except (TypeError, ValueError):
        timeout = TIMEOUT
    if isinstance(comm, Communicator):
        return CheckedComm(comm, state_of(comm))
    torch = sys.modules.get("torch.distributed")  # imported if there is a process group
    of_torch = isinstance(comm, getattr(torch, "ProcessGroup", ()))
    if hasattr(comm, "Isend") and hasattr(comm, "allgather"):
        return CheckedComm(MPI(comm, timeout), state_of(comm))
    if of_torch and not is_on_gpu(like):
        from tileattn.distributed.comm.process_group import ProcessGroup

        return CheckedComm(ProcessGroup(comm, timeout), state_of(comm))
    if of_torch or all(hasattr(comm, name) for name in ("rank_id", "recv", "allGather")):
        from tileattn.distributed.comm import nccl

        ranks = nccl.of_torch(comm, timeout) if of_torch else nccl.of_cupy(comm, timeout)
        return CheckedComm(ranks, state_of(ranks))
    raise TypeError(
        "comm must be an mpi4py communicator, as MPI.COMM_WORLD (pip install mpi4py mpich), a "
        "torch.distributed.ProcessGroup, as group.WORLD, or for CuPy arrays a "
        f"cupy.cuda.nccl.NcclCommunicator; got {type(comm).__name__}"
    )
