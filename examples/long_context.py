"""A long sequence over as many ranks as there are: both passes, time and peak memory.

mpiexec -n 2 python examples/long_context.py
mpiexec -n 8 python examples/long_context.py --length 1048576 --window 4096
torchrun --nproc-per-node 2 examples/long_context.py --length 1048576

Each rank draws and keeps its own tokens only. Heads are computed one after another. Set
TILEATTN_NUM_THREADS to the cores of each rank where a host has several. Under torchrun each rank
has a GPU and computes in float16; its first head takes longer where kernels are compiled for it.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import tileattn.distributed as dist
from tileattn.cli.progress import Progress

MIB = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there, in KiB elsewhere


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--length", type=int, default=8192, help="tokens of the sequence, as 1048576 (8192)")
    add("--window", type=int, help="tokens before it that a query attends to (all)")
    add("--heads", type=int, default=4, help="(4)")
    add("--head-dim", type=int, default=64, help="(64)")
    return parser.parse_args()


class Ranks(NamedTuple):
    """Who shares the sequence, and what each rank has of its own."""

    comm: Any
    rank: int
    size: int
    gather: Callable[[Any], list[Any]]
    array: Callable[[Any], Any]
    now: Callable[[], float]
    peak_mib: Callable[[], float]
    end: Callable[[], None]


def on_cpus() -> Ranks:
    """Join the ranks of MPI."""
    from mpi4py import MPI

    def peak_mib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB

    comm = MPI.COMM_WORLD
    now = time.perf_counter
    return Ranks(
        *(comm, comm.rank, comm.size, comm.allgather, np.asarray, now, peak_mib, lambda: None)
    )


def on_gpus() -> Ranks:
    """Join the ranks of torchrun: each takes a GPU of its host."""
    import cupy
    import torch
    from torch import distributed

    device = int(os.environ["LOCAL_RANK"])
    cupy.cuda.Device(device).use()
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl")
    comm = distributed.group.WORLD

    def gather(x: Any) -> list[Any]:
        found = [None] * comm.size()
        distributed.all_gather_object(found, x)
        return found

    def now() -> float:
        cupy.cuda.get_current_stream().synchronize()
        return time.perf_counter()

    def peak_mib() -> float:
        return float(cupy.get_default_memory_pool().total_bytes() / 2**20)

    def array(x: Any) -> Any:
        return cupy.asarray(x, np.float16)

    end = distributed.destroy_process_group
    return Ranks(comm, comm.rank(), comm.size(), gather, array, now, peak_mib, end)


def main() -> None:
    """Compute causal attention and its gradients on all ranks; print a line for each rank."""
    args, ranks = arguments(), on_gpus() if "LOCAL_RANK" in os.environ else on_cpus()
    # A window leaves all ranks equal work; without one, those of zigzag have it.
    layout = dist.Layout.zigzag(args.length, ranks.size)
    if args.window is not None:
        cuts = np.arange(ranks.size + 1) * args.length // ranks.size
        layout = dist.Layout.contiguous(np.diff(cuts).tolist())
    options: dict[str, Any] = {"causal": True, "layout": layout}
    if args.window is not None:
        options["window"] = args.window, 0
    progress, before = Progress(sys.stdout), ranks.peak_mib()
    times = np.zeros(2)
    for head in range(args.heads):
        rng = np.random.default_rng([head, ranks.rank])
        shape = 4, 1, 1, layout.length_of(ranks.rank), args.head_dim
        q, k, v, dout = ranks.array(rng.standard_normal(shape, np.float32))
        start = ranks.now()
        _, pullback = dist.vjp(q, k, v, ranks.comm, **options)
        middle = ranks.now()
        pullback(dout)
        times += middle - start, ranks.now() - middle
        if ranks.rank == 0:
            progress((head + 1) / args.heads, f"{head + 1} of {args.heads} heads")
    found = ranks.gather((*times, before, ranks.peak_mib()))
    if ranks.rank == 0:
        progress.end()
        print(f"{args.length} tokens, {args.heads} heads of {args.head_dim}, {ranks.size} ranks")
        for rank, (forward, backward, first, peak) in enumerate(found):
            print(
                f"rank {rank}: forward {forward:.2f} s, backward {backward:.2f} s, "
                f"peak memory {peak:.0f} MiB, {peak - first:.0f} of them since the imports"
            )
    ranks.end()


if __name__ == "__main__":
    main()
