"""Attention on the tensors of ranks that share a sequence; here ranks are threads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.distributed.threads import on_ranks

torch = pytest.importorskip("torch")

from tileattn import Attention, Gradients, reference  # noqa: E402 - PyTorch may be absent
from tileattn.distributed import Layout  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.testing import assert_attention_close, error_bound  # noqa: E402 - as above
from tileattn.torch import distributed_attention  # noqa: E402 - as above
from tileattn.torch.tensors import array_of  # noqa: E402 - as above

B, HQ, HKV, N, D = 2, 4, 2, 23, 8
INPUTS = ("q", "k", "v", "bias", "sinks", "table")
DTYPES = torch.float64, torch.float32, torch.bfloat16


def learned(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:  # noqa: ARG001 - its form
    return s + table[h, abs(i - j)]


def drawn(dtype: Any) -> dict[str, Any]:
    """Draw random tensors of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]]
    shapes = {"q": (B, HQ, N, D), "k": (B, HKV, N, D), "v": (B, HKV, N, D)}
    shapes |= {"bias": (HQ, N, N), "sinks": (HQ,), "table": (HQ, N), "dout": (B, HQ, N, D)}
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in shapes.items()}


def both(call: Callable[..., Any], given: dict[str, Any], dlse: Any, **more: Any) -> list[Any]:
    """Return the results and gradients of a call."""
    leaves = [given[name].clone().requires_grad_() for name in INPUTS]
    q, k, v, bias, sinks, table = leaves
    options = {"bias": bias, "sinks": sinks, "aux": (table,), "score_mod": learned, "causal": True}
    options |= {"dropout_p": 0.1, "seed": torch.tensor(7), "return_lse": True}
    out, lse = call(q, k, v, **options, **more)
    grads = torch.autograd.grad((out, lse), leaves, (given["dout"], dlse.to(lse.dtype)))
    return [out.detach(), lse.detach(), *grads]


def test_a_layout_takes_and_joins_tensors() -> None:
    layout, x = Layout.zigzag(N, 3), drawn(torch.bfloat16)["q"].requires_grad_()
    parts = [layout.take(x, rank) for rank in range(3)]
    expected = [layout.take(x.detach().float().numpy(), rank) for rank in range(3)]
    for ours, theirs in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(ours.detach().float(), theirs)
    whole = layout.join(parts)
    assert torch.equal(whole, x)
    assert torch.equal(torch.autograd.grad(whole.sum(), x)[0], torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "schedule"), [(1, "ring"), (2, "heads"), (3, "ring")])
def test_results_and_gradients_are_those_of_the_oracle(
    dtype: Any, ranks: int, schedule: str
) -> None:
    whole = drawn(dtype)
    dlse = torch.linspace(-1, 1, B * HQ * N).reshape(B, HQ, N)
    layout = Layout.zigzag(N, ranks)

    def part(x: Any, rank: int, axis: int = -2) -> Any:
        rows = [n for start, stop in layout.parts[rank] for n in range(start, stop)]
        return x.index_select(axis, torch.tensor(rows, dtype=torch.int64))

    def run(comm: Any) -> Any:
        own = whole | {n: part(whole[n], comm.rank) for n in ("q", "k", "v", "bias", "dout")}
        given = {"comm": comm, "layout": layout, "schedule": schedule}
        return both(distributed_attention, own, part(dlse, comm.rank, -1), **given)

    found = on_ranks(ranks, run)
    for x in found:
        if isinstance(x, Exception):
            raise x
    axes = {**dict.fromkeys((0, 2, 3, 4, 5), -2), 1: -1}  # of tokens; others are on all ranks
    joined = []
    for n, parts in enumerate(zip(*found, strict=True)):
        arrays = [array_of(x) for x in parts]
        assert n in axes or all(x.tobytes() == arrays[0].tobytes() for x in arrays)
        joined.append(layout.join(arrays, axes[n]) if n in axes else arrays[0])
    out, lse, dq, dk, dv, dbias, dsinks, dtable = joined
    given = {name: array_of(x) for name, x in whole.items()}
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    options = {"bias": given["bias"], "sinks": given["sinks"], "aux": (given["table"],)}
    options |= {"score_mod": learned, "causal": True, "dropout_p": 0.1, "seed": 7}
    above = array_of(dlse.to(torch.float64 if dtype is torch.float64 else torch.float32))
    bounds = error_bound(q, k, v, dout, dlse=above, **options)
    grads = Gradients(dq, dk, dv, dbias, dsinks, (dtable,))
    expected = reference.backward(dout, q, k, v, dlse=above, **options)
    assert_attention_close(Attention(out, lse), reference.forward(q, k, v, **options), bounds)
    assert_attention_close(grads, expected, bounds)


def test_only_what_is_needed_is_computed() -> None:
    given = drawn(torch.float32)

    def run(comm: Any) -> Any:
        q, k, v = (given[name].clone() for name in "qkv")
        k.requires_grad_()
        out = distributed_attention(q, k, v, comm)
        out.sum().backward()
        with torch.no_grad():
            plain = distributed_attention(q, k, v, comm)
        return out, q.grad, k.grad, plain

    for out, dq, dk, plain in on_ranks(2, run):
        assert dq is None
        assert dk.shape == given["k"].shape
        assert torch.equal(out, plain)
        assert not plain.requires_grad


def test_autocast_and_the_compiler() -> None:
    given = drawn(torch.float32)
    compiled = torch.compile(distributed_attention, backend="eager")

    def run(comm: Any) -> Any:
        q, k, v = (given[name] for name in "qkv")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = distributed_attention(q, k, v, comm)
        return narrow, distributed_attention(q, k, v, comm), compiled(q, k, v, comm)

    ((narrow, plain, again),) = on_ranks(1, run)
    assert narrow.dtype is torch.bfloat16
    assert torch.equal(plain, again)


def test_backward_differentiates_the_function_that_forward_has_read() -> None:
    given = drawn(torch.float64)

    def gradient(comm: Any, factors: list[float]) -> Any:
        """Call with the first factor, and change it to the last one before backward."""
        q, k, v = (given[name].clone().requires_grad_() for name in "qkv")
        factor = factors[0]

        def steeper(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - its form
            return s * (1 + factor * i)

        out = distributed_attention(q, k, v, comm, score_mod=steeper)
        factor = factors[-1]
        return torch.autograd.grad(out.sum(), q)[0]

    changed = on_ranks(2, lambda comm: gradient(comm, [0.5, -3.0]))
    same = on_ranks(2, lambda comm: gradient(comm, [0.5]))
    assert all(map(torch.equal, changed, same))


@pytest.mark.parametrize("ranks", [1, 2])
def test_captured_arrays_are_read_once_and_have_gradients(ranks: int) -> None:
    """Both passes use what forward has read; a captured tensor is the same as one in ``aux``."""
    given = drawn(torch.float64)
    numbers = np.linspace(-1, 1, HQ)

    def run(comm: Any, is_captured: bool) -> list[Any]:
        leaves = [given[name].clone().requires_grad_() for name in ("q", "k", "v", "table")]
        q, k, v, table = leaves
        factor = [0.5]

        def captures(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - its form
            return s * factor[0] + numbers[h] + table[h, abs(i - j) % N]

        def takes(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any) -> Any:
            return s * 0.5 + 0 * b + x[h] + y[h, abs(i - j) % N]

        options: dict[str, Any] = {"score_mod": captures}
        if not is_captured:
            options = {"score_mod": takes, "aux": (torch.from_numpy(numbers), table)}
        out = distributed_attention(q, k, v, comm, **options)
        factor[0] = -10.0
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    results = [on_ranks(ranks, partial(run, is_captured=x)) for x in (True, False)]
    for found, expected in zip(*results, strict=True):
        assert len(found) == 5
        assert all(map(torch.equal, found, expected))


def asks_for_lse(q: Any, k: Any, v: Any, comm: Any) -> Any:
    return distributed_attention(q, k, v, comm, return_lse=comm.rank == 1)


def differentiates_q(q: Any, k: Any, v: Any, comm: Any) -> Any:
    return distributed_attention(q.requires_grad_(comm.rank == 1), k, v, comm)


def differentiates_a_captured_tensor(q: Any, k: Any, v: Any, comm: Any) -> Any:
    x = torch.ones(HQ, N, requires_grad=comm.rank == 1)
    captures = lambda s, b, h, i, j: s + x[h, abs(i - j) % N]  # noqa: ARG005, E731 - its form
    return distributed_attention(q, k, v, comm, score_mod=captures)


@pytest.mark.parametrize(
    ("call", "what", "there", "here"),
    [
        (asks_for_lse, "return_lse", "True", "False"),
        (differentiates_q, "what requires a gradient", "q", "nothing"),
        (differentiates_a_captured_tensor, "what requires a gradient", "aux", "nothing"),
    ],
)
def test_ranks_must_agree(call: Any, what: str, there: str, here: str) -> None:
    found = messages(lambda comm: call(*(drawn(torch.float32)[name] for name in "qkv"), comm))
    message = f"{what} must be the same on all ranks; got {there} on rank 1, and {here} on rank 0"
    assert found == [f"ValueError: {message}"] * 2


@pytest.mark.parametrize(
    "wrong", [{"aux": 3}, {"seed": torch.zeros(2)}, {"return_lse": 1}], ids=str
)
def test_what_one_rank_refuses_all_ranks_refuse(wrong: dict[str, Any]) -> None:
    def run(comm: Any) -> Any:
        q, k, v = (drawn(torch.float32)[name] for name in "qkv")
        return distributed_attention(q, k, v, comm, **(wrong if comm.rank else {}))

    first, second = messages(run)
    (name,) = wrong
    assert second.startswith(("TypeError", "ValueError"))
    assert name in second
    assert first == f"RuntimeError: rank 1 has failed: {second}"


def messages(run: Callable[[Any], Any]) -> list[str]:
    return [f"{type(x).__name__}: {x}" for x in on_ranks(2, run)]


class Elsewhere(torch.Tensor):  # type: ignore[misc,name-defined]  # untyped
    """A tensor that claims to be on a GPU."""

    device = torch.device("cuda:0")


class Mine(torch.Tensor):  # type: ignore[misc,name-defined]  # as above
    """A subclass that may compute its elements."""


def test_tensors_elsewhere_are_refused_on_all_ranks() -> None:
    def run(comm: Any) -> Any:
        q, k, v = (drawn(torch.float32)[name] for name in "qkv")
        return distributed_attention(q, k.as_subclass(Elsewhere) if comm.rank else k, v, comm)

    first, second = messages(run)
    assert second.startswith(
        "ValueError: k must be on the device of q, cpu; got a tensor on cuda:0"
    )
    assert first == f"RuntimeError: rank 1 has failed: {second}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bias": np.zeros((N, N))}, "bias must be a torch.Tensor; got ndarray"),
        ({"aux": [3]}, r"aux\[0\] must be a torch.Tensor; got int"),
        ({"aux": torch.zeros(3)}, r"aux must be a tuple of arrays; .*aux=\(array,\)"),
        ({"seed": torch.tensor(-1), "dropout_p": 0.5}, "seed must be"),
        ({"seed": 1 << 64, "dropout_p": 0.5}, "seed must be"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "alibi_slopes requires a gradient"),
        ({"bias": torch._neg_view(torch.zeros(N, N))}, "bias must hold its elements in memory"),
        (
            {"bias": torch.zeros(N, N).as_subclass(Elsewhere)},
            "bias must be (on the device of q|a plain)",
        ),
        ({"maskk": None, "unknown": 1}, "unknown option 'unknown'"),
        ({"comm": None}, "comm must be an mpi4py communicator, as MPI.COMM_WORLD"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    q, k, v = (drawn(torch.float32)[name] for name in "qkv")

    def run(comm: Any) -> Any:
        return distributed_attention(q, k, v, **({"comm": comm} | given))

    (error,) = on_ranks(1, run)
    with pytest.raises((TypeError, ValueError, UnsupportedError), match=message):
        raise error
