"""``tileattn.torch.distributed_attention``: ranks that share a sequence, on tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

import tileattn.distributed as ranks
from tileattn.call.options import DIFFERENTIABLE, SEEDS
from tileattn.call.parse import aux_arrays, check_names
from tileattn.distributed.comm.agreement import on_all, same
from tileattn.distributed.comm.connect import communicator
from tileattn.distributed.comm.failures import CheckedComm
from tileattn.distributed.comm.protocol import TIMEOUT
from tileattn.distributed.schedules.schedule import ScheduleName
from tileattn.expressions.aux_arrays import AuxArrays, check_kind
from tileattn.messages import must_be
from tileattn.results import Attention
from tileattn.torch.functions import expressions_of, functions_of, tensors_of
from tileattn.torch.inputs import refuse_gradients
from tileattn.torch.tensors import array_of, autocast, check_memory, check_tensor, on, tensor_of

_DIFFERENTIABLE = tuple(name for name in DIFFERENTIABLE if name != "aux")  # one tensor each


def distributed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    comm: Any,
    *,
    return_lse: bool = False,
    layout: Any = None,
    layout_k: Any = None,
    schedule: ScheduleName = "ring",
    backend: str = "auto",
    timeout: float = TIMEOUT,
    **options: Any,
) -> Any:
    """Exact attention over a sequence that several ranks share, on tensors; all ranks call it.

    It is differentiable in q, k, v, bias, sinks and aux.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Hq, Nq, D), (Hq, Nq, D) or (Nq, D)
        Queries of this rank; float16, bfloat16, float32 or float64, on the CPU or on this
        rank's GPU.
    k, v : torch.Tensor, shapes (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv), or without leading axes as q
        Keys and values of this rank.
    comm : torch.distributed.ProcessGroup or mpi4py.MPI.Comm
        The ranks; a process group sends tensors on the CPU by gloo, and on GPUs by NCCL.
    return_lse : bool
        Return the logsumexp of each query, too; it is differentiable. The same on all ranks.
    layout, layout_k : tileattn.distributed.Layout, str or None
        The tokens of each rank, as for ``tileattn.distributed.forward``.
    schedule : str or (str, int)
        As for ``tileattn.distributed.forward``.
    backend : str
        As for ``tileattn.forward``.
    timeout : float
        Seconds after which a rank that waits for another raises TimeoutError.
    **options
        The options of ``tileattn.distributed.forward``, with tensors instead of arrays.

    Returns
    -------
    torch.Tensor, shape (B, Hq, Nq, Dv), or Attention
        The output of this rank's queries, or with ``return_lse`` the pair ``(out, lse)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or the ranks disagree; they must also agree on which
        inputs require a gradient.
    RuntimeError
        If another rank refuses the call; the message says which, and why.
    TimeoutError
        If another rank does not answer.
    UnsupportedError
        For an option that is not supported, or a tensor that is sparse or nested.

    Notes
    -----
    All ranks take part in the backward pass, in the same order of calls. Only the gradients that
    autograd needs are computed. The gradients of sinks, aux and a bias that all ranks share are
    already summed over the ranks. Tensors share their memory with the library. ``torch.compile``
    does not compile the call. Autocast converts q, k and v as it does for ``attention``.

    Examples
    --------
    In a program that ``torchrun --nproc-per-node 4 program.py`` runs::

        import torch.distributed as dist
        from tileattn.torch import distributed_attention

        dist.init_process_group("gloo")
        out = distributed_attention(q, k, v, dist.group.WORLD, layout="zigzag", causal=True)
        out.square().mean().backward()
    """
    rows = {"q": q, "k": k, "v": v}
    how = {"layout": layout, "layout_k": layout_k, "schedule": schedule, "backend": backend}
    return _attend(rows, comm, return_lse, how | {"timeout": timeout}, options)


# Dynamo traces the function it is given even if that is disabled, but not the disabled functions
# which that one calls.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # PyTorch's
def _attend(
    rows: Mapping[str, Any],
    comm: Any,
    return_lse: bool,
    how: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    given = {**rows, **{name: x for name, x in options.items() if x is not None}}
    q = rows["q"]
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    with on(device):
        comm = communicator(comm, how["timeout"], array_of(q) if device.type == "cuda" else None)
        inputs, given = _agreed(comm, given, return_lse, device)
    given |= {**how, "comm": comm, "device": device}
    names, tensors = zip(*inputs, strict=True)
    result = Attention(*_Shared.apply(given, return_lse, names, *tensors))
    return result if return_lse else result.out


class _Shared(torch.autograd.Function):  # type: ignore[misc]  # untyped
    """Both passes for autograd; ``names`` are the names of the tensors."""

    @staticmethod
    def forward(
        ctx: Any, given: Mapping[str, Any], with_lse: bool, names: Sequence[str], *tensors: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.given, ctx.with_lse, ctx.names = dict(given), with_lse, names
        ctx.device = ctx.given.pop("device")
        with on(ctx.device):
            found = ranks.forward(**ctx.given, **_arrays(names, tensors))
            out, lse = map(tensor_of, found)
        ctx.save_for_backward(out, lse, *tensors)
        if not with_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # PyTorch's
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        rows = {"dout": dout, "out": out, "lse": lse} | ({"dlse": dlse} if ctx.with_lse else {})
        needed = zip(ctx.names, ctx.needs_input_grad[3:], strict=True)
        wrt = sorted({name for name, needs in needed if needs})
        more = {"wrt": wrt, "deterministic": torch.are_deterministic_algorithms_enabled()}
        with on(ctx.device):
            given = ctx.given | {name: array_of(x) for name, x in rows.items()}
            grads = ranks.backward(**given, **_arrays(ctx.names, tensors), **more)
            found = {name: [getattr(grads, f"d{name}")] for name in _DIFFERENTIABLE}
            found["aux"] = list(grads.daux or [None] * len(tensors))
            each = (found[name].pop(0) for name in ctx.names)
            tensors = [None if x is None else tensor_of(x) for x in each]
        return None, None, None, *tensors


Inputs = list[tuple[str, torch.Tensor]]


def _agreed(
    comm: CheckedComm, given: Mapping[str, Any], return_lse: bool, device: torch.device
) -> tuple[Inputs, dict[str, Any]]:
    """Return the named tensors that may have a gradient, and the library's options.

    All ranks check their arguments, and compare which inputs require a gradient. On GPUs they
    compare once for each signature.
    """
    kept: list[tuple[Inputs, dict[str, Any]]] = []
    kind = "tensors", tuple((name, *map(_kind, _each(x))) for name, x in given.items()), return_lse
    given = _read(given, device)

    def checked() -> dict[str, str]:
        if not isinstance(return_lse, bool):
            raise TypeError(must_be("return_lse", "True or False", return_lse))
        if isinstance(given.get("aux"), AuxArrays):
            given["aux"] = tensors_of(given["aux"], device)
        _check(given)
        kept.append(_divided(given))
        return {"return_lse": str(return_lse), "what requires a gradient": _needed(given)}

    known = comm.validated if comm.validated is not None else {}
    if (*kind, _needed(given)) in known:
        checked()
    else:
        same(on_all(comm, "tileattn.torch.distributed_attention", checked))
        known[*kind, _needed(given)] = None
    return kept[0]


def _divided(given: Mapping[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """Divide the arguments into tensors that may have a gradient, and the library's options."""
    others = dict(given)
    qkv = zip("qkv", autocast(*(others.pop(name) for name in "qkv")), strict=True)
    inputs = [*qkv, *((n, others.pop(n)) for n in _DIFFERENTIABLE if n in others)]
    aux = others.pop("aux", ())
    inputs += [("aux", x) for x in aux]
    return inputs, {name: _converted(name, x) for name, x in others.items()}


def _read(given: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Replace functions by their expressions; captured arrays join ``aux``.

    A function that cannot be traced stays, so that the later check raises its error on all ranks.
    """
    functions = functions_of(given)
    if not functions:
        return dict(given)
    try:
        aux = aux_arrays(given)
        for name, x in aux.items():
            check_kind(name, x)
        nodes, arrays = expressions_of(functions, tuple(aux.values()), device)
    except Exception:  # whatever a function raises
        return dict(given)
    return {**given, **nodes, "aux": arrays}


def _needed(given: Mapping[str, Any]) -> str:
    """Name the inputs that require a gradient."""
    if not torch.is_grad_enabled():
        return "nothing"
    found = {n for n, x in given.items() for y in _each(x) if getattr(y, "requires_grad", False)}
    return ", ".join(sorted(found)) or "nothing"


def _each(x: Any) -> Sequence[Any]:
    return x if isinstance(x, tuple | list) else (x,)


def _kind(x: Any) -> Any:
    return type(x), getattr(x, "shape", None), getattr(x, "dtype", None)


def _arrays(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Convert tensors to arguments of the library."""
    given: dict[str, Any] = {}
    for name, x in zip(names, map(array_of, tensors), strict=True):
        given[name] = (*given.get("aux", ()), x) if name == "aux" else x
    return given


def _check(given: Mapping[str, Any]) -> None:
    """Check the tensors; the library checks the rest."""
    check_names({name: x for name, x in given.items() if name not in ("q", "k", "v")})
    device = getattr(given["q"], "device", None)
    for name, x in {**given, **aux_arrays(given)}.items():
        differentiable = name in _DIFFERENTIABLE or name.startswith("aux[")
        if differentiable or isinstance(x, torch.Tensor):
            check_tensor(name, x, device if differentiable else None, kinds=("cpu", "cuda"))
            check_memory(name, x)
        if isinstance(x, torch.Tensor) and not differentiable:
            refuse_gradients({name: x})


def _converted(name: str, x: Any) -> Any:
    """Convert an option to what the library takes."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.item() if name in SEEDS and x.numel() == 1 else array_of(x)
