"""Ranks that are processes, with a process group of PyTorch."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn.distributed as dist
from tileattn import Attention, Gradients, reference
from tileattn.distributed import Layout
from tileattn.distributed.comm.connect import communicator
from tileattn.testing import assert_attention_close, error_bound

ROOT = Path(__file__).parents[3]
SECONDS = 120
N = 29

pytest.importorskip("torch.distributed", reason="PyTorch runs the ranks")


def drawn() -> Any:
    return np.random.default_rng(0).standard_normal((4, 2, 12, N, 8), np.float32)


CASES: tuple[tuple[Any, Any], ...] = (
    (np.float32, "ring"),
    (ml_dtypes.bfloat16, "ring"),
    (np.float32, "heads"),
    (np.float32, "pairs"),
    (np.float32, "auto"),
)


def results(group: Any) -> list[Any]:
    """Run both passes on this rank by several schedules, in two dtypes."""
    found = []
    for dtype, name in CASES:
        layout = Layout.zigzag(N, group.size())
        q, k, v, dout = (layout.take(x, group.rank()).astype(dtype) for x in drawn())
        k.flags.writeable = False
        schedule = ("heads", 1 + (group.size() % 2 == 0)) if name == "pairs" else name
        options: dict[str, Any] = {"layout": layout, "schedule": schedule, "causal": True}
        attention, pullback = dist.vjp(q, k, v, group, backend="numpy", **options)
        found.append([*attention, *pullback(dout)[:3]])
    return found


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def failures(group: Any) -> list[str]:
    """Return the errors of ranks that disagree, then of a rank whose peer has ended."""
    q, k, v, _ = drawn()
    own = np.dtype(np.float16 if group.rank() == 1 else np.float32)
    differ = [x.astype(own) for x in (q, k, v)]
    found = [message_of(lambda: dist.forward(differ[0], differ[1], differ[2], group))]
    if group.rank() == 0:
        found += [message_of(lambda: dist.forward(q, k, v, group, timeout=0.2)) for _ in range(2)]
    return found


def tensors(group: Any) -> list[Any]:
    """Compute the gradients of this rank's tensors."""
    import torch

    from tileattn.torch import distributed_attention

    distributed: Any = distributed_attention  # called with *tensors

    *leaves, dout = map(torch.from_numpy, drawn())
    for x in leaves:
        x.requires_grad_()
    *parts, upstream = (x.tensor_split(group.size(), 2)[group.rank()] for x in (*leaves, dout))
    distributed(*parts, group, backend="numpy", causal=True).backward(upstream)
    return [x.grad.numpy() for x in leaves]


def work(rank: int, size: int, store: str, run: Callable[[Any], Any]) -> Any:
    import torch.distributed

    if torch.distributed.is_initialized():  # by an earlier test
        torch.distributed.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    return run(torch.distributed.group.WORLD)


OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """Start processes for the ranks of all tests: each loads PyTorch, which takes seconds."""
    with multiprocessing.get_context("spawn").Pool(4) as made:
        yield made


@pytest.fixture
def on_ranks(pool: Any, tmp_path: Path) -> OnRanks:
    """Return a function that runs another one on every rank and returns the results.

    Ranks wait for one another to join their group, so each runs in a process of its own.
    """

    def run_on(size: int, run: Callable[[Any], Any]) -> list[Any]:
        given = [(rank, size, str(tmp_path / "store"), run) for rank in range(size)]
        found: list[Any] = pool.starmap_async(work, given, chunksize=1).get(SECONDS)
        return found

    return run_on


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_results_are_those_of_one_call(ranks: int, on_ranks: OnRanks) -> None:
    found = on_ranks(ranks, results)
    layout = Layout.zigzag(N, ranks)
    for (dtype, _), parts in zip(CASES, zip(*found, strict=True), strict=True):
        out, lse, *grads = zip(*parts, strict=True)
        attention = Attention(layout.join(out), layout.join(lse, axis=-1))
        dq, dk, dv = (layout.join(x) for x in grads)
        hold(dtype, attention, Gradients(dq, dk, dv, None, None, None))


def test_tensors(on_ranks: OnRanks) -> None:
    ranks = on_ranks(2, tensors)
    dq, dk, dv = (sum(parts) for parts in zip(*ranks, strict=True))  # each has rows of its own
    hold(np.float32, None, Gradients(dq, dk, dv, None, None, None))


def hold(dtype: Any, attention: Attention | None, grads: Gradients) -> None:
    """Compare the results of all ranks, put together, with the oracle."""
    q, k, v, dout = (x.astype(dtype) for x in drawn())
    bounds = error_bound(q, k, v, dout, causal=True)
    expected = reference.backward(dout, q, k, v, causal=True)
    assert_attention_close(grads, expected, bounds)
    if attention is not None:
        assert_attention_close(attention, reference.forward(q, k, v, causal=True), bounds)


def test_ranks_that_disagree_and_one_that_does_not_answer(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, failures)
    message = "dtype must be the same on all ranks; got float16 on rank 1, and float32 on rank 0"
    assert [first[0], *second] == [f"ValueError: {message}"] * 2
    assert first[1].startswith("TimeoutError: waited 0.2 s for rank 1 to send; it has failed, or")
    assert first[2].startswith("RuntimeError: comm must be a new communicator: an earlier call on ")


def test_a_group_of_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    class OfGpu(torch.distributed.ProcessGroup):  # type: ignore[misc,name-defined]  # untyped
        def _get_backend(self, device: Any) -> Any:
            raise RuntimeError(f"there is none for {device}")

    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "nccl")
    with pytest.raises(
        ValueError, match=r"comm must be a process group of gloo, .* got one of nccl"
    ):
        communicator(OfGpu(0, 1), 1.0)


def test_pytorch_is_not_loaded_for_ranks_of_mpi() -> None:
    code = "import sys, tileattn.distributed; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
