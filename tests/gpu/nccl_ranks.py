"""One rank of tests/gpu/test_nccl.py: a process with a GPU of its own.

    python -m tests.gpu.nccl_ranks cupy|torch cases|killed RANK SIZE FOLDER

It names each case before it begins, so that one that hangs is the last, and ends with status 1
where one has failed. Kernels that a case compiles first are on disk for the other ranks, and for
later runs: those of one dtype and option are the same whatever the schedule.
"""

import os
import signal
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn.distributed as dist
from tests.distributed.in_groups import in_groups
from tileattn import Attention, Gradients, reference
from tileattn.distributed import Layout
from tileattn.distributed.comm.connect import communicator
from tileattn.testing import assert_attention_close, error_bound

SECONDS = 60.0
PATIENCE = 5.0  # seconds that a rank waits for one that has ended
B, HQ, HKV, N, D = 2, 4, 2, 200, 64
F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
_ROWS = np.random.default_rng(9)
BIAS = _ROWS.standard_normal((HQ, N, N)).astype(np.float32)
TABLE = _ROWS.standard_normal((HQ, 2 * N)).astype(np.float32)


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, i - j + N] * (b + 1)


def stripes(b: Any, h: Any, i: Any, j: Any, _: Any) -> Any:
    return (i + 3 * j + h + b) % 5 != 0


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (60, 20)},
    "lengths": {"kv_lengths": [110, 41], "causal": True},
    "sinks": {"sinks": np.linspace(-1, 2, HQ, dtype=np.float32), "causal": True},
    "bias": {"bias": BIAS},
    "shared bias": {"bias": BIAS[:, :1]},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "functions": {"score_mod": relative, "mask_mod": stripes, "aux": (TABLE,)},
}

# What the CPU's ranks test is tested there. Here each schedule sends, joins and sums on a stream;
# each kind of array that travels, is cut or summed is there once.
_PLAIN = [(BF16, "causal", schedule) for schedule in ("ring", "gather", "heads")]
CASES: dict[str, list[tuple[np.dtype[Any], str, Any]]] = {
    "torch": [(F32, "causal", "ring"), *_PLAIN, (BF16, "causal", "auto")],
    "cupy": [
        (F32, "causal", "ring"),
        (F32, "sinks", "gather"),
        *_PLAIN,
        (BF16, "full", "ring"),
        (BF16, "window", "ring"),
        (BF16, "lengths", "gather"),
        (BF16, "sinks", "ring"),
        (BF16, "sinks", "heads"),
        (BF16, "bias", "ring"),
        (BF16, "bias", "heads"),
        (BF16, "shared bias", "heads"),
        (BF16, "dropout", "ring"),
        (BF16, "dropout", "heads"),
        (BF16, "functions", "ring"),
        (BF16, "functions", "heads"),
        (BF16, "causal", "auto"),
    ],
}


def started(kind: str, rank: int, size: int, folder: Path) -> Any:
    """Make the communicator, on this rank's GPU."""
    import cupy

    cupy.cuda.Device(rank).use()
    if kind == "torch":
        import torch

        torch.cuda.set_device(rank)
        store = f"file://{folder / 'store'}"
        torch.distributed.init_process_group("nccl", store, rank=rank, world_size=size)
        return torch.distributed.group.WORLD
    from cupy.cuda import nccl

    name = folder / "id"
    if rank == 0:
        import pickle

        (folder / "id.new").write_bytes(pickle.dumps(nccl.get_unique_id()))
        (folder / "id.new").rename(name)
    deadline = time.monotonic() + SECONDS
    while not name.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 has not written the id")
        time.sleep(0.01)
    import pickle

    return nccl.NcclCommunicator(size, pickle.loads(name.read_bytes()), rank)


def layouts(size: int) -> list[tuple[str, Layout]]:
    """Zigzag parts, of whose heads one group is made; and uneven ones, in as many as there are."""
    uneven = Layout.contiguous([17, *(0 for _ in range(size - 2)), N - 17])
    return [("zigzag, one group", Layout.zigzag(N, size)), ("uneven, in groups", uneven)]


def divided(layout_name: str) -> AbstractContextManager[Any]:
    """Divide passes as much as they can be, where a layout's name says so."""
    if not layout_name.endswith("in groups"):
        return nullcontext()
    return in_groups()


def drawn(dtype: Any) -> tuple[list[Any], Any]:
    rng = np.random.default_rng(0)
    shapes = ((B, HQ, N, D), (B, HKV, N, D), (B, HKV, N, D), (B, HQ, N, D), (B, HQ, N))
    *rows, dlse = (rng.standard_normal(shape) for shape in shapes)
    return [x.astype(dtype) for x in rows], dlse.astype(np.float32)


def check(
    comm: Any, dtype: Any, name: str, schedule: Any, layout: Layout, layout_name: str
) -> None:
    """Hold both passes to the oracle, and a second run to the bits of the first."""
    import cupy

    (q, k, v, dout), dlse = drawn(dtype)
    options, link = OPTIONS[name], communicator(comm, SECONDS, cupy.empty(0))
    rank, own = link.rank, dict(OPTIONS[name])
    if "bias" in own and own["bias"].shape[-2] > 1:
        own["bias"] = layout.take(own["bias"], rank)
    own = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in own.items()}
    if "aux" in own:
        own["aux"] = tuple(map(cupy.asarray, own["aux"]))
    *parts, upstream = (cupy.asarray(layout.take(x, rank)) for x in (q, k, v, dout))
    of_lse = cupy.asarray(layout.take(dlse, rank, axis=-1))
    runs = []
    for _ in range(2):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, divided(layout_name):
            given = own | {"layout": layout, "schedule": schedule, "timeout": SECONDS}
            attention, pullback = dist.vjp(parts[0], parts[1], parts[2], comm, **given)
            grads = pullback(upstream, of_lse, deterministic=True)
            found = (*attention, *grads, *(grads.daux or ()))
            runs.append([None if x is None else x.get() for x in found])
    for first, second in zip(*runs, strict=True):
        assert first is None or first.tobytes() == second.tobytes(), "the bits differ"
    out, lse, *of_inputs = (list(x) for x in zip(*link.gather(runs[0]), strict=True))
    attention = Attention(layout.join(out), layout.join(lse, axis=-1))
    dq, dk, dv = (layout.join(x) for x in of_inputs[:3])
    dbias, dsinks = of_inputs[3][0], of_inputs[4][0]
    if "bias" in options and options["bias"].shape[-2] > 1:
        dbias = layout.join(of_inputs[3])
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    expected = reference.forward(q, k, v, **options)
    assert_attention_close(attention, expected, bounds)
    daux = tuple(x[0] for x in of_inputs[5:]) or None
    grads = Gradients(dq, dk, dv, dbias, dsinks, daux)
    assert_attention_close(grads, reference.backward(dout, q, k, v, dlse=dlse, **options), bounds)


def check_tensors(comm: Any, layout: Layout) -> None:
    """Hold tensors and their gradients to the oracle."""
    import torch

    from tileattn.torch import distributed_attention

    distributed: Any = distributed_attention  # called with *tensors

    (q, k, v, dout), _ = drawn(np.float32)
    link = communicator(comm, SECONDS, sys.modules["cupy"].empty(0))
    *leaves, upstream = (
        torch.from_numpy(layout.take(x, link.rank)).cuda() for x in (q, k, v, dout)
    )
    for x in leaves:
        x.requires_grad_()
    for _ in range(2):
        for x in leaves:
            x.grad = None
        out = distributed(*leaves, comm, layout=layout, causal=True, timeout=SECONDS)
        out.backward(upstream)
    own = [x.detach().cpu().numpy() for x in (out, *(x.grad for x in leaves))]
    out, dq, dk, dv = (layout.join(x) for x in zip(*link.gather(own), strict=True))
    bounds = error_bound(q, k, v, dout, causal=True)
    expected = reference.forward(q, k, v, causal=True)
    assert_attention_close(Attention(out, expected.lse.astype(np.float32)), expected, bounds)
    grads = Gradients(dq, dk, dv, None, None)
    assert_attention_close(grads, reference.backward(dout, q, k, v, causal=True), bounds)


def check_errors(comm: Any) -> None:
    """All ranks raise where they disagree, and go on."""
    import cupy

    link = communicator(comm, SECONDS, cupy.empty(0))
    x = cupy.zeros((2, 8, 32), np.float32 if link.rank == 0 else np.float16)
    with pytest.raises(ValueError, match="dtype must be the same on all ranks"):
        dist.forward(x, x, x, comm, timeout=SECONDS)


def check_killed(comm: Any) -> None:
    """A rank whose neighbour has ended says so, and does not wait for good."""
    import cupy

    rank = communicator(comm, SECONDS, cupy.empty(0)).rank
    x = cupy.zeros((HQ, 64, D), np.float32)
    dist.forward(x, x, x, comm, timeout=SECONDS)
    cupy.cuda.get_current_stream().synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    with pytest.raises(TimeoutError, match="the other ranks to take part"):
        dist.forward(x, x, x, comm, causal=True, timeout=PATIENCE)


def cases(kind: str, comm: Any, size: int) -> list[tuple[str, Any]]:
    """Name what is checked, and how."""
    found: list[tuple[str, Any]] = [("errors", lambda: check_errors(comm))]
    for name, layout in layouts(size):
        for case in CASES[kind]:
            found.append((f"{case}, {name}", partial(check, comm, *case, layout, name)))
        if kind == "torch":
            found.append((f"tensors, {name}", partial(check_tensors, comm, layout)))
    return found


def told(line: str) -> None:
    """Say how far the rank is, so that a slow one can be told from one that hangs."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    kind, what, rank, size, folder = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
    start, failed = time.monotonic(), 0
    comm = started(kind, rank, size, Path(folder))
    calls = cases(kind, comm, size) if what == "cases" else [(what, partial(check_killed, comm))]
    for number, (name, call) in enumerate(calls, 1):
        seconds = time.monotonic() - start
        told(f"{seconds:6.1f} s  {number} of {len(calls)}: {name}")
        try:
            call()
        except (Exception, pytest.fail.Exception):  # of any kind: the next case is tried, too
            failed += 1
            traceback.print_exc(limit=-6)
            sys.stderr.flush()
    seconds = time.monotonic() - start
    told(f"{seconds:6.1f} s  {len(calls)} cases, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    status = main()
    os._exit(status)  # a communicator that waits for a rank that has failed would hold up the end
