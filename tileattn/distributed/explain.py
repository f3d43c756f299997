"""Which schedule a call takes, and why: the costs of all of them side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from tileattn.call.options import Options
from tileattn.call.problem import Operands, Problem
from tileattn.distributed.call import Call
from tileattn.distributed.comm.connect import check_timeout, communicator
from tileattn.distributed.comm.protocol import TIMEOUT
from tileattn.distributed.layout import Layout, count
from tileattn.distributed.model.cost import CPU_RATES, GPU_RATES, Cost, Rates, cost_of
from tileattn.distributed.model.memory_plan import held_by
from tileattn.distributed.model.workload import Rows, Workload
from tileattn.distributed.schedules.names import Plan, Schedule, every, why_not
from tileattn.distributed.validation import (
    agreed,
    check_supported,
    layout_of,
    parse_with_given_window,
)
from tileattn.distributed.visibility import Visibility

_COLUMNS = ("MB", 13), ("messages", 10), ("ms", 10), ("groups", 8), ("memory", 8)


@dataclass(frozen=True)
class Prediction:
    """The costs of the schedules of a call; ``str()`` of it is a table.

    Parameters
    ----------
    ranks : int
        How many ranks there are.
    rates : Rates
        How fast they compute and send.
    costs : tuple of Cost
        Of each schedule that goes with the call: messages and bytes that a rank sends at most,
        predicted seconds, groups of heads and what a rank holds, of both passes.
    refused : mapping of schedule to str
        Why others do not go with it.
    """

    ranks: int
    rates: Rates
    costs: tuple[Cost, ...]
    refused: Mapping[Schedule, str]

    @property
    def chosen(self) -> Schedule:
        """Schedule that takes the least time for both passes: the first of those that take it."""
        return min(self.costs, key=lambda cost: cost.seconds).schedule

    @property
    def fastest(self) -> tuple[Schedule, Schedule]:
        """Schedules that take the least time forward, and backward: those of ``"auto"``."""
        forward = min(self.costs, key=lambda cost: cost.forward.seconds)
        backward = min(self.costs, key=lambda cost: cost.backward.seconds)
        return forward.schedule, backward.schedule

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
    """Predict what the schedules of a call send and how long they take, for any number of ranks.

    Nothing is sent or computed, and no ranks are needed.

    Parameters
    ----------
    q, k, v : sequence of int
        Shapes of the whole sequence: (B, Hq, Nq, D), (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv).
    ranks : int
        How many ranks share it.
    dtype : dtype
        That of q, k and v.
    layout, layout_k : Layout, str or None
        As for ``forward``; ``"contiguous"`` (the default) gives all ranks as many tokens, or one
        more.
    rates : Rates or None
        How fast ranks compute and send; None is ``CPU_RATES``.
    **options
        As for ``forward``, with all rows of bias and mask.

    Returns
    -------
    Prediction
        The costs of each schedule, and which is chosen.

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

    Causal masks, windows and lengths leave pairs out; ``mask`` and ``mask_mod`` are not looked at.
    On a GPU FLOPs take longer by the share of the time in which work tiles leave SMs idle.
    Messages and bytes are exact. They leave out what all ranks gather, which is little, and the
    second forward pass that ``backward`` runs where scores are large. Heads are computed in groups,
    one after the other, so many that a rank holds little more than its share and each call is
    worth its start; all keys of one group may travel while another is computed. What is held is
    exact where parts are equal and travel all the way, and less elsewhere.

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
    shared = [name for name in ("bias", "mask") if _has_rows(getattr(x, name))]
    _check_rates(rates)
    rates = rates or CPU_RATES
    work = _workload(problem, x, *layouts, shared)
    return _predicted(work, rates, on_gpu=rates.on_gpu)


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
    """Say what each schedule of a call would cost, without running it; all ranks call it.

    Parameters
    ----------
    q, k, v : array
        As for ``forward``.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or cupy.cuda.nccl.NcclCommunicator
        The ranks.
    layout, layout_k : Layout, str or None
        As for ``forward``.
    rates : Rates or None
        How fast ranks compute and send, the same on all; None is ``GPU_RATES`` of arrays on GPUs,
        and else ``CPU_RATES``, by which ``schedule="auto"`` chooses.
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
    return _of_call(agreed(q, k, v, ranks, layout, layout_k, options, **given), rates)


def choose(call: Call, *, backward: bool) -> Schedule:
    """Choose the schedule of a pass; all ranks take the choice of rank 0."""
    chosen: Schedule = call.comm.gather(_of_call(call, None).fastest[backward])[0]
    return chosen


def plans_of(call: Call, schedule: Schedule) -> tuple[Plan, Plan]:
    """Say how both passes of a schedule are divided, the same on all ranks."""
    forward, backward = held_by(_workload_of(call), schedule, on_gpu=call.on_gpu)
    return forward.plan, backward.plan


def _of_call(call: Call, rates: Rates | None) -> Prediction:
    if rates is None:
        rates = GPU_RATES if call.on_gpu else CPU_RATES
    return _predicted(_workload_of(call), rates, on_gpu=call.on_gpu)


def _workload_of(call: Call) -> Workload:
    of_ranks = {"bias": call.bias_rows, "mask": call.mask_rows}
    shared = [name for name, rows in of_ranks.items() if rows]
    layouts = call.blocks.q_layout, call.blocks.k_layout
    return _workload(call.problem, call.operands, *layouts, shared)


def _workload(
    problem: Problem, x: Operands, q_layout: Layout, k_layout: Layout, shared: Sequence[str]
) -> Workload:
    """Leave out the arrays; of those named, each rank has rows of its own."""
    rows = []
    for name in shared:
        B, heads, _, keys = getattr(x, name).shape
        bias, itemsize = name == "bias", getattr(x, name).dtype.itemsize
        if bias:  # it travels in the accumulation dtype
            itemsize = max(itemsize, problem.accum_dtype.itemsize)
        rows.append(Rows(B, heads, keys, itemsize, gradient=bias))
    visibility = Visibility(problem.window, x.kv_lengths, x.q_offset)
    return Workload(problem, visibility, q_layout, k_layout, tuple(rows))


def _predicted(work: Workload, rates: Rates, *, on_gpu: bool) -> Prediction:
    Hkv, ranks = work.problem.Hkv, work.ranks
    reasons = {schedule: why_not(schedule, Hkv, ranks) for schedule in every(Hkv, ranks)}
    costs = (
        cost_of(work, schedule, rates, on_gpu=on_gpu)
        for schedule, why in reasons.items()
        if why is None
    )
    refused = {schedule: why for schedule, why in reasons.items() if why is not None}
    return Prediction(ranks, rates, tuple(costs), refused)


def _on_paper(name: str, layout: Any, length: int, ranks: int) -> Layout:
    equal = np.diff(np.arange(ranks + 1) * length // ranks).tolist()
    found = layout_of(name, layout, equal)
    if found.length != length:
        raise ValueError(f"{name} has {found.length} tokens; it must have {length}")
    return found


def _empty(name: str, shape: Any, dtype: Any) -> Any:
    """Stand in for an array."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype is {dtype!r}; a NumPy dtype or its name is accepted") from None
    if not isinstance(shape, tuple | list):
        raise TypeError(f"{name} is {type(shape).__name__}; its shape is accepted, as a tuple")
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
