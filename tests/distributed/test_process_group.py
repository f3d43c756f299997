"""The same through a process group of PyTorch, with processes."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
import tileattn.distributed as dist
from tileattn.distributed import Layout
from tileattn.distributed.comm import communicator

ROOT = Path(__file__).parents[2]
SECONDS = 120
N = 29

pytest.importorskip("torch.distributed")


def drawn() -> Any:
    return np.random.default_rng(0).standard_normal((4, 2, 6, N, 8), np.float32)


def results(group: Any) -> list[Any]:
    """Both passes of this rank by both schedules, in two dtypes."""
    found = []
    for dtype, schedule in ((np.float32, "ring"), (ml_dtypes.bfloat16, "ring"), ("f4", "heads")):
        layout = Layout.zigzag(N, group.size())
        q, k, v, dout = (layout.take(x, group.rank()).astype(dtype) for x in drawn())
        k.flags.writeable = False
        options: dict[str, Any] = {"layout": layout, "schedule": schedule, "causal": True}
        attention, pullback = dist.vjp(q, k, v, group, backend="numpy", **options)
        found.append([x.astype(np.float32) for x in (attention.out, *pullback(dout)[:3])])
    return found


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def failures(group: Any) -> list[str]:
    """What ranks say that disagree, then of one that fails: the first waits, the last has ended."""
    q, k, v, _ = drawn()
    own = np.dtype(np.float16 if group.rank() == 1 else np.float32)
    differ = [x.astype(own) for x in (q, k, v)]
    found = [message_of(lambda: dist.forward(differ[0], differ[1], differ[2], group))]
    if group.rank() == 0:
        found.append(message_of(lambda: dist.forward(q, k, v, group, timeout=0.2)))
    return found


def tensors(group: Any) -> Any:
    """The gradient of this rank's queries, from the tensors of a process group."""
    import torch

    from tileattn.torch import distributed_attention

    q, k, v = (torch.from_numpy(x).requires_grad_() for x in drawn()[:3])
    parts = [x.tensor_split(group.size(), 2)[group.rank()] for x in (q, k, v)]
    distributed_attention(*parts, group, backend="numpy", causal=True).square().sum().backward()
    return q.grad.numpy()


def work(rank: int, size: int, store: str, run: Callable[[Any], Any]) -> Any:
    import torch.distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    return run(torch.distributed.group.WORLD)


def on_ranks(size: int, run: Callable[[Any], Any], store: Path) -> list[Any]:
    """Run a function on every rank, each a process; give what they return."""
    with multiprocessing.get_context("spawn").Pool(size) as pool:
        given = [(rank, size, str(store), run) for rank in range(size)]
        return pool.starmap_async(work, given, chunksize=1).get(SECONDS)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_are_those_of_one_call(ranks: int, tmp_path: Path) -> None:
    found = on_ranks(ranks, results, tmp_path / "store")
    q, k, v, dout = drawn()
    whole, pullback = tileattn.vjp(q, k, v, causal=True, backend="numpy")
    expected = (whole.out, *pullback(dout)[:3])
    layout = Layout.zigzag(N, ranks)
    for parts, tolerance in zip(zip(*found, strict=True), (1e-5, 5e-2, 1e-5), strict=True):
        for of_ranks, x in zip(zip(*parts, strict=True), expected, strict=True):
            np.testing.assert_allclose(layout.join(of_ranks), x, tolerance, tolerance)


def test_tensors(tmp_path: Path) -> None:
    q, k, v, _ = drawn()
    whole, pullback = tileattn.vjp(q, k, v, causal=True, backend="numpy")
    total = sum(on_ranks(2, tensors, tmp_path / "store"))  # each has the rows of its own
    np.testing.assert_allclose(total, pullback(2 * whole.out).dq, rtol=1e-5, atol=1e-5)


def test_ranks_that_disagree_and_one_that_does_not_answer(tmp_path: Path) -> None:
    first, second = on_ranks(2, failures, tmp_path / "store")
    message = "dtype is float16 on rank 1, and float32 on rank 0; all ranks give the same"
    assert [first[0], *second] == [f"ValueError: {message}"] * 2
    assert first[1].startswith("TimeoutError: waited 0.2 s for rank 1 to send; it has failed, or")


def test_a_group_of_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    class OfGpu(torch.distributed.ProcessGroup):  # type: ignore[misc,name-defined]  # untyped
        def _get_backend(self, device: Any) -> Any:
            raise RuntimeError(f"there is none for {device}")

    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "nccl")
    with pytest.raises(ValueError, match="comm is a process group of nccl; one of gloo is accepte"):
        communicator(OfGpu(0, 1), 1.0)


def test_pytorch_is_not_loaded_for_ranks_of_mpi() -> None:
    code = "import sys, tileattn.distributed; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
