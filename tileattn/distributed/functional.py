"""``forward``, ``backward`` and ``vjp`` with a communicator and layouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from tileattn.call.options import Options, wanted
from tileattn.call.parse import check_array, four_axes
from tileattn.distributed.call import gradients_of
from tileattn.distributed.comm.connect import check_timeout, communicator
from tileattn.distributed.comm.failures import CheckedComm
from tileattn.distributed.comm.protocol import TIMEOUT
from tileattn.distributed.model.planner import plan_passes
from tileattn.distributed.schedules.passes import Passes
from tileattn.distributed.schedules.schedule import ScheduleName, check_divisible, check_known
from tileattn.distributed.validated_calls import (
    ValidatedCall,
    recall,
    remember,
    signature_of,
    with_arrays,
)
from tileattn.distributed.validation import agreed
from tileattn.expressions.functions import read_valid_functions
from tileattn.results import Attention, Gradients


def forward(
    q: Any,
    k: Any,
    v: Any,
    comm: Any,
    *,
    layout: Any = None,
    layout_k: Any = None,
    schedule: ScheduleName = "ring",
    backend: str = "auto",
    timeout: float = TIMEOUT,
    **options: Unpack[Options],
) -> Attention:
    """Compute exact attention over a sequence that ranks share; all ranks call it.

    Parameters
    ----------
    q : array, shape (B, Hq, Nq, D), (Hq, Nq, D) or (Nq, D)
        Queries of this rank: NumPy arrays, or CuPy arrays on its GPU, of float16, bfloat16,
        float32 or float64.
    k, v : array, shapes (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv), or without leading axes as q
        Keys and values of this rank. The lengths may differ between ranks, and may be 0.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or cupy.cuda.nccl.NcclCommunicator
        The ranks. MPI and gloo process groups send NumPy arrays; an NcclCommunicator and NCCL
        process groups send CuPy arrays.
    layout : Layout, str or None
        Which tokens each rank holds. ``"contiguous"`` (the default): consecutive parts in rank
        order, as long as the arrays. ``"zigzag"``: `Layout.zigzag`, with which a causal mask gives
        all ranks equal work.
    layout_k : Layout, str or None
        Layout of the keys; None is ``layout``.
    schedule : str or (str, int)
        ``"ring"`` (the default): keys and values travel from rank to rank. ``"heads"`` (Ulysses):
        an all-to-all exchanges tokens for heads; the number of ranks must divide the key heads.
        ``("heads", n)``: groups of n ranks exchange heads, and keys travel in a ring from group to
        group; n must divide the number of ranks and of key heads. ``"gather"``: an all-gather of
        the keys and values that a rank attends to, which needs memory for all of them. ``"auto"``:
        the schedule that `predict` expects to be fastest for the pass, with ``GPU_RATES`` or
        ``CPU_RATES``. The ring is the default: it supports every call, and its results do not
        depend on a cost model.
    backend : str
        As for ``tileattn.forward``; it computes each block.
    timeout : float
        Seconds that a rank waits for another before it raises TimeoutError; positive and finite.
        With CuPy arrays only the first call with a signature waits, to compare arguments.
    **options
        As for ``tileattn.forward``, the same on all ranks. Indices, positions and lengths refer to
        the whole sequence. ``bias`` and ``mask`` have the rows of this rank's queries and the
        columns of all keys, in sequence order. ``block_mask``, ``tree_mask``, packed
        sequences and pages are not
        supported; ``mask_mod`` is.

    Returns
    -------
    Attention
        ``(out, lse)`` of this rank's queries.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or the ranks disagree; then no keys have been sent.
    RuntimeError
        If another rank refuses the call; the message names the rank and the reason. Also if an
        earlier call on the communicator failed between its messages: then all ranks must create a
        new communicator.
    TimeoutError
        If another rank does not answer. The arrays of pending messages are kept until the messages
        are complete, and the communicator must not be used again.
    UnsupportedError
        For an option that is not supported.

    Notes
    -----
    In a ring, keys and values travel to the last rank that attends to them, while each rank
    computes. Results over the keys of different ranks are merged as in ``tileattn.merge``. Partial
    results of 16-bit arrays are kept in float32 and rounded once. With the same ranks and layouts
    results are bitwise reproducible.

    Heads are computed in groups, one after the other, and buffers hold one group. So a rank needs
    little more than its share of the memory of one call; ``predict`` returns how much.

    References
    ----------
    Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, arXiv:2310.01889;
    Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509;
    Fang and Zhao, USP: A Unified Sequence Parallelism Approach, arXiv:2405.07719.

    Examples
    --------
    In a program that ``mpiexec -n 4 python program.py`` runs::

        from mpi4py import MPI
        import tileattn.distributed as dist

        layout = dist.Layout.zigzag(len(tokens), MPI.COMM_WORLD.size)
        out, lse = dist.forward(q, k, v, MPI.COMM_WORLD, layout=layout, causal=True)
    """
    options = read_valid_functions(options)
    ranks = communicator(comm, timeout, q)
    given: dict[str, Any] = {"layout": layout, "layout_k": layout_k, "schedule": schedule}
    given |= {"backend": backend, "timeout": timeout}
    call, passes = _validated("forward", (q, k, v), ranks, options, **given)
    with ranks.in_step():
        found = passes.forward(call)
    lead = (0,) * (4 - q.ndim)
    return Attention(found.out[lead], found.lse[lead])


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    comm: Any,
    *,
    dlse: Any | None = None,
    wrt: Sequence[str] | None = None,
    layout: Any = None,
    layout_k: Any = None,
    schedule: ScheduleName = "ring",
    backend: str = "auto",
    deterministic: bool = False,
    timeout: float = TIMEOUT,
    **options: Unpack[Options],
) -> Gradients:
    """Compute the gradients of ``forward``; all ranks call it.

    Parameters
    ----------
    dout : array, shape and dtype of out
        Upstream gradient of this rank's ``out``.
    q, k, v : array
        As given to ``forward``.
    out, lse : array
        As returned by ``forward``.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or cupy.cuda.nccl.NcclCommunicator
        The ranks.
    dlse : array, shape and dtype of lse, or None
        Upstream gradient of this rank's ``lse``; on all ranks, or on none.
    wrt : sequence of str or None
        As for ``tileattn.backward``.
    layout, layout_k : Layout, str or None
        As for ``forward``.
    schedule : str or (str, int)
        As for ``forward``.
    backend : str
        As for ``forward``.
    deterministic : bool
        As for ``tileattn.backward``: bitwise reproducible. On a CPU gradients always are.
    timeout : float
        As for ``forward``.
    **options
        The same as ``forward`` was given.

    Returns
    -------
    Gradients
        Gradients of this rank's q, k and v. The gradients of sinks, aux and a bias without rows of
        its own on each rank are summed over the ranks, and are the same on all ranks.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or the ranks disagree; then no keys have been sent.
    RuntimeError
        If another rank refuses the call.
    TimeoutError
        If another rank does not answer.
    UnsupportedError
        For an option that is not supported.

    Notes
    -----
    In a ring, dk and dv follow the keys and values from rank to rank and are summed on the way, in
    the accumulation dtype and always in the same order.
    """
    options = read_valid_functions(options)
    ranks = communicator(comm, timeout, q)

    def requested() -> frozenset[str]:
        asked = wanted(wrt, options)
        return frozenset(gradients_of(options)) if asked is None else asked

    def check() -> Mapping[str, Any]:
        if not isinstance(deterministic, bool | np.bool_):
            raise TypeError(f"deterministic must be True or False; got {deterministic!r}")
        check_array("out", out, (*q.shape[:-1], v.shape[-1]), q.dtype)
        check_array("dout", dout, out.shape, out.dtype)
        wide = np.dtype("f8" if q.dtype.itemsize == 8 else "f4")
        for name, x in (("lse", lse), ("dlse", dlse)):
            if x is not None:
                check_array(name, x, q.shape[:-1], wide)
        return {
            "deterministic": bool(deterministic),
            "wrt": sorted(requested()),
            "dlse": None if dlse is None else "given",
        }

    given: dict[str, Any] = {"layout": layout, "layout_k": layout_k, "schedule": schedule}
    given |= {"backend": backend, "timeout": timeout}
    given |= {"deterministic": deterministic, "wrt": wrt, "check": check}
    arrays = q, k, v, dout, out, lse, dlse
    call, passes = _validated("backward", arrays, ranks, options, **given)
    rows = call.problem.B, call.problem.Hq, call.problem.Nq
    saved = Attention(four_axes(out), lse.reshape(rows))
    dlse = None if dlse is None else dlse.reshape(rows)
    with ranks.in_step():
        grads = passes.backward(call, four_axes(dout), saved, dlse, requested())
    of_rank = {
        name: None if x is None else x.reshape(like.shape)
        for name, x, like in zip(("dq", "dk", "dv"), grads[:3], (q, k, v), strict=True)
    }
    return grads._replace(**of_rank)


def vjp(
    q: Any, k: Any, v: Any, comm: Any, **options: Any
) -> tuple[Attention, Callable[..., Gradients]]:
    """Compute ``forward``, and return a function for its gradients, with the same options.

    Parameters
    ----------
    q, k, v : array
        As for ``forward``.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or cupy.cuda.nccl.NcclCommunicator
        The ranks.
    **options
        As for ``forward``, including layouts and backend, for both passes.

    Returns
    -------
    attention : Attention
        As returned by ``forward``.
    pullback : callable
        ``pullback(dout, dlse=None, wrt=None, *, deterministic=False)`` returns ``Gradients``, as
        ``backward`` does; all ranks call it.
    """
    options = read_valid_functions(options)
    attention = forward(q, k, v, comm, **options)

    def pullback(
        dout: Any,
        dlse: Any | None = None,
        wrt: Sequence[str] | None = None,
        *,
        deterministic: bool = False,
    ) -> Gradients:
        """Compute the gradients of the inputs; see ``backward``."""
        given = options | {"dlse": dlse, "wrt": wrt, "deterministic": deterministic}
        return backward(dout, q, k, v, *attention, comm, **given)

    return attention, pullback


def _validated(
    step: str,
    arrays: tuple[Any, ...],
    comm: CheckedComm,
    options: Options,
    *,
    layout: Any,
    layout_k: Any,
    schedule: ScheduleName,
    backend: str,
    timeout: float,
    deterministic: bool = False,
    wrt: Any = None,
    check: Callable[[], Mapping[str, Any]] = dict,
) -> ValidatedCall:
    """Return this rank's call and the passes of its schedule; all ranks have validated it.

    ``arrays`` start with q, k and v. ``check`` validates the other arguments of the step, and
    returns those that must be the same on all ranks.
    """
    q, k, v, *_ = arrays
    others = step, layout, layout_k, backend, schedule, deterministic, wrt
    signature = signature_of(comm, arrays, others, options)
    known = recall(comm, signature)
    if known is not None:
        check_timeout(timeout)
        return known._replace(call=with_arrays(known.call, q, k, v, options))

    def checked() -> Mapping[str, Any]:
        check_timeout(timeout)
        check_known(schedule)
        return {"schedule": schedule, **check()}

    given: dict[str, Any] = {"step": step, "backend": backend, "check": checked}
    call = agreed(q, k, v, comm, layout, layout_k, options, **given)
    call = replace(call, deterministic=bool(deterministic))
    check_divisible(schedule, call.problem.Hkv, comm.size)
    plans = plan_passes(call, schedule, backward=step == "backward")
    known = ValidatedCall(call, Passes(call, *plans))
    remember(comm, signature, known)
    return known
