"""Predict the messages, memory and time of each schedule, with or without ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from tileattn.call.options import PAIR_ARRAYS, Options
from tileattn.distributed.comm.connect import check_timeout, communicator
from tileattn.distributed.comm.protocol import TIMEOUT
from tileattn.distributed.layout import Layout, count
from tileattn.distributed.model.cost import CPU_RATES, Cost, Rates
from tileattn.distributed.model.planner import costs_of, default_rates, fastest
from tileattn.distributed.model.workload import Workload, workload, workload_of
from tileattn.distributed.schedules.schedule import ScheduleName
from tileattn.distributed.validation import (
    agreed,
    check_supported,
    layout_of,
    parse_with_given_window,
)

_COLUMNS = ("MB", 13), ("messages", 10), ("ms", 10), ("groups", 8), ("memory", 8)


@dataclass(frozen=True)
class Prediction:
    """The costs of the schedules of a call; ``str()`` of it is a table.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    rates : Rates
        How fast ranks compute and send.
    costs : tuple of Cost
        For each possible schedule and each pass: the most messages and bytes that a rank sends,
        predicted seconds, number of head groups, and memory of a rank.
    refused : mapping of schedule to str
        Why the other schedules are not possible.
    """

    ranks: int
    rates: Rates
    costs: tuple[Cost, ...]
    refused: Mapping[ScheduleName, str]

    @property
    def chosen(self) -> ScheduleName:
        """Schedule with the least time for both passes together; the first of equals."""
        return min(self.costs, key=lambda cost: cost.seconds).schedule

    @property
    def fastest(self) -> tuple[ScheduleName, ScheduleName]:
        """Schedules with the least time forward and backward, which ``"auto"`` uses."""
        return fastest(self.costs)

    def __str__(self) -> str:
        columns = "".join(f"{name:>{width}}" for name, width in _COLUMNS)
        width = len(columns)
        lines = [f"{'':14}{'forward':>{width}}{'backward':>{width}}"]
        lines.append(f"{'schedule':14}{2 * columns}")
        lines += [_line(cost) for cost in self.costs]
        lines += [f"{name!s:14} refused: {why}" for name, why in self.refused.items()]
        forward, backward = self.fastest
        auto = f"forward {forward}, backward {backward}"
        return "\n".join([*lines, f"{'chosen':14} {self.chosen}", f"{'auto':14} {auto}"])


def predict(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    ranks: int,
    *,
    dtype: Any = np.float32,
    layout: Any = None,
    layout_k: Any = None,
    rates: Rates | None = None,
    **options: Unpack[Options],
) -> Prediction:
    """Predict what each schedule of a call sends and how long it takes, for any number of ranks.

    It sends and computes nothing, and needs no ranks.

    Parameters
    ----------
    q, k, v : sequence of int
        Shapes of the whole sequence: (B, Hq, Nq, D), (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv).
    ranks : int
        Number of ranks that share the sequence.
    dtype : dtype
        Dtype of q, k and v.
    layout, layout_k : Layout, str or None
        As for ``forward``; ``"contiguous"`` (the default) divides the tokens equally, up to one.
    rates : Rates or None
        How fast ranks compute and send; None is ``CPU_RATES``.
    **options
        As for ``forward``, but with all rows of bias and mask.

    Returns
    -------
    Prediction
        The costs of each schedule, and the fastest one.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    UnsupportedError
        For an option that ``forward`` does not support.

    Notes
    -----
    A pass takes as long as the slowest rank::

        ring, heads, both  exchange + max(travel, matmuls)
        gather             first travel + max(other travel, matmuls) + gradients back
        exchange, travel   messages * latency + bytes / bandwidth
        matmuls            FLOPs of the visible pairs / FLOPs in a second, and those of blocks
        blocks             blocks * latency + bytes of their results / bandwidth

    Causal masks, windows and lengths reduce the number of pairs; ``mask`` and ``mask_mod`` do not.
    On a GPU the FLOP rate is multiplied by the share of SMs that the work tiles of a call occupy.
    Messages and bytes are exact. They exclude the small metadata that all ranks gather, and the
    second forward pass that ``backward`` runs if scores are large. Heads are computed in groups,
    one after the other: as many groups as memory requires, as long as each call is worth its
    launch. The keys of one group may be sent while another is computed. Memory is exact if all
    parts have the same length and travel all the way, and an upper bound otherwise.

    Examples
    --------
    >>> from tileattn.distributed import predict
    >>> shape = (1, 8, 65536, 64)
    >>> predict(shape, shape, shape, 16, layout="zigzag", causal=True).chosen
    ('heads', 8)
    """
    check_supported(options)
    ranks = count("ranks", ranks, 1)
    arrays = [_empty(name, shape, dtype) for name, shape in (("q", q), ("k", k), ("v", v))]
    problem, x = parse_with_given_window(arrays[0], arrays[1], arrays[2], options)
    layout_k = layout if layout_k is None else layout_k
    layouts = (
        _on_paper("layout", layout, problem.Nq, ranks),
        _on_paper("layout_k", layout_k, problem.Nk, ranks),
    )
    with_rows = [name for name in PAIR_ARRAYS if _has_rows(getattr(x, name))]
    _check_rates(rates)
    rates = rates or CPU_RATES
    return _predicted(workload(problem, x, *layouts, with_rows), rates, on_gpu=rates.on_gpu)


def explain(
    q: Any,
    k: Any,
    v: Any,
    comm: Any,
    *,
    layout: Any = None,
    layout_k: Any = None,
    rates: Rates | None = None,
    backend: str = "auto",
    timeout: float = TIMEOUT,
    **options: Unpack[Options],
) -> Prediction:
    """Predict the cost of each schedule of a call without running it; all ranks call it.

    Parameters
    ----------
    q, k, v : array
        As for ``forward``.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or cupy.cuda.nccl.NcclCommunicator
        The ranks.
    layout, layout_k : Layout, str or None
        As for ``forward``.
    rates : Rates or None
        How fast ranks compute and send, the same on all ranks. None is ``GPU_RATES`` for CuPy
        arrays and ``CPU_RATES`` for NumPy arrays, as for ``schedule="auto"``.
    backend : str
        As for ``forward``.
    timeout : float
        As for ``forward``.
    **options
        As for ``forward``.

    Returns
    -------
    Prediction
        As `predict` returns it, the same on all ranks. ``schedule=`` takes its ``chosen``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or the ranks disagree.
    RuntimeError
        If another rank refuses the call.
    TimeoutError
        If another rank does not answer.
    UnsupportedError
        For an option that is not supported.

    Examples
    --------
    In a program that ``mpiexec -n 4 python program.py`` runs::

        from mpi4py import MPI
        import tileattn.distributed as dist

        report = dist.explain(q, k, v, MPI.COMM_WORLD, layout="zigzag", causal=True)
        print(report)
    """
    ranks = communicator(comm, timeout, q)

    def check() -> Mapping[str, Any]:
        check_timeout(timeout)
        _check_rates(rates)
        return {"rates": rates}

    given: dict[str, Any] = {"step": "explain", "backend": backend, "check": check}
    call = agreed(q, k, v, ranks, layout, layout_k, options, **given)
    rates = default_rates(call) if rates is None else rates
    return _predicted(workload_of(call), rates, on_gpu=call.on_gpu)


def _predicted(work: Workload, rates: Rates, *, on_gpu: bool) -> Prediction:
    return Prediction(work.ranks, rates, *costs_of(work, rates, on_gpu=on_gpu))


def _on_paper(name: str, layout: Any, length: int, ranks: int) -> Layout:
    equal = np.diff(np.arange(ranks + 1) * length // ranks).tolist()
    found = layout_of(name, layout, equal)
    if found.length != length:
        raise ValueError(f"{name} must have {length} tokens; got {found.length}")
    return found


def _empty(name: str, shape: Any, dtype: Any) -> Any:
    """Return an array of a shape without its memory."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be a NumPy dtype or its name; got {dtype!r}") from None
    if not isinstance(shape, tuple | list):
        raise TypeError(f"{name} must be a shape, as a tuple; got {type(shape).__name__}")
    return np.broadcast_to(np.zeros((), kind), [count(name, n, 0) for n in shape])


def _check_rates(rates: Any) -> None:
    if rates is not None and not isinstance(rates, Rates):
        raise TypeError(
            f"rates must be tileattn.distributed.Rates or None; got {type(rates).__name__}"
        )


def _has_rows(x: Any) -> bool:
    return x is not None and x.shape[2] > 1


def _line(cost: Cost) -> str:
    cells = (
        f"{one.nbytes / 1e6:13,.2f}{one.messages:10,}{1e3 * one.seconds:10,.2f}"
        f"{one.groups:8}{one.share:8.2f}"
        for one in (cost.forward, cost.backward)
    )
    return f"{cost.schedule!s:14}{''.join(cells)}"
